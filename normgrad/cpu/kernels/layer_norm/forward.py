"""LayerNorm forward: the kernel `layer_norm`.

Threads take blocks of rows. Of up to TILE short rows, or of one long row, the moments come first, then the outputs,
while the rows are in a cache.
"""

import numpy as np

from normgrad.cpu import limits
from normgrad.cpu.compile.jit import device, inline, kernel
from normgrad.cpu.descriptors import LayerNormForward
from normgrad.cpu.intrinsics.memory import fetch_add, item_size, load, stack_space, store
from normgrad.cpu.intrinsics.pairs import is_bfloat16, load_pair, load_pair_first, store_pair_first
from normgrad.cpu.intrinsics.vectors import fma, scaled, splat_f32, store_sums, vload, vstore
from normgrad.cpu.kernels.common.lanes import store_element, to_lanes
from normgrad.cpu.kernels.common.reduce import about_mean, lane_moments, moments, shift_of
from normgrad.cpu.kernels.common.tensors import is_streamed, store_result
from normgrad.cpu.kernels.common.work import items_in_order
from normgrad.cpu.kernels.copy import copy_rows
from normgrad.cpu.kernels.layer_norm.rows import row_address, uniform_rows
from normgrad.cpu.tags import F32, F64

_sums, _lanes = stack_space(2 * limits.TILE * 8), stack_space(limits.TILE * 2 * 16 * 8)


@inline
def _pair(dtype, desc, v, j, k):
    """Compute 32 columns; k = (mean, rstd, what rounding took off rstd, what it took off the mean)."""
    a, b = scaled(dtype, v[0] - k[0], k[1], k[2], k[3]), scaled(dtype, v[1] - k[0], k[1], k[2], k[3])
    weight, bias = desc.weight_lanes, desc.bias_lanes
    return (
        fma(a, vload(F32, weight, j), vload(F32, bias, j)),
        fma(b, vload(F32, weight, j + 16), vload(F32, bias, j + 16)),
    )


@device
def normalise_row(dtype, desc, x, y, mean, rstd):
    """Compute y = ((x - mean)*rstd + rest)*weight + bias.

    The rest is what rounding the mean to float32 takes off it, for rows far from zero. Stores of a long row begin at
    its first cache line; the columns before are stored with a mask. bfloat16 rows begin at column 0, as the lane order
    of their weights does.
    """
    high, factor = np.float32(mean), np.float32(rstd)
    rest, low = np.float32((high - mean) * rstd), np.float32(rstd - factor)
    k, n, size = (splat_f32(high), splat_f32(factor), splat_f32(low), splat_f32(rest)), desc.columns, item_size(dtype)
    head = (-y & 63) // size if n * size >= limits.ALIGNED_ROW and not is_bfloat16(dtype) else 0
    last = head + ((n - head) & ~31)
    if head > 0:
        a, b = _pair(dtype, desc, load_pair_first(dtype, x, 0, head), 0, k)
        store_pair_first(dtype, y, 0, a, b, head)
    stream = is_streamed(desc.is_large, y + head * size, n * size)
    for j in range(head, last, 32):
        a, b = _pair(dtype, desc, load_pair(dtype, x, j), j, k)
        store_result(dtype, y, j, a, b, 32, stream)
    if last < n:
        a, b = _pair(dtype, desc, load_pair_first(dtype, x, last, n - last), last, k)
        store_result(dtype, y, last, a, b, n - last, stream)


@device
def sum_tile(dtype, x, pitch, rows, n, sums):
    """Compute the sums and M2 of up to TILE short rows, all in flight before the lanes of the first are added up."""
    lanes = _lanes()
    for r in range(rows):
        s, q = lane_moments(dtype, x + r * pitch, n, shift_of(dtype, x + r * pitch))
        vstore(F64, lanes, 32 * r, s)
        vstore(F64, lanes, 32 * r + 16, q)
    for k in range(0, 32, 16):  # of rows that are not there nothing is read
        a, b = vload(F64, lanes, k), vload(F64, lanes, k + 32)
        store_sums(sums + 2 * k, a, b, vload(F64, lanes, k + 64), vload(F64, lanes, k + 96))
    for r in range(rows):
        shift = np.float64(shift_of(dtype, x + r * pitch))
        total, squares = about_mean(load(F64, sums, r), load(F64, sums, limits.TILE + r), n, shift)
        store(F64, sums, r, total)
        store(F64, sums, limits.TILE + r, squares)


@device
def forward_rows(dtype, desc, row, rows, x, x_pitch, y, y_pitch):
    """Process up to TILE rows, or one long row: the moments of all, then the output of each."""
    n, sums, total, squares = desc.columns, _sums(), 0.0, 0.0
    together = 0 < n <= limits.TOGETHER_COLUMNS
    if together:
        sum_tile(dtype, x, x_pitch, rows, n, sums)
    elif n > 0:
        total, squares = moments(dtype, x, n, item_size(dtype))
    for r in range(rows):
        if together:
            total, squares = load(F64, sums, r), load(F64, sums, limits.TILE + r)
        mean, variance = total / n, squares / n
        rstd = 1.0 / np.sqrt(variance + desc.eps)
        store_element(desc.mean, row + r, mean)
        store_element(desc.rstd, row + r, rstd)
        normalise_row(dtype, desc, x + r * x_pitch, y + r * y_pitch, mean, rstd)


@device
def order_parameters(dtype, desc):
    """Store weight and bias in lane order, by one thread."""
    for _ in items_in_order(desc.parameter_phase, 1):
        to_lanes(dtype, True, desc.weight, 1.0, desc.weight_lanes, 0, desc.padded_columns, desc.columns)
        to_lanes(dtype, True, desc.bias, 0.0, desc.bias_lanes, 0, desc.padded_columns, desc.columns)


@device
def process_block(dtype, desc, block, scratch):
    """Process the rows of a block, strided ones through contiguous copies."""
    n, size, pitch = desc.columns, item_size(dtype), desc.staged_pitch
    row, last = block * desc.block_rows, min(desc.rows, (block + 1) * desc.block_rows)
    at_once = limits.TILE if n <= limits.TOGETHER_COLUMNS else 1
    while row < last:
        rows = uniform_rows(desc.row_axes, row, min(limits.STAGED_ROWS, last - row))
        source = x = row_address(desc.input, desc.row_axes, row)
        target = y = row_address(desc.output, desc.row_axes, row)
        xp, yp = desc.input.strides.inner, desc.output.strides.inner
        if pitch:
            copy_rows(dtype, dtype, x, (xp // size, desc.input.column_stride), scratch, (pitch // size, 1), rows, n)
            source, xp, target, yp = scratch, pitch, scratch + limits.STAGED_ROWS * pitch, pitch
        for r in range(0, rows, at_once):
            some = min(at_once, rows - r)
            forward_rows(dtype, desc, row + r, some, source + r * xp, xp, target + r * yp, yp)
        if pitch:
            strides = desc.output.strides.inner // size, desc.output.column_stride
            copy_rows(dtype, dtype, target, (pitch // size, 1), y, strides, rows, n)
        row += rows


@kernel
def layer_norm(desc: LayerNormForward, dtype):
    slot = fetch_add(desc.slot, 1)
    if slot >= desc.slots:
        return
    order_parameters(dtype, desc)
    for block in items_in_order(desc.block_phase, desc.blocks):
        process_block(dtype, desc, block, desc.scratch + slot * desc.scratch_size)
