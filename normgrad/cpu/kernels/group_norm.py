"""GroupNorm: the kernels `group_norm` and `group_norm_backward`.

A unit is what shares statistics: in rows a group of a sample, in columns a sample. Software pipelining: while a thread
sums unit i it writes the results of unit i-1, so reads overlap writes. Units that would not stay in a core's cache, or
too few of them, are processed in phases instead: the sums of all chunks, the statistics of all units, the results of
all chunks. :mod:`normgrad.cpu.kernels.group_norm_partials` reduces the partial sums of the chunks.
"""

from normgrad.cpu.compile.jit import device, inline, kernel
from normgrad.cpu.descriptors import COEFFICIENTS, SPARE_LANES, Channel
from normgrad.cpu.intrinsics.memory import fetch_add, load_f64
from normgrad.cpu.kernels.channel.access import choose, in_columns, positions_of, quotient
from normgrad.cpu.kernels.channel.columns import (
    clear_sums,
    contiguous_moments,
    finish_moments,
    gradient_columns,
    output_columns,
    sum_columns,
    sum_moments,
)
from normgrad.cpu.kernels.channel.rows import gradient_rows, moments_rows, output_rows, sum_rows
from normgrad.cpu.kernels.common.lanes import from_lanes, store_element, to_lanes
from normgrad.cpu.kernels.common.reduce import sum_partials
from normgrad.cpu.kernels.common.work import finish_phase, is_first, take, take_next
from normgrad.cpu.kernels.group_norm_partials import (
    bias_lanes,
    merge_chunks,
    reduce_gradients,
    reduce_moments,
    store_sum_coefficients,
    sum_coefficients,
)
from normgrad.cpu.limits import COLUMN_RUN
from normgrad.cpu.tags import BACKWARD, FORWARD

# The steps of a unit, and the outputs of a call. Each is one function per layout and direction.


def _prepare(dtype, layout, direction, desc, unit, coefficients):
    """Store what the sums of a unit need among its coefficients."""


def _process(
    dtype, layout, direction, desc, unit, chunk, coefficients, previous, previous_chunk, previous_coefficients
):
    """Sum a chunk of a unit and, interleaved, compute the results of a chunk of the previous one; unit -1: none."""


def _reduce(dtype, layout, direction, desc, unit, coefficients):
    """Reduce a unit's partial sums to its statistics and coefficients."""


def _write_outputs(dtype, layout, direction, desc):
    """Write the small outputs, once all sums are there."""


def _nothing(dtype, layout, direction, desc, unit, coefficients):
    return


def _prepare_columns_backward(dtype, layout, direction, desc, unit, coefficients):
    store_sum_coefficients(dtype, desc, unit, coefficients)


@device
def _rows_of(desc, unit, chunk):
    """Return sample, first and last channel and part of the positions of a chunk of a unit of rows."""
    n, block = quotient(unit, desc.groups), quotient(chunk, desc.chunks)
    group = (unit - n * desc.groups) * desc.statistic_channels
    first = group + block * desc.chunk_channels
    last = min(first + desc.chunk_channels, group + desc.statistic_channels)
    return n, first, last, chunk - block * desc.chunks


def _rows_backward(
    dtype, layout, direction, desc, unit, chunk, coefficients, previous, previous_chunk, previous_coefficients
):
    if unit >= 0:
        n, first, last, part = _rows_of(desc, unit, chunk)
        scale, shift = sum_coefficients(desc, n, quotient(first, desc.statistic_channels))
        sum_rows(dtype, desc, n, first, last, part, scale, shift, 0)
    if previous >= 0:
        n, first, last, part = _rows_of(desc, previous, previous_chunk)
        gradient_rows(dtype, desc, n, first, last, part, previous_coefficients)


def _rows_forward(
    dtype, layout, direction, desc, unit, chunk, coefficients, previous, previous_chunk, previous_coefficients
):
    if unit >= 0:
        n, first, last, part = _rows_of(desc, unit, chunk)
        moments_rows(dtype, desc, n, first, last, part)
    if previous >= 0:
        n, first, last, part = _rows_of(desc, previous, previous_chunk)
        output_rows(dtype, desc, n, first, last, part, previous_coefficients)


def _columns_backward(
    dtype, layout, direction, desc, unit, chunk, coefficients, previous, previous_chunk, previous_coefficients
):
    count = positions_of(desc, chunk) if unit >= 0 else 0
    previous_count = positions_of(desc, previous_chunk) if previous >= 0 else 0
    if unit >= 0:
        clear_sums(desc, unit, chunk)
    for first in range(0, max(count, previous_count), COLUMN_RUN):
        last = first + COLUMN_RUN
        if first < count:
            sum_columns(dtype, desc, unit, chunk, first, min(last, count), coefficients)
        if first < previous_count:
            end = min(last, previous_count)
            gradient_columns(dtype, desc, previous, previous_chunk, first, end, previous_coefficients)


def _columns_forward(
    dtype, layout, direction, desc, unit, chunk, coefficients, previous, previous_chunk, previous_coefficients
):
    count = positions_of(desc, chunk) if unit >= 0 else 0
    previous_count = positions_of(desc, previous_chunk) if previous >= 0 else 0
    if unit >= 0 and desc.is_contiguous:
        contiguous_moments(dtype, desc, unit, chunk)
        count = 0
    elif unit >= 0:
        clear_sums(desc, unit, chunk)
    for first in range(0, max(count, previous_count), COLUMN_RUN):
        last = first + COLUMN_RUN
        if first < count:
            sum_moments(dtype, desc, unit, chunk, first, min(last, count))
        if first < previous_count:
            end = min(last, previous_count)
            output_columns(dtype, desc, previous, previous_chunk, first, end, previous_coefficients)
    if count > 0:
        finish_moments(dtype, desc, unit, chunk)


def _reduce_rows_backward(dtype, layout, direction, desc, unit, coefficients):
    reduce_gradients(dtype, False, desc, unit // desc.groups, unit % desc.groups, coefficients)


def _reduce_rows_forward(dtype, layout, direction, desc, unit, coefficients):
    reduce_moments(dtype, False, desc, unit // desc.groups, unit % desc.groups, coefficients)


def _reduce_columns_backward(dtype, layout, direction, desc, unit, coefficients):
    for q in range(desc.groups):
        reduce_gradients(dtype, True, desc, unit, q, coefficients)


def _reduce_columns_forward(dtype, layout, direction, desc, unit, coefficients):
    if not desc.is_contiguous:
        merge_chunks(desc, unit)
    for q in range(desc.groups):
        reduce_moments(dtype, True, desc, unit, q, coefficients)


def _write_gradients(dtype, layout, direction, desc):
    """Write grad_weight and grad_bias: the sums over samples, 32 channels at a time."""
    is_wanted = desc.grad_weight.address != 0 or desc.grad_bias.address != 0
    blocks, step = desc.padded_channels // 32 if is_wanted else 0, 16 * desc.padded_channels * desc.chunks
    done, block = 0, take_next(desc.output_phase)
    while block < blocks:
        sums, first, last = desc.partials + 256 * block, 32 * block, min(desc.channels, 32 * (block + 1))
        sum_partials(sums, desc.samples, step, desc.padded_channels)
        from_lanes(dtype, in_columns(layout), desc.grad_weight, first, last, sums + 8 * desc.padded_channels)
        from_lanes(dtype, in_columns(layout), desc.grad_bias, first, last, sums)
        done += 1
        block = take_next(desc.output_phase)
    finish_phase(desc.output_phase, done, blocks)


def _write_statistics(dtype, layout, direction, desc):
    """Write mean and rstd: once all input is read, since they may alias it."""
    mine = is_first(desc.output_phase)
    if mine:
        for statistic in range(desc.samples * desc.groups):
            store_element(desc.mean, statistic, load_f64(desc.statistics, 2 * statistic))
            store_element(desc.rstd, statistic, load_f64(desc.statistics, 2 * statistic + 1))
    finish_phase(desc.output_phase, mine, 1)


choose(
    _prepare,
    rows_backward=_nothing,
    rows_forward=_nothing,
    columns_backward=_prepare_columns_backward,
    columns_forward=_nothing,
)
choose(
    _process,
    rows_backward=_rows_backward,
    rows_forward=_rows_forward,
    columns_backward=_columns_backward,
    columns_forward=_columns_forward,
)
choose(
    _reduce,
    rows_backward=_reduce_rows_backward,
    rows_forward=_reduce_rows_forward,
    columns_backward=_reduce_columns_backward,
    columns_forward=_reduce_columns_forward,
)
choose(
    _write_outputs,
    rows_backward=_write_gradients,
    rows_forward=_write_statistics,
    columns_backward=_write_gradients,
    columns_forward=_write_statistics,
)


@device
def _coefficients(desc, number):
    return desc.coefficients + 4 * (COEFFICIENTS * desc.padded_channels + SPARE_LANES) * number


@device
def _order_parameters(dtype, layout, desc):
    """Store weight and bias in lane order."""
    mine, columns, pitch = is_first(desc.parameter_phase), in_columns(layout), desc.padded_channels
    if mine:
        to_lanes(dtype, columns, desc.weight, 1.0, desc.parameter_lanes, 0, pitch, desc.channels)
        to_lanes(dtype, columns, desc.bias, 0.0, bias_lanes(desc), 0, pitch, desc.channels)
    finish_phase(desc.parameter_phase, mine, 1)


@inline
def _pipelined(dtype, layout, direction, desc, slot):
    """Process unit after unit: the sums of one interleaved with the results of the previous one."""
    previous, parity, done, units = -1, 0, 0, desc.units
    following, last, per_take = 0, 0, desc.units_per_take
    while True:
        if following >= last:
            following = per_take * take(desc.sum_phase, (units + per_take - 1) // per_take, slot)
            last = min(following + per_take, units)
        unit, following = following if following < units else -1, following + 1
        if unit < 0 and previous < 0:
            break
        own, other = _coefficients(desc, 2 * slot + parity), _coefficients(desc, 2 * slot + 1 - parity)
        if unit >= 0:
            _prepare(dtype, layout, direction, desc, unit, own)
        for chunk in range(desc.unit_chunks):
            _process(dtype, layout, direction, desc, unit, chunk, own, previous, chunk, other)
        if unit >= 0:
            _reduce(dtype, layout, direction, desc, unit, own)
            done += 1
        previous, parity = unit if desc.result.address != 0 else -1, 1 - parity
    finish_phase(desc.sum_phase, done, units)


@inline
def _in_phases(dtype, layout, direction, desc, slot):
    """Sum all chunks, reduce all units, then compute the results of all chunks."""
    chunks, per_take, total = desc.unit_chunks, desc.chunks_per_take, desc.units * desc.unit_chunks
    items, own, unit, done = (total + per_take - 1) // per_take, _coefficients(desc, desc.samples + slot), -1, 0
    item = take(desc.sum_phase, items, slot)
    while item < items:
        for i in range(item * per_take, min(total, (item + 1) * per_take)):
            if i // chunks != unit:
                unit = i // chunks
                _prepare(dtype, layout, direction, desc, unit, own)
            _process(dtype, layout, direction, desc, unit, i % chunks, own, -1, 0, own)
        done += 1
        item = take(desc.sum_phase, items, slot)
    finish_phase(desc.sum_phase, done, items)
    units, per_sample, done = desc.units, desc.units // desc.samples, 0
    unit = take_next(desc.statistics_phase)
    while unit < units:
        _reduce(dtype, layout, direction, desc, unit, _coefficients(desc, unit // per_sample))
        done += 1
        unit = take_next(desc.statistics_phase)
    finish_phase(desc.statistics_phase, done, units)
    items, done = items if desc.result.address != 0 else 0, 0
    item = take(desc.result_phase, items, slot)
    while item < items:
        for i in range(item * per_take, min(total, (item + 1) * per_take)):
            unit = i // chunks
            of_sample = _coefficients(desc, unit // per_sample)
            _process(dtype, layout, direction, desc, -1, 0, own, unit, i % chunks, of_sample)
        done += 1
        item = take(desc.result_phase, items, slot)
    finish_phase(desc.result_phase, done, items)


@inline
def _run(dtype, layout, direction, desc):
    slot = fetch_add(desc.slot, 1)
    if slot >= desc.slots:
        return
    _order_parameters(dtype, layout, desc)
    if desc.in_phases:
        _in_phases(dtype, layout, direction, desc, slot)
    else:
        _pipelined(dtype, layout, direction, desc, slot)
    _write_outputs(dtype, layout, direction, desc)


@kernel
def group_norm_backward(desc: Channel, dtype, layout):
    _run(dtype, layout, BACKWARD, desc)


@kernel
def group_norm(desc: Channel, dtype, layout):
    _run(dtype, layout, FORWARD, desc)
