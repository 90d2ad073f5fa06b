"""BatchNorm: the kernels `batch_norm_stats`, `_elemt`, `_reduce_backward` and `_elemt_backward`.

Kernels that reduce sum every chunk, then add the partial sums of 32 channels at a time. Element-wise kernels compute
the coefficients of all channels, then process every chunk.
"""

import numpy as np

from normgrad.cpu.compile.jit import device, inline, kernel
from normgrad.cpu.descriptors import Channel
from normgrad.cpu.intrinsics.memory import fetch_add, item_size
from normgrad.cpu.intrinsics.vectors import vload, vload_f64, vstore_f64, widen
from normgrad.cpu.kernels.batch_norm_moments import moments_columns, moments_rows
from normgrad.cpu.kernels.batch_norm_partials import (
    gradient_coefficients,
    output_coefficients,
    reduce_moments,
    sum_coefficients,
)
from normgrad.cpu.kernels.channel.access import RowChunk, choose, in_columns, positions_of, quotient
from normgrad.cpu.kernels.channel.columns import (
    clear_sums,
    gradient_columns,
    output_columns,
    sum_all_channels,
    sum_columns,
)
from normgrad.cpu.kernels.channel.rows import gradient_rows, output_rows, sum_rows
from normgrad.cpu.kernels.common.lanes import from_lanes
from normgrad.cpu.kernels.common.reduce import sum_partials
from normgrad.cpu.kernels.common.work import finish_phase, is_first, take, take_next
from normgrad.cpu.limits import ALL_CHANNELS_FROM, FLOAT64_COLUMN_TERMS
from normgrad.cpu.tags import BACKWARD, BACKWARD_SUMS, F32, FORWARD, FORWARD_SUMS


def _process(dtype, layout, direction, desc, i):
    """Compute the sums or the results of chunk i. One function per layout and direction."""


@device
def _row_blocks(desc):
    """Return how many chunks the channels of a sample make in rows."""
    return (desc.channels + desc.chunk_channels - 1) // desc.chunk_channels


@device
def _rows_of(desc, i):
    """Return chunk i of rows."""
    row, blocks = quotient(i, desc.chunks), _row_blocks(desc)
    n = quotient(row, blocks)
    first = (row - n * blocks) * desc.chunk_channels
    return RowChunk(n, first, min(first + desc.chunk_channels, desc.channels), i - row * desc.chunks)


def _rows_backward_sums(dtype, layout, direction, desc, i):
    negative_means = desc.coefficients + 4 * desc.padded_channels
    sum_rows(dtype, desc, _rows_of(desc, i), np.float32(1), np.float32(0), negative_means)


def _rows_forward_sums(dtype, layout, direction, desc, i):
    moments_rows(dtype, desc, _rows_of(desc, i))


def _columns_backward_sums(dtype, layout, direction, desc, i):
    n, chunk = i // desc.chunks, i % desc.chunks
    positions = positions_of(desc, chunk)
    # The sums are results themselves: few terms are not added in float32.
    run = 1 if desc.samples * desc.positions <= FLOAT64_COLUMN_TERMS else positions
    clear_sums(desc, n, chunk)
    if item_size(dtype) == 4 and desc.channels > ALL_CHANNELS_FROM and run > 1:
        sum_all_channels(desc, n, chunk, desc.coefficients + 4 * desc.padded_channels)
    else:
        for first in range(0, positions, run):
            sum_columns(dtype, desc, n, chunk, first, first + run, desc.coefficients)


def _columns_forward_sums(dtype, layout, direction, desc, i):
    moments_columns(dtype, desc, i // desc.chunks, i % desc.chunks)


def _rows_backward(dtype, layout, direction, desc, i):
    gradient_rows(dtype, desc, _rows_of(desc, i), desc.coefficients)


def _rows_forward(dtype, layout, direction, desc, i):
    output_rows(dtype, desc, _rows_of(desc, i), desc.coefficients)


def _columns_backward(dtype, layout, direction, desc, i):
    chunk = i % desc.chunks
    gradient_columns(dtype, desc, i // desc.chunks, chunk, 0, positions_of(desc, chunk), desc.coefficients)


def _columns_forward(dtype, layout, direction, desc, i):
    chunk = i % desc.chunks
    output_columns(dtype, desc, i // desc.chunks, chunk, 0, positions_of(desc, chunk), desc.coefficients)


choose(
    _process,
    rows_backward_sums=_rows_backward_sums,
    rows_forward_sums=_rows_forward_sums,
    columns_backward_sums=_columns_backward_sums,
    columns_forward_sums=_columns_forward_sums,
    rows_backward=_rows_backward,
    rows_forward=_rows_forward,
    columns_backward=_columns_backward,
    columns_forward=_columns_forward,
)


@inline
def _process_all(dtype, layout, direction, desc, slot):
    """Compute the sums or the results of all chunks."""
    blocks = 1 if in_columns(layout) else _row_blocks(desc)
    total, per_take, done = desc.samples * desc.chunks * blocks, desc.chunks_per_take, 0
    items = (total + per_take - 1) // per_take
    item = take(desc.sum_phase, items, slot)
    while item < items:
        for i in range(item * per_take, min(total, (item + 1) * per_take)):
            _process(dtype, layout, direction, desc, i)
        done += 1
        item = take(desc.sum_phase, items, slot)
    finish_phase(desc.sum_phase, done, items)


@device
def _write_statistics(dtype, columns, desc):
    """Write mean and invstd of every channel, 32 at a time."""
    blocks, done = desc.padded_channels // 32, 0
    block = take_next(desc.output_phase)
    while block < blocks:
        reduce_moments(desc, block)
        first, last, means = 32 * block, min(desc.channels, 32 * (block + 1)), desc.statistics + 256 * block
        from_lanes(dtype, columns, desc.mean, first, last, means)
        from_lanes(dtype, columns, desc.rstd, first, last, means + 8 * desc.padded_channels)
        done += 1
        block = take_next(desc.output_phase)
    finish_phase(desc.output_phase, done, blocks)


@device
def _weight_gradients(desc, lane):
    """Compute grad_weight of 16 channels: sum_dy_xmu times invstd."""
    sums_x, invstd = desc.partials + 8 * desc.padded_channels, desc.coefficients + 8 * desc.padded_channels
    vstore_f64(desc.statistics, lane, vload_f64(sums_x, lane) * widen(vload(F32, invstd, lane)))


@device
def _write_sums(dtype, columns, desc):
    """Write the four outputs. They may alias the inputs, which are all read by now."""
    blocks, pitch, done = desc.padded_channels // 32, desc.padded_channels, 0
    block = take_next(desc.output_phase)
    while block < blocks:
        first, last, sums = 32 * block, min(desc.channels, 32 * (block + 1)), desc.partials + 256 * block
        sum_partials(sums, desc.samples * desc.chunks, 16 * pitch, pitch)
        _weight_gradients(desc, first)
        _weight_gradients(desc, first + 16)
        from_lanes(dtype, columns, desc.sum_dy, first, last, sums)
        from_lanes(dtype, columns, desc.sum_dy_xmu, first, last, sums + 8 * pitch)
        from_lanes(dtype, columns, desc.grad_weight, first, last, desc.statistics + 256 * block)
        from_lanes(dtype, columns, desc.grad_bias, first, last, sums)
        done += 1
        block = take_next(desc.output_phase)
    finish_phase(desc.output_phase, done, blocks)


@kernel
def batch_norm_stats(desc: Channel, dtype, layout):
    slot = fetch_add(desc.slot, 1)
    if slot >= desc.slots:
        return
    _process_all(dtype, layout, FORWARD_SUMS, desc, slot)
    _write_statistics(dtype, in_columns(layout), desc)


@kernel
def batch_norm_reduce_backward(desc: Channel, dtype, layout):
    slot = fetch_add(desc.slot, 1)
    if slot >= desc.slots:
        return
    mine = is_first(desc.parameter_phase)
    if mine:
        sum_coefficients(dtype, in_columns(layout), desc)
    finish_phase(desc.parameter_phase, mine, 1)
    _process_all(dtype, layout, BACKWARD_SUMS, desc, slot)
    _write_sums(dtype, in_columns(layout), desc)


@kernel
def batch_norm_elemt_backward(desc: Channel, dtype, layout):
    slot = fetch_add(desc.slot, 1)
    if slot >= desc.slots:
        return
    mine = is_first(desc.parameter_phase)
    if mine:
        gradient_coefficients(dtype, in_columns(layout), desc)
    finish_phase(desc.parameter_phase, mine, 1)
    _process_all(dtype, layout, BACKWARD, desc, slot)


@kernel
def batch_norm_elemt(desc: Channel, dtype, layout):
    slot = fetch_add(desc.slot, 1)
    if slot >= desc.slots:
        return
    mine = is_first(desc.parameter_phase)
    if mine:
        output_coefficients(dtype, in_columns(layout), desc)
    finish_phase(desc.parameter_phase, mine, 1)
    _process_all(dtype, layout, FORWARD, desc, slot)
