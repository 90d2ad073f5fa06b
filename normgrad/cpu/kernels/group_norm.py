"""GroupNorm: the kernels `group_norm` and `group_norm_backward`.

A unit is what shares statistics: in rows a group of a sample, in columns a sample. Software pipelining: while a thread
sums unit i it writes the results of unit i-1, so reads overlap writes. Units that would not stay in a core's cache, or
too few of them, are processed in phases instead: the sums of all chunks, the statistics of all units, the results of
all chunks. :mod:`normgrad.cpu.kernels.group_norm_partials` reduces the partial sums of the chunks.
"""

from collections import namedtuple

from normgrad.cpu.compile.jit import device, inline, kernel
from normgrad.cpu.descriptors import COEFFICIENTS, SPARE_LANES, Channel
from normgrad.cpu.intrinsics.memory import fetch_add, load_f64
from normgrad.cpu.kernels.channel.access import RowChunk, choose, in_columns, positions_of, quotient
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

#: A chunk of a unit, with the address of the unit's coefficients; unit -1: none.
Work = namedtuple("Work", "unit chunk coefficients")

# The steps of a unit, and the outputs of a call. Each is one function per direction, some one per layout too.


def _prepare(dtype, layout, direction, desc, unit, coefficients):
    """Store what the sums of a unit need among its coefficients."""


def _process(dtype, layout, direction, desc, work, previous):
    """Sum a chunk of a unit and, interleaved, compute the results of a chunk of the previous one."""


def _reduce(dtype, layout, direction, desc, unit, coefficients):
    """Reduce a unit's partial sums to its statistics and coefficients."""


def _write_outputs(dtype, layout, direction, desc):
    """Write the small outputs, once all sums are there."""


def _prepare_nothing(dtype, layout, direction, desc, unit, coefficients):
    return


def _prepare_columns_backward(dtype, layout, direction, desc, unit, coefficients):
    store_sum_coefficients(dtype, desc, unit, coefficients)


@device
def _rows_of(desc, work):
    """Return the rows of a chunk of a unit."""
    n, block = quotient(work.unit, desc.groups), quotient(work.chunk, desc.chunks)
    group = (work.unit - n * desc.groups) * desc.statistic_channels
    first = group + block * desc.chunk_channels
    last = min(first + desc.chunk_channels, group + desc.statistic_channels)
    return RowChunk(n, first, last, work.chunk - block * desc.chunks)


def _rows_backward(dtype, layout, direction, desc, work, previous):
    if work.unit >= 0:
        rows = _rows_of(desc, work)
        scale, shift = sum_coefficients(desc, rows.n, quotient(rows.first, desc.statistic_channels))
        sum_rows(dtype, desc, rows, scale, shift, 0)
    if previous.unit >= 0:
        gradient_rows(dtype, desc, _rows_of(desc, previous), previous.coefficients)


def _rows_forward(dtype, layout, direction, desc, work, previous):
    if work.unit >= 0:
        moments_rows(dtype, desc, _rows_of(desc, work))
    if previous.unit >= 0:
        output_rows(dtype, desc, _rows_of(desc, previous), previous.coefficients)


@device
def _positions(desc, work):
    return positions_of(desc, work.chunk) if work.unit >= 0 else 0


def _columns_backward(dtype, layout, direction, desc, work, previous):
    count, other = _positions(desc, work), _positions(desc, previous)
    if work.unit >= 0:
        clear_sums(desc, work.unit, work.chunk)
    for first in range(0, max(count, other), COLUMN_RUN):
        last = first + COLUMN_RUN
        if first < count:
            sum_columns(dtype, desc, work.unit, work.chunk, first, min(last, count), work.coefficients)
        if first < other:
            unit, chunk = previous.unit, previous.chunk
            gradient_columns(dtype, desc, unit, chunk, first, min(last, other), previous.coefficients)


def _columns_forward(dtype, layout, direction, desc, work, previous):
    count, other = _positions(desc, work), _positions(desc, previous)
    if work.unit >= 0 and desc.is_contiguous:
        contiguous_moments(dtype, desc, work.unit, work.chunk)
        count = 0
    elif work.unit >= 0:
        clear_sums(desc, work.unit, work.chunk)
    for first in range(0, max(count, other), COLUMN_RUN):
        last = first + COLUMN_RUN
        if first < count:
            sum_moments(dtype, desc, work.unit, work.chunk, first, min(last, count))
        if first < other:
            unit, chunk = previous.unit, previous.chunk
            output_columns(dtype, desc, unit, chunk, first, min(last, other), previous.coefficients)
    if count > 0:
        finish_moments(dtype, desc, work.unit, work.chunk)


@inline
def _groups_of(layout, desc, unit):
    """Return the sample of a unit, and its first and last group."""
    if in_columns(layout):
        return unit, 0, desc.groups
    return unit // desc.groups, unit % desc.groups, unit % desc.groups + 1


def _reduce_backward(dtype, layout, direction, desc, unit, coefficients):
    n, first, last = _groups_of(layout, desc, unit)
    for q in range(first, last):
        reduce_gradients(dtype, in_columns(layout), desc, n, q, coefficients)


def _reduce_forward(dtype, layout, direction, desc, unit, coefficients):
    if in_columns(layout) and not desc.is_contiguous:
        merge_chunks(desc, unit)
    n, first, last = _groups_of(layout, desc, unit)
    for q in range(first, last):
        reduce_moments(dtype, in_columns(layout), desc, n, q, coefficients)


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


choose(_prepare, columns_backward=_prepare_columns_backward, backward=_prepare_nothing, forward=_prepare_nothing)
choose(
    _process,
    rows_backward=_rows_backward,
    rows_forward=_rows_forward,
    columns_backward=_columns_backward,
    columns_forward=_columns_forward,
)
choose(_reduce, backward=_reduce_backward, forward=_reduce_forward)
choose(_write_outputs, backward=_write_gradients, forward=_write_statistics)


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
            _process(dtype, layout, direction, desc, Work(unit, chunk, own), Work(previous, chunk, other))
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
            _process(dtype, layout, direction, desc, Work(unit, i % chunks, own), Work(-1, 0, own))
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
            previous = Work(unit, i % chunks, _coefficients(desc, unit // per_sample))
            _process(dtype, layout, direction, desc, Work(-1, 0, own), previous)
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
