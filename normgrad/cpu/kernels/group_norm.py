"""GroupNorm: the kernels `group_norm` and `group_norm_backward`.

A unit is what a thread sums before it can write results: in rows a group of a sample, in columns a sample with all its
groups. Software pipelining: while a thread sums unit i it writes the results of unit i-1, so reads overlap writes.
Units that would not stay in a core's cache, or too few of them, are processed in phases instead: the sums of all
chunks, the statistics of all units, the results of all chunks. Either way the work is done by four functions,
`_prepare`, `_process`, `_reduce` and `_write_outputs`, of which `choose` takes the one for the layout and direction.

The partial sums of a unit's chunks are reduced to statistics and coefficients of its groups: by `reduce_gradients` in
the backward pass, by `reduce_moments` in the forward pass, in whole vectors of channels as far as a group fills them.
`common.reduce.sum_partials` adds the sums over samples, for the gradients of weight and bias.
"""

from collections import namedtuple

import numpy as np

from normgrad.cpu import limits
from normgrad.cpu.compile.jit import device, inline, kernel
from normgrad.cpu.descriptors import COEFFICIENTS, SPARE_LANES, Channel
from normgrad.cpu.intrinsics.memory import fetch_add, load, store
from normgrad.cpu.intrinsics.vectors import (
    fma,
    hsum,
    narrow,
    power_of_two,
    saturated,
    splat_f32,
    splat_f64,
    vload,
    vstore,
    widen,
)
from normgrad.cpu.kernels.channel import columns, rows
from normgrad.cpu.kernels.channel.access import RowChunk, choose, in_columns, partials_of, positions_of, quotient
from normgrad.cpu.kernels.channel.coefficients import filled_vectors, whole_vectors
from normgrad.cpu.kernels.common.lanes import from_lanes, lane_of, load_element, store_element, to_lanes
from normgrad.cpu.kernels.common.reduce import between, merge_partials, merged, sum_partials
from normgrad.cpu.kernels.common.work import finish_phase, items_in_order, items_of, take
from normgrad.cpu.tags import BACKWARD, F32, F64, FORWARD

#: A chunk of a unit, with the address of the unit's coefficients. Unit -1: there is nothing to do.
Work = namedtuple("Work", "unit chunk coefficients")

# Partial sums to the statistics and coefficients of a group.


@device
def bias_lanes(desc):
    """Return the address of the biases in lane order: behind the weights."""
    return desc.parameter_lanes + 4 * (desc.padded_channels + SPARE_LANES)


@inline
def _sum_lanes(desc, n, lane, ratio, total, total_x):
    """Add up 16 channels of one group over the chunks, to the first chunk's partials.

    Return the totals with weight times these sums added; `ratio` is that of x_hat to the deviation that was summed.
    """
    g, gx, pitch, first = splat_f64(0.0), splat_f64(0.0), desc.padded_channels, partials_of(desc, n, 0) + 8 * lane
    for chunk in range(desc.chunks):
        at = first + 16 * pitch * chunk
        g, gx = g + vload(F64, at, 0), gx + vload(F64, at, pitch)
    gx = gx * splat_f64(ratio)
    vstore(F64, first, 0, g)
    vstore(F64, first, pitch, gx)
    weight = widen(vload(F32, desc.parameter_lanes, lane))
    return total + weight * g, total_x + weight * gx


@device
def _sum_lane(desc, n, lane, ratio):
    """Do as `_sum_lanes` for a single channel, and return weight times its sums."""
    g, gx, pitch, first = 0.0, 0.0, desc.padded_channels, partials_of(desc, n, 0)
    for chunk in range(desc.chunks):
        at = first + 16 * pitch * chunk
        g += load(F64, at, lane)
        gx += load(F64, at, pitch + lane)
    gx *= ratio
    store(F64, first, lane, g)
    store(F64, first, pitch + lane, gx)
    weight = np.float64(load(F32, desc.parameter_lanes, lane))
    return weight * g, weight * gx


@device
def _sum_group(dtype, paired, desc, n, first, last, ratio):
    """Return the sums of weight*grad_out and of weight*grad_out*x_hat over a group; x_hat is ratio*deviation."""
    total, total_x, whole = 0.0, 0.0, whole_vectors(paired, first, last)
    if whole > first:
        sums, sums_x = splat_f64(0.0), splat_f64(0.0)
        for lane in range(first, whole, 16):
            sums, sums_x = _sum_lanes(desc, n, lane, ratio, sums, sums_x)
        total, total_x = hsum(sums), hsum(sums_x)
    for c in range(whole, last):
        g, gx = _sum_lane(desc, n, lane_of(dtype, paired, c), ratio)
        total += g
        total_x += gx
    return total, total_x


@device
def _store_gradient_coefficients(dtype, paired, desc, target, first, last, k):
    """Store the coefficients of a group's gradients (`coefficients.gradient`): the weights are its `pre`.

    k = (scale, shift, factor, mean_g, rstd) are the same for all channels of the group.
    """
    whole, pitch, weights = filled_vectors(paired, desc, first, last), desc.padded_channels, desc.parameter_lanes
    a, b, c, d, f = splat_f32(k[0]), splat_f32(k[1]), splat_f32(k[2]), splat_f32(k[3]), splat_f32(k[4])
    for lane in range(first, whole, 16):
        vstore(F32, target, lane, a)
        vstore(F32, target, pitch + lane, b)
        vstore(F32, target, 2 * pitch + lane, c)
        vstore(F32, target, 3 * pitch + lane, d)
        vstore(F32, target, 4 * pitch + lane, vload(F32, weights, lane))
        vstore(F32, target, 5 * pitch + lane, f)
    for channel in range(whole, last):
        lane = lane_of(dtype, paired, channel)
        store(F32, target, lane, k[0])
        store(F32, target, pitch + lane, k[1])
        store(F32, target, 2 * pitch + lane, k[2])
        store(F32, target, 3 * pitch + lane, k[3])
        store(F32, target, 4 * pitch + lane, load(F32, weights, lane))
        store(F32, target, 5 * pitch + lane, k[4])


@device
def reduce_gradients(dtype, paired, desc, n, q, target):
    """Reduce the partial sums of group q of sample n, and store the coefficients of its gradients.

    The sums over all positions are left in the partials of the sample's first chunk.
    """
    per_group, statistic = desc.channels // desc.groups, n * desc.groups + q
    first, last, size = q * per_group, (q + 1) * per_group, np.float64(per_group * desc.positions)
    mean, rstd = load_element(desc.mean, statistic), load_element(desc.rstd, statistic)
    ratio = rstd / power_of_two(rstd, mean)
    total, total_x = _sum_group(dtype, paired, desc, n, first, last, ratio)
    if desc.result.address != 0:
        coefficient = rstd * (total_x / size)
        scale = power_of_two(coefficient, mean)
        shift, factor = np.float32(-(mean * scale)), np.float32(coefficient / scale)
        k = np.float32(scale), shift, factor, np.float32(total / size), np.float32(rstd)
        _store_gradient_coefficients(dtype, paired, desc, target, first, last, k)


@device
def sum_coefficients(desc, n, q):
    """Return scale and shift for the sums of a group: the deviation that is summed is (x - mean)*scale.

    The scale is the power of two above rstd, or a smaller one where the mean is so large that mean*scale would
    overflow. `reduce_gradients` multiplies the sums by rstd/scale, which makes the deviation x_hat.
    """
    statistic = n * desc.groups + q
    mean = load_element(desc.mean, statistic)
    scale = power_of_two(load_element(desc.rstd, statistic), mean)
    return np.float32(scale), np.float32(-(mean * scale))


@device
def store_sum_coefficients(dtype, desc, n, target):
    """Store scale and shift for the sums of a sample in columns, one of each per channel, in lane order."""
    per_group, pitch = desc.channels // desc.groups, desc.padded_channels
    for q in range(desc.groups):
        first = q * per_group
        scale, shift = sum_coefficients(desc, n, q)
        whole = whole_vectors(True, first, first + per_group)
        for lane in range(first, whole, 16):
            vstore(F32, target, lane, splat_f32(scale))
            vstore(F32, target, pitch + lane, splat_f32(shift))
        for c in range(whole, first + per_group):
            store(F32, target, lane_of(dtype, True, c), scale)
            store(F32, target, pitch + lane_of(dtype, True, c), shift)


@device
def merge_chunks(desc, n):
    """Merge the sums and M2 of a sample's channels over its chunks, into the first chunk's partials."""
    first = partials_of(desc, n, 0)
    for lane in range(0, desc.padded_channels, 16):
        total, squares = merge_partials(desc, n, n + 1, lane)
        vstore(F64, first, lane, total)
        vstore(F64, first, desc.padded_channels + lane, squares)


@device
def _merge_chunks_of_group(desc, n, first, last):
    """Return the sum and M2 of a group, where a chunk has one sum and one M2 for all its elements.

    They are in the chunk's partials, at its first channel.
    """
    total, squares, size = 0.0, 0.0, 0.0
    for chunk in range(desc.chunks):
        partials, positions = partials_of(desc, n, chunk), positions_of(desc, chunk)
        for c in range(first, last, desc.chunk_channels):
            other, others = load(F64, partials, c), load(F64, partials, c + desc.padded_channels)
            count = np.float64(positions * min(desc.chunk_channels, last - c))
            if size == 0.0:
                total, squares, size = other, others, count
            else:
                total, squares = merged(total, squares, size, other, others, count)
                size += count
    return total, squares


@device
def _merge_channels(dtype, desc, n, first, last):
    """Return the sum and M2 of a group, where every channel has its own: `merge_chunks` has merged them over chunks."""
    sums, positions = partials_of(desc, n, 0), np.float64(desc.positions)
    total, squares, size = 0.0, 0.0, positions * (last - first)
    for c in range(first, last):
        total += load(F64, sums, lane_of(dtype, True, c))
    for c in range(first, last):
        lane = lane_of(dtype, True, c)
        apart = between(load(F64, sums, lane), positions, total, size, 1.0 / (positions * size * size))
        squares += load(F64, sums, desc.padded_channels + lane) + apart
    return total, squares


@device
def _store_output_coefficients(dtype, paired, desc, target, first, last, mean, rstd):
    """Store the coefficients of a group's output (`coefficients.output`).

    The offset contains what rounding the mean to float32 takes off it.
    """
    weights, biases, pitch = desc.parameter_lanes, bias_lanes(desc), desc.padded_channels
    high, whole = np.float32(mean), filled_vectors(paired, desc, first, last)
    scale = power_of_two(rstd, np.float64(high))
    shift, ratio, rest = np.float32(-(high * scale)), rstd / scale, (high - mean) * rstd
    for lane in range(first, whole, 16):
        weight = widen(vload(F32, weights, lane))
        vstore(F32, target, lane, splat_f32(np.float32(scale)))
        vstore(F32, target, pitch + lane, splat_f32(shift))
        vstore(F32, target, 2 * pitch + lane, narrow(saturated(weight * splat_f64(ratio))))
        vstore(F32, target, 3 * pitch + lane, narrow(fma(splat_f64(rest), weight, widen(vload(F32, biases, lane)))))
    for c in range(whole, last):
        lane = lane_of(dtype, paired, c)
        weight = np.float64(load(F32, weights, lane))
        store(F32, target, lane, np.float32(scale))
        store(F32, target, pitch + lane, shift)
        store(F32, target, 2 * pitch + lane, np.float32(saturated(weight * ratio)))
        store(F32, target, 3 * pitch + lane, np.float32(fma(rest, weight, np.float64(load(F32, biases, lane)))))


@device
def reduce_moments(dtype, paired, desc, n, q, target):
    """Reduce the partial moments of group q of sample n to mean and rstd, and store the coefficients of its output."""
    per_group, statistic = desc.channels // desc.groups, n * desc.groups + q
    first, last, size = q * per_group, (q + 1) * per_group, np.float64(per_group * desc.positions)
    if paired and not desc.is_contiguous:
        total, squares = _merge_channels(dtype, desc, n, first, last)
    else:
        total, squares = _merge_chunks_of_group(desc, n, first, last)
    mean, rstd = total / size, 1.0 / np.sqrt(squares / size + desc.eps)
    store(F64, desc.statistics, 2 * statistic, mean)
    store(F64, desc.statistics, 2 * statistic + 1, rstd)
    _store_output_coefficients(dtype, paired, desc, target, first, last, mean, rstd)


# The steps of a unit, and the outputs of a call: stubs, for which `choose` below takes a function for each direction,
# or for each layout and direction.


def _prepare(dtype, layout, direction, desc, unit, coefficients):
    """Store what the sums of a unit need where its coefficients will be: scales and shifts, backward in columns."""


def _process(dtype, layout, direction, desc, work, previous):
    """Sum a chunk of the unit of `work` and compute the results of the same chunk of the unit of `previous`."""


def _reduce(dtype, layout, direction, desc, unit, coefficients):
    """Reduce a unit's partial sums to its statistics and coefficients."""


def _write_outputs(dtype, layout, direction, desc):
    """Write the small outputs, once the sums of all units are there."""


def _prepare_nothing(dtype, layout, direction, desc, unit, coefficients):
    return


def _prepare_columns_backward(dtype, layout, direction, desc, unit, coefficients):
    store_sum_coefficients(dtype, desc, unit, coefficients)


@device
def _rows_of(desc, work):
    """Return the rows of a chunk of a unit."""
    n, block = quotient(work.unit, desc.groups), quotient(work.chunk, desc.chunks)
    group = (work.unit - n * desc.groups) * desc.group_channels
    first = group + block * desc.chunk_channels
    last = min(first + desc.chunk_channels, group + desc.group_channels)
    return RowChunk(n, first, last, work.chunk - block * desc.chunks)


def _rows_backward(dtype, layout, direction, desc, work, previous):
    if work.unit >= 0:
        chunk = _rows_of(desc, work)
        scale, shift = sum_coefficients(desc, chunk.n, quotient(chunk.first, desc.group_channels))
        rows.compute_sums(dtype, desc, chunk, scale, shift, 0)
    if previous.unit >= 0:
        rows.compute_gradients(dtype, desc, _rows_of(desc, previous), previous.coefficients)


def _rows_forward(dtype, layout, direction, desc, work, previous):
    if work.unit >= 0:
        rows.compute_moments(dtype, desc, _rows_of(desc, work))
    if previous.unit >= 0:
        rows.compute_outputs(dtype, desc, _rows_of(desc, previous), previous.coefficients)


@device
def _positions(desc, work):
    """Return how many positions there are to process: none without a unit."""
    return positions_of(desc, work.chunk) if work.unit >= 0 else 0


def _columns_backward(dtype, layout, direction, desc, work, previous):
    count, other = _positions(desc, work), _positions(desc, previous)
    if work.unit >= 0:
        columns.clear_sums(desc, work.unit, work.chunk)
    for first in range(0, max(count, other), limits.COLUMN_RUN):
        last = first + limits.COLUMN_RUN
        if first < count:
            columns.add_sums(dtype, desc, work.unit, work.chunk, first, min(last, count), work.coefficients)
        if first < other:
            unit, chunk = previous.unit, previous.chunk
            columns.compute_gradients(dtype, desc, unit, chunk, first, min(last, other), previous.coefficients)


def _columns_forward(dtype, layout, direction, desc, work, previous):
    count, other = _positions(desc, work), _positions(desc, previous)
    if work.unit >= 0 and desc.is_contiguous:
        columns.contiguous_moments(dtype, desc, work.unit, work.chunk)
        count = 0
    elif work.unit >= 0:
        columns.clear_sums(desc, work.unit, work.chunk)
    for first in range(0, max(count, other), limits.COLUMN_RUN):
        last = first + limits.COLUMN_RUN
        if first < count:
            columns.add_moments(dtype, desc, work.unit, work.chunk, first, min(last, count))
        if first < other:
            unit, chunk = previous.unit, previous.chunk
            columns.compute_outputs(dtype, desc, unit, chunk, first, min(last, other), previous.coefficients)
    if count > 0:
        columns.finish_moments(dtype, desc, work.unit, work.chunk)


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
    for block in items_in_order(desc.output_phase, blocks):
        sums, first, last = desc.partials + 256 * block, 32 * block, min(desc.channels, 32 * (block + 1))
        sum_partials(sums, desc.samples, step, desc.padded_channels)
        from_lanes(dtype, in_columns(layout), desc.grad_weight, first, last, sums + 8 * desc.padded_channels)
        from_lanes(dtype, in_columns(layout), desc.grad_bias, first, last, sums)


def _write_statistics(dtype, layout, direction, desc):
    """Write mean and rstd: once all input is read, since they may alias it."""
    for _ in items_in_order(desc.output_phase, 1):
        for statistic in range(desc.samples * desc.groups):
            store_element(desc.mean, statistic, load(F64, desc.statistics, 2 * statistic))
            store_element(desc.rstd, statistic, load(F64, desc.statistics, 2 * statistic + 1))


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
    """Return the address of a set of coefficients: two for each slot in a pipeline, one for each sample in phases.

    In phases each slot has one more, for what the sums need.
    """
    return desc.coefficients + 4 * (COEFFICIENTS * desc.padded_channels + SPARE_LANES) * number


@device
def _order_parameters(dtype, layout, desc):
    """Store weight and bias in lane order."""
    paired, pitch = in_columns(layout), desc.padded_channels
    for _ in items_in_order(desc.parameter_phase, 1):
        to_lanes(dtype, paired, desc.weight, 1.0, desc.parameter_lanes, 0, pitch, desc.channels)
        to_lanes(dtype, paired, desc.bias, 0.0, bias_lanes(desc), 0, pitch, desc.channels)


@inline
def _pipelined(dtype, layout, direction, desc, slot):
    """Process unit after unit: the sums of one interleaved with the results of the previous one."""
    previous, parity, done, units = -1, 0, 0, desc.units
    following, last, per_take = 0, 0, desc.units_per_take  # units [following, last) are taken and not yet begun
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
    chunks, total = desc.unit_chunks, desc.units * desc.unit_chunks
    own, unit = _coefficients(desc, desc.samples + slot), -1
    for i in items_of(desc.sum_phase, total, desc.chunks_per_take, slot):
        if i // chunks != unit:
            unit = i // chunks
            _prepare(dtype, layout, direction, desc, unit, own)
        _process(dtype, layout, direction, desc, Work(unit, i % chunks, own), Work(-1, 0, own))
    per_sample = desc.units // desc.samples
    for unit in items_in_order(desc.statistics_phase, desc.units):
        _reduce(dtype, layout, direction, desc, unit, _coefficients(desc, unit // per_sample))
    for i in items_of(desc.result_phase, total if desc.result.address != 0 else 0, desc.chunks_per_take, slot):
        unit = i // chunks
        previous = Work(unit, i % chunks, _coefficients(desc, unit // per_sample))
        _process(dtype, layout, direction, desc, Work(-1, 0, own), previous)


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
