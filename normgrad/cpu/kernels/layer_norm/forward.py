"""LayerNorm forward: `layer_norm(desc, kind)`: y, mean and rstd of blocks of rows.

LayerNorm's output of a row, from its statistics.

Weight and bias are float32 in the workspace; before bfloat16 data all even columns come first, then all odd ones, so
that pairs can begin at any column: at the one from which on whole cache lines of the result are written.
"""

import numpy as np

from normgrad.cpu.compile.jit import device, in_place, kernel
from normgrad.cpu.fields.layer_norm_forward import (
    BLOCK_ROWS,
    BLOCKS,
    COLUMNS,
    DONE,
    DONE_VECTORS,
    EPS_BITS,
    INPUT,
    MEAN,
    MEAN_CODE,
    NEXT,
    NEXT_VECTORS,
    ORDERED_BIAS,
    ORDERED_WEIGHT,
    OUTER_SHAPE,
    OUTPUT,
    PITCH,
    ROWS,
    RSTD,
    RSTD_CODE,
    SCRATCH,
    SCRATCH_SIZE,
    SLOT,
    SLOTS,
    STAGED,
    STREAM,
    VECTORS_CODE,
    WEIGHT,
    WEIGHT_STRIDE,
)
from normgrad.cpu.fields.row_sizes import STAGED_ROWS, TILE
from normgrad.cpu.intrinsics.memory import (
    fetch_add,
    item_size,
    load_f64,
    stack_space,
    start_of,
    store,
    store_f64,
    wait_until,
)
from normgrad.cpu.intrinsics.pairs import (
    is_bfloat,
    load_ordered,
    load_pair,
    load_pair_first,
    store_pair,
    store_pair_first,
    stream_pair,
)
from normgrad.cpu.intrinsics.vectors import fma, scaled, splat_f32, store_sums, vload, vload_f64, vstore, vstore_f64
from normgrad.cpu.kernels.common.moments import about_mean, lane_moments, moments, shift_of
from normgrad.cpu.kernels.copy import load_coded, store_coded
from normgrad.cpu.kernels.layer_norm.rows import gather_rows, row_offset, scatter_rows
from normgrad.cpu.tags import F32

_FEW_COLUMNS = 1024  # up to so many, TILE rows stay in the first-level cache

_sums, _lanes = stack_space(2 * TILE * 8), stack_space(TILE * 2 * 16 * 8)


@device
def sum_rows(kind, x, pitch, rows, n, sums):
    """The sums and M2 of up to TILE short rows, which are all in flight before the first one's lanes are added up."""
    lanes = _lanes()
    for r in range(rows):
        s, q = lane_moments(kind, x + r * pitch, n, shift_of(kind, x + r * pitch))
        vstore_f64(lanes, 32 * r, s)
        vstore_f64(lanes, 32 * r + 16, q)
    for k in range(0, 32, 16):  # of rows that are not there nothing is read
        a, b = vload_f64(lanes, k), vload_f64(lanes, k + 32)
        store_sums(sums + 2 * k, a, b, vload_f64(lanes, k + 64), vload_f64(lanes, k + 96))
    for r in range(rows):
        shift = np.float64(shift_of(kind, x + r * pitch))
        total, squares = about_mean(load_f64(sums, r), load_f64(sums, TILE + r), n, shift)
        store_f64(sums, r, total)
        store_f64(sums, TILE + r, squares)


@device
def forward_rows(kind, desc, row, rows, x, x_pitch, y, y_pitch, eps):
    """Up to TILE rows, or one long row: the moments of all, then the results of each."""
    n, sums, total, squares = desc[COLUMNS], _sums(), 0.0, 0.0
    together = 0 < n <= _FEW_COLUMNS
    if together:
        sum_rows(kind, x, x_pitch, rows, n, sums)
    elif n > 0:
        total, squares = moments(kind, x, n, item_size(kind))
    for r in range(rows):
        if together:
            total, squares = load_f64(sums, r), load_f64(sums, TILE + r)
        mean, variance = total / n, squares / n
        rstd = 1.0 / np.sqrt(variance + eps)
        if desc[MEAN] != 0:
            store_coded(desc[MEAN_CODE], desc[MEAN], row + r, np.float32(mean))
        if desc[RSTD] != 0:
            store_coded(desc[RSTD_CODE], desc[RSTD], row + r, np.float32(rstd))
        source, target, weight, bias = x + r * x_pitch, y + r * y_pitch, desc[ORDERED_WEIGHT], desc[ORDERED_BIAS]
        normalise_row(kind, source, target, n, weight, bias, desc[PITCH], mean, rstd, desc[STREAM] != 0)


@device
def order_vector(kind, vector, code, stride, absent, target, n, pitch):
    """A small vector, or a number where there is none, as float32 in the order of lanes."""
    j, second = 0, 4 * (pitch >> 1) if is_bfloat(kind) else 64
    while j + 32 <= n and (vector == 0 or stride == 1):
        at = target + 4 * vector_lane(kind, j, pitch)
        v = splat_f32(absent), splat_f32(absent)
        if vector != 0:
            v = load_ordered(kind, vector, j) if code == 0 else load_pair(kind, vector, j)
        vstore(F32, at, 0, v[0])
        vstore(F32, at + second, 0, v[1])
        j += 32
    for k in range(j, pitch):
        value = load_coded(code, vector, k * stride) if vector != 0 and k < n else absent
        store(F32, target, vector_lane(kind, k, pitch), value)
    vstore(F32, target, pitch, splat_f32(absent))
    vstore(F32, target, pitch + 16, splat_f32(absent))


@device
def order_vectors(kind, desc, p):
    """Weight and bias, each by one thread."""
    n, code = desc[COLUMNS], desc[VECTORS_CODE]
    while True:
        k = fetch_add(p, NEXT_VECTORS, 1)
        if k >= 2:
            break
        vector, stride, target = desc[WEIGHT + k], desc[WEIGHT_STRIDE + k], desc[ORDERED_WEIGHT + k]
        order_vector(kind, vector, code, stride, np.float32(1 - k), target, n, desc[PITCH])
        fetch_add(p, DONE_VECTORS, 1)
    wait_until(p, DONE_VECTORS, 2)


@kernel
def layer_norm(desc, kind):
    p = start_of(desc)
    slot = fetch_add(p, SLOT, 1)
    if slot >= desc[SLOTS]:
        return
    scratch = desc[SCRATCH] + slot * desc[SCRATCH_SIZE]
    order_vectors(kind, desc, p)
    n, size, blocks = desc[COLUMNS], item_size(kind), desc[BLOCKS]
    eps = load_f64(p, EPS_BITS)
    pitch = (n * size + 63) // 64 * 64
    while True:
        b = fetch_add(p, NEXT, 1)
        if b >= blocks:
            break
        row, last = b * desc[BLOCK_ROWS], min(desc[ROWS], (b + 1) * desc[BLOCK_ROWS])
        while row < last:
            inner = desc[OUTER_SHAPE + 2]
            rows = min(STAGED_ROWS, last - row, inner - row % inner)
            x = desc[INPUT] + row_offset(desc, OUTER_SHAPE, INPUT + 2, row)
            y = desc[OUTPUT] + row_offset(desc, OUTER_SHAPE, OUTPUT + 2, row)
            source, xp, yp = x, desc[INPUT + 4], desc[OUTPUT + 4]
            target = y
            if desc[STAGED]:
                gather_rows(kind, x, xp // size, desc[INPUT + 1], scratch, pitch, rows, n)
                source, xp, target, yp = scratch, pitch, scratch + STAGED_ROWS * pitch, pitch
            at_once = TILE if n <= _FEW_COLUMNS else 1
            for r in range(0, rows, at_once):
                some = min(at_once, rows - r)
                forward_rows(kind, desc, row + r, some, source + r * xp, xp, target + r * yp, yp, eps)
            if desc[STAGED]:
                scatter_rows(kind, target, pitch, y, desc[OUTPUT + 4] // size, desc[OUTPUT + 1], rows, n)
            row += rows
        fetch_add(p, DONE, 1)
    wait_until(p, DONE, blocks)


_SHORT = 128  # columns of a row that is not aligned


@device
def vector_lane(kind, column, pitch):
    """Where a column is in weight and bias, of which each has `pitch` numbers."""
    return (column & 1) * (pitch >> 1) + (column >> 1) if is_bfloat(kind) else column


@in_place
def _vectors_at(kind, vector, column, pitch):
    """Where the two vectors of the pair from a column on begin."""
    if is_bfloat(kind):
        return vector + 4 * vector_lane(kind, column, pitch), vector + 4 * vector_lane(kind, column + 1, pitch)
    return vector + 4 * column, vector + 4 * (column + 16)


@in_place
def _pair(kind, v, first, second, to_bias, high, factor, low, rest):
    a = scaled(kind, v[0] - high, factor, low, rest)
    b = scaled(kind, v[1] - high, factor, low, rest)
    return (
        fma(a, vload(F32, first, 0), vload(F32, first + to_bias, 0)),
        fma(b, vload(F32, second, 0), vload(F32, second + to_bias, 0)),
    )


@device
def normalise_row(kind, x, y, n, weight, bias, pitch, mean, rstd, stream):
    """y = ((x - mean)*rstd + rest)*weight + bias; the rest is the mean's second part, for rows far from zero."""
    high, factor = np.float32(mean), np.float32(rstd)
    rest, low = np.float32((high - mean) * rstd), np.float32(rstd - factor)
    vh, vr, vc, vl = splat_f32(high), splat_f32(factor), splat_f32(rest), splat_f32(low)
    size, to_bias, step = item_size(kind), bias - weight, 64 if is_bfloat(kind) else 128
    j = 0
    while j < n:
        first, second = _vectors_at(kind, weight, j, pitch)
        left = (-(y + j * size) & 63) // size
        if left == 0 or n <= _SHORT:
            whole = j + ((n - j) & ~31)
            while j < whole:
                a, b = _pair(kind, load_pair(kind, x, j), first, second, to_bias, vh, vr, vl, vc)
                if stream and left == 0:
                    stream_pair(kind, y, j, a, b)
                else:
                    store_pair(kind, y, j, a, b)
                j, first, second = j + 32, first + step, second + step
            left = n - j
        if left > 0:
            left = min(left, n - j)
            a, b = _pair(kind, load_pair_first(kind, x, j, left), first, second, to_bias, vh, vr, vl, vc)
            store_pair_first(kind, y, j, a, b, left)
            j += left
