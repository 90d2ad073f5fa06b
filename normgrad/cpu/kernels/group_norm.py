"""GroupNorm: the kernels `group_norm` and `group_norm_backward`.

A unit is what a thread sums before it can write results: in rows a group of a sample, or several small ones, in columns
a sample with all its groups. A thread takes a unit, sums its chunks, reduces the sums, and writes the results of its
chunks while their data is in a cache. Units that would not stay there, or too few of them, are processed in phases
instead: the sums of all chunks, the statistics of all units, the results of all chunks. Either way the work is done by
the functions `_sum` and `compute_results`, which `choose` has for each layout and direction, and three that the kernel
names.

The partial sums of a unit's chunks are reduced to statistics and coefficients of its groups: by `reduce_gradients` in
the backward pass, by `reduce_moments` in the forward pass, in whole vectors of channels as far as a group fills them.
For the gradients of weight and bias, a thread adds the sums of a block of samples as they come, and
`common.reduce.sum_partials` those of all blocks.
"""

from collections import namedtuple

import numpy as np

from normgrad.cpu import limits
from normgrad.cpu.compile.jit import device, inline, kernel
from normgrad.cpu.descriptors import COEFFICIENTS, Channel
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
from normgrad.cpu.kernels.channel.access import choose, chunk_of, in_columns, positions_of, quotient
from normgrad.cpu.kernels.channel.coefficients import filled_vectors, whole_vectors
from normgrad.cpu.kernels.channel.results import compute_results
from normgrad.cpu.kernels.common.lanes import from_lanes, lane_of, load_element, store_element, to_lanes
from normgrad.cpu.kernels.common.reduce import between, merge_partials, merged, sum_partials
from normgrad.cpu.kernels.common.work import items_in_order, items_of
from normgrad.cpu.tags import BACKWARD, F32, F64, FORWARD

#: The groups [first, last) of sample n, the partial sums of its chunks, and its coefficients. `sums` are those of the
#: samples of its block so far, none where it `is_first`; these samples use the same partials, one after another.
Unit = namedtuple("Unit", "n first last partials coefficients sums is_first")


@device
def _unit_of(desc, number, coefficients):
    units, nbytes = quotient(desc.groups, desc.unit_groups), 16 * desc.padded_channels  # of two sums for every channel
    n = quotient(number, units)
    block, first = quotient(n, desc.block_samples), (number - n * units) * desc.unit_groups
    partials, sums = desc.partials + block * desc.chunks * nbytes, desc.sums + block * nbytes
    return Unit(n, first, first + desc.unit_groups, partials, coefficients, sums, n == block * desc.block_samples)


# Partial sums to the statistics and coefficients of a group.


@device
def bias_lanes(desc):
    """Return the address of the biases in lane order: behind the weights."""
    return desc.parameter_lanes + 4 * desc.padded_channels


@inline
def _sum_channels(get, put, desc, unit, lane, ratio, zero):
    """Add up a channel, or 16 of a group, over the chunks, and to the block's sums; return weight times the sums.

    `get` and `put` are `load` and `store`, or `vload` and `vstore`; `ratio` is that of x_hat to the deviation summed.
    """
    g, gx, pitch, sums = zero, zero, desc.padded_channels, unit.sums
    for chunk in range(desc.chunks):
        at = unit.partials + 16 * pitch * chunk
        g, gx = g + get(F64, at, lane), gx + get(F64, at, pitch + lane)
    gx = gx * ratio
    if unit.is_first:
        put(F64, sums, lane, g)
        put(F64, sums, pitch + lane, gx)
    else:
        put(F64, sums, lane, get(F64, sums, lane) + g)
        put(F64, sums, pitch + lane, get(F64, sums, pitch + lane) + gx)
    weight = widen(get(F32, desc.parameter_lanes, lane))
    return weight * g, weight * gx


@device
def _sum_group(dtype, paired, desc, unit, first, last, ratio):
    """Return the sums of weight*grad_out and of weight*grad_out*x_hat over a group; x_hat is ratio*deviation."""
    total, total_x, whole = 0.0, 0.0, whole_vectors(paired, first, last)
    if whole > first:
        sums, sums_x = splat_f64(0.0), splat_f64(0.0)
        for lane in range(first, whole, 16):
            g, gx = _sum_channels(vload, vstore, desc, unit, lane, splat_f64(ratio), splat_f64(0.0))
            sums, sums_x = sums + g, sums_x + gx
        total, total_x = hsum(sums), hsum(sums_x)
    for c in range(whole, last):
        g, gx = _sum_channels(load, store, desc, unit, lane_of(dtype, paired, c), ratio, 0.0)
        total += g
        total_x += gx
    return total, total_x


@inline
def _put_gradient_coefficients(get, put, pitch, weights, target, lane, k):
    put(F32, target, lane, k[0])
    put(F32, target, pitch + lane, k[1])
    put(F32, target, 2 * pitch + lane, k[2])
    put(F32, target, 3 * pitch + lane, k[3])
    put(F32, target, 4 * pitch + lane, get(F32, weights, lane))
    put(F32, target, 5 * pitch + lane, k[4])


@device
def _store_gradient_coefficients(dtype, paired, desc, target, first, last, k):
    """Store the coefficients of a group's gradients (`coefficients.gradient`): the weights are its `pre`.

    k = (scale, shift, factor, mean_g, rstd) are the same for all channels of the group.
    """
    whole, pitch, weights = filled_vectors(paired, desc, first, last), desc.padded_channels, desc.parameter_lanes
    splats = splat_f32(k[0]), splat_f32(k[1]), splat_f32(k[2]), splat_f32(k[3]), splat_f32(k[4])
    for lane in range(first, whole, 16):
        _put_gradient_coefficients(vload, vstore, pitch, weights, target, lane, splats)
    for c in range(whole, last):
        _put_gradient_coefficients(load, store, pitch, weights, target, lane_of(dtype, paired, c), k)


@device
def reduce_gradients(dtype, paired, desc, unit, q):
    """Reduce the partial sums of group q of a unit, and store the coefficients of its gradients."""
    per_group, statistic = desc.group_channels, unit.n * desc.groups + q
    first, last, size = q * per_group, (q + 1) * per_group, np.float64(per_group * desc.positions)
    mean, rstd = load_element(desc.mean, statistic), load_element(desc.rstd, statistic)
    ratio = rstd / power_of_two(rstd, mean)
    total, total_x = _sum_group(dtype, paired, desc, unit, first, last, ratio)
    if desc.result.address != 0:
        coefficient = rstd * (total_x / size)
        scale = power_of_two(coefficient, mean)
        shift, factor = np.float32(-(mean * scale)), np.float32(coefficient / scale)
        k = np.float32(scale), shift, factor, np.float32(total / size), np.float32(rstd)
        _store_gradient_coefficients(dtype, paired, desc, unit.coefficients, first, last, k)


@device
def store_sum_coefficients(dtype, paired, desc, unit):
    """Store scale and shift for the sums of a unit, one of each per channel: it sums the deviation (x - mean)*scale.

    The scale is the power of two above rstd, or a smaller one where the mean is so large that mean*scale would
    overflow. `reduce_gradients` multiplies the sums by rstd/scale, which makes the deviation x_hat.
    """
    per_group, pitch, target = desc.group_channels, desc.padded_channels, unit.coefficients
    for q in range(unit.first, unit.last):
        statistic, first, last = unit.n * desc.groups + q, q * per_group, (q + 1) * per_group
        mean = load_element(desc.mean, statistic)
        power = power_of_two(load_element(desc.rstd, statistic), mean)
        scale, shift, whole = np.float32(power), np.float32(-(mean * power)), filled_vectors(paired, desc, first, last)
        for lane in range(first, whole, 16):
            vstore(F32, target, lane, splat_f32(scale))
            vstore(F32, target, pitch + lane, splat_f32(shift))
        for c in range(whole, last):
            store(F32, target, lane_of(dtype, paired, c), scale)
            store(F32, target, pitch + lane_of(dtype, paired, c), shift)


@device
def merge_chunks(desc, unit):
    """Merge the sums and M2 of a sample's channels over its chunks, into the first chunk's partials."""
    for lane in range(0, desc.padded_channels, 16):
        total, squares = merge_partials(desc, unit.partials, 1, lane)
        vstore(F64, unit.partials, lane, total)
        vstore(F64, unit.partials, desc.padded_channels + lane, squares)


@device
def _merge_chunks_of_group(desc, unit, first, last):
    """Return the sum and M2 of a group, where a chunk has one sum and one M2 for all its elements.

    They are in the chunk's partials, at its first channel.
    """
    total, squares, size = 0.0, 0.0, 0.0
    for chunk in range(desc.chunks):
        partials, positions = unit.partials + 16 * desc.padded_channels * chunk, positions_of(desc, chunk)
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
def _merge_channels(dtype, desc, unit, first, last):
    """Return the sum and M2 of a group, where every channel has its own: `merge_chunks` has merged them over chunks."""
    sums, positions = unit.partials, np.float64(desc.positions)
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
def reduce_moments(dtype, paired, desc, unit, q):
    """Reduce the partial moments of group q of a unit to mean and rstd, and store the coefficients of its output."""
    per_group, statistic = desc.group_channels, unit.n * desc.groups + q
    first, last, size = q * per_group, (q + 1) * per_group, np.float64(per_group * desc.positions)
    if paired and not desc.is_contiguous:
        total, squares = _merge_channels(dtype, desc, unit, first, last)
    else:
        total, squares = _merge_chunks_of_group(desc, unit, first, last)
    mean, rstd = total / size, 1.0 / np.sqrt(squares / size + desc.eps)
    store(F64, desc.statistics, 2 * statistic, mean)
    store(F64, desc.statistics, 2 * statistic + 1, rstd)
    _store_output_coefficients(dtype, paired, desc, unit.coefficients, first, last, mean, rstd)


# The steps of a unit, and the outputs of a call.


def _sum(dtype, layout, direction, desc, chunk):
    """Sum a chunk, to its partials."""


@inline
def _sum_rows(dtype, desc, chunk):
    rows.compute_sums(dtype, desc, chunk, False)


@inline
def _sum_columns(dtype, desc, chunk):
    columns.compute_sums(dtype, desc, chunk, limits.COLUMN_RUN)


choose(
    _sum,
    rows_backward=_sum_rows,
    rows_forward=rows.compute_moments,
    columns_backward=_sum_columns,
    columns_forward=columns.compute_moments,
)


@inline
def _prepare_nothing(dtype, paired, desc, unit):
    return


@inline
def _reduce_backward(dtype, paired, desc, unit):
    for q in range(unit.first, unit.last):
        reduce_gradients(dtype, paired, desc, unit, q)


@inline
def _reduce_forward(dtype, paired, desc, unit):
    if paired and not desc.is_contiguous:
        merge_chunks(desc, unit)
    for q in range(unit.first, unit.last):
        reduce_moments(dtype, paired, desc, unit, q)


@inline
def _write_gradients(dtype, paired, desc):
    """Write grad_weight and grad_bias: the sums over blocks of samples, 32 channels at a time."""
    is_wanted, pitch = desc.grad_weight.address != 0 or desc.grad_bias.address != 0, desc.padded_channels
    blocks = quotient(desc.samples + desc.block_samples - 1, desc.block_samples)
    for part in items_in_order(desc.output_phase, (desc.channels + 31) // 32 if is_wanted else 0):
        sums, first, last = desc.sums + 256 * part, 32 * part, min(desc.channels, 32 * (part + 1))
        sum_partials(sums, blocks, 16 * pitch, pitch)
        from_lanes(dtype, paired, desc.grad_weight, first, last, sums + 8 * pitch)
        from_lanes(dtype, paired, desc.grad_bias, first, last, sums)


@inline
def _write_statistics(dtype, paired, desc):
    """Write mean and rstd: once all input is read, since they may alias it."""
    count, some = desc.samples * desc.groups, limits.WRITTEN_STATISTICS
    for part in items_in_order(desc.output_phase, quotient(count + some - 1, some)):
        for statistic in range(part * some, min((part + 1) * some, count)):
            store_element(desc.mean, statistic, load(F64, desc.statistics, 2 * statistic))
            store_element(desc.rstd, statistic, load(F64, desc.statistics, 2 * statistic + 1))


@device
def _coefficients(desc, number):
    """Return the address of a set of coefficients: one for each slot, or in phases one for each sample.

    In phases each slot has one more, for what the sums need.
    """
    return desc.coefficients + 4 * COEFFICIENTS * desc.padded_channels * number


@device
def _order_parameters(dtype, paired, desc):
    """Store weight and bias in lane order."""
    pitch = desc.padded_channels
    for _ in items_in_order(desc.parameter_phase, 1):
        to_lanes(dtype, paired, desc.weight, 1.0, desc.parameter_lanes, 0, pitch, desc.channels)
        to_lanes(dtype, paired, desc.bias, 0.0, bias_lanes(desc), 0, pitch, desc.channels)


@inline
def _chunk(layout, desc, unit, number):
    return chunk_of(layout, desc, unit.n, unit.first, number, unit.partials, unit.coefficients)


@inline
def _unit_by_unit(dtype, layout, direction, desc, slot, prepare, reduce):
    """Process unit after unit: its sums, and its results while its data is in a cache."""
    own, results = _coefficients(desc, slot), desc.unit_chunks if desc.result.address != 0 else 0
    for number in items_of(desc.sum_phase, desc.units, desc.units_per_take, slot):
        unit = _unit_of(desc, number, own)
        prepare(dtype, in_columns(layout), desc, unit)
        for i in range(desc.unit_chunks):
            _sum(dtype, layout, direction, desc, _chunk(layout, desc, unit, i))
        reduce(dtype, in_columns(layout), desc, unit)
        for i in range(results):
            compute_results(dtype, layout, direction, desc, _chunk(layout, desc, unit, i))


@inline
def _in_phases(dtype, layout, direction, desc, slot, prepare, reduce):
    """Sum all chunks, reduce all units, then compute the results of all chunks."""
    paired, chunks, total = in_columns(layout), desc.unit_chunks, desc.units * desc.unit_chunks
    own, units, previous = _coefficients(desc, desc.samples + slot), quotient(desc.groups, desc.unit_groups), -1
    for i in items_of(desc.sum_phase, total, desc.chunks_per_take, slot):
        number = i // chunks
        unit = _unit_of(desc, number, own)
        if number != previous:
            prepare(dtype, paired, desc, unit)
            previous = number
        _sum(dtype, layout, direction, desc, _chunk(layout, desc, unit, i % chunks))
    for number in items_in_order(desc.statistics_phase, desc.units):
        reduce(dtype, paired, desc, _unit_of(desc, number, _coefficients(desc, number // units)))
    for i in items_of(desc.result_phase, total if desc.result.address != 0 else 0, desc.chunks_per_take, slot):
        number = i // chunks
        unit = _unit_of(desc, number, _coefficients(desc, number // units))
        compute_results(dtype, layout, direction, desc, _chunk(layout, desc, unit, i % chunks))


@inline
def _run(dtype, layout, direction, desc, prepare, reduce, write):
    slot = fetch_add(desc.slot, 1)
    if slot >= desc.slots:
        return
    _order_parameters(dtype, in_columns(layout), desc)
    if desc.in_phases:
        _in_phases(dtype, layout, direction, desc, slot, prepare, reduce)
    else:
        _unit_by_unit(dtype, layout, direction, desc, slot, prepare, reduce)
    write(dtype, in_columns(layout), desc)


@kernel
def group_norm_backward(desc: Channel, dtype, layout):
    _run(dtype, layout, BACKWARD, desc, store_sum_coefficients, _reduce_backward, _write_gradients)


@kernel
def group_norm(desc: Channel, dtype, layout):
    _run(dtype, layout, FORWARD, desc, _prepare_nothing, _reduce_forward, _write_statistics)
