"""GroupNorm: the partial sums of chunks, reduced to the statistics and coefficients of a group.

`reduce_gradients` is the backward pass: it adds the partial sums of a sample's chunks, then those of the group's
channels, and stores the coefficients of grad_input. `reduce_moments` is the forward pass. Both work on whole vectors
of channels as far as a group fills them. `common.reduce.sum_partials` adds the sums over samples, for the gradients
of weight and bias.
"""

import numpy as np

from normgrad.cpu.compile.jit import device, inline
from normgrad.cpu.descriptors import SPARE_LANES
from normgrad.cpu.intrinsics.memory import load, load_f64, store, store_f64
from normgrad.cpu.intrinsics.vectors import (
    fma,
    hsum,
    narrow,
    power_of_two,
    saturated,
    splat_f32,
    splat_f64,
    vload,
    vload_f64,
    vstore,
    vstore_f64,
    widen,
)
from normgrad.cpu.kernels.channel.access import partials_of, positions_of
from normgrad.cpu.kernels.channel.coefficients import filled_vectors, whole_vectors
from normgrad.cpu.kernels.common.lanes import lane_of, load_element
from normgrad.cpu.kernels.common.reduce import between, merge_partials, merged
from normgrad.cpu.tags import F32


@device
def bias_lanes(desc):
    """Return the address of the biases in lane order: behind the weights."""
    return desc.parameter_lanes + 4 * (desc.padded_channels + SPARE_LANES)


@inline
def _sum_lanes(desc, n, lane, ratio, total, total_x):
    """Add up 16 channels of one group over the chunks, to the first chunk's partials, and add weight times that."""
    g, gx, pitch, first = splat_f64(0.0), splat_f64(0.0), desc.padded_channels, partials_of(desc, n, 0) + 8 * lane
    for chunk in range(desc.chunks):
        at = first + 16 * pitch * chunk
        g, gx = g + vload_f64(at, 0), gx + vload_f64(at, pitch)
    gx = gx * splat_f64(ratio)
    vstore_f64(first, 0, g)
    vstore_f64(first, pitch, gx)
    weight = widen(vload(F32, desc.parameter_lanes, lane))
    return total + weight * g, total_x + weight * gx


@device
def _sum_lane(desc, n, lane, ratio):
    """As _sum_lanes, for a single channel."""
    g, gx, pitch, first = 0.0, 0.0, desc.padded_channels, partials_of(desc, n, 0)
    for chunk in range(desc.chunks):
        at = first + 16 * pitch * chunk
        g += load_f64(at, lane)
        gx += load_f64(at, pitch + lane)
    gx *= ratio
    store_f64(first, lane, g)
    store_f64(first, pitch + lane, gx)
    weight = np.float64(load(F32, desc.parameter_lanes, lane))
    return weight * g, weight * gx


@device
def _sum_group(dtype, columns, desc, n, first, last, ratio):
    """Return the sums of weight*grad_out and of weight*grad_out*x_hat over a group; x_hat is ratio*deviation."""
    total, total_x, whole = 0.0, 0.0, whole_vectors(columns, first, last)
    if whole > first:
        sums, sums_x = splat_f64(0.0), splat_f64(0.0)
        for lane in range(first, whole, 16):
            sums, sums_x = _sum_lanes(desc, n, lane, ratio, sums, sums_x)
        total, total_x = hsum(sums), hsum(sums_x)
    for c in range(whole, last):
        g, gx = _sum_lane(desc, n, lane_of(dtype, columns, c), ratio)
        total += g
        total_x += gx
    return total, total_x


@device
def _store_gradient_coefficients(dtype, columns, desc, target, first, last, k):
    """Store the coefficients of a group's gradients: k = (scale, shift, factor, mean_g, rstd), and the weights."""
    whole, pitch, weights = filled_vectors(columns, desc, first, last), desc.padded_channels, desc.parameter_lanes
    a, b, c, d, f = splat_f32(k[0]), splat_f32(k[1]), splat_f32(k[2]), splat_f32(k[3]), splat_f32(k[4])
    for lane in range(first, whole, 16):
        vstore(F32, target, lane, a)
        vstore(F32, target, pitch + lane, b)
        vstore(F32, target, 2 * pitch + lane, c)
        vstore(F32, target, 3 * pitch + lane, d)
        vstore(F32, target, 4 * pitch + lane, vload(F32, weights, lane))
        vstore(F32, target, 5 * pitch + lane, f)
    for channel in range(whole, last):
        lane = lane_of(dtype, columns, channel)
        store(F32, target, lane, k[0])
        store(F32, target, pitch + lane, k[1])
        store(F32, target, 2 * pitch + lane, k[2])
        store(F32, target, 3 * pitch + lane, k[3])
        store(F32, target, 4 * pitch + lane, load(F32, weights, lane))
        store(F32, target, 5 * pitch + lane, k[4])


@device
def reduce_gradients(dtype, columns, desc, n, q, target):
    """Reduce the partial sums of group q of sample n, and store the coefficients of its gradients.

    The sums over all positions are left in the partials of the sample's first chunk.
    """
    per_group, statistic = desc.channels // desc.groups, n * desc.groups + q
    first, last, size = q * per_group, (q + 1) * per_group, np.float64(per_group * desc.positions)
    mean, rstd = load_element(desc.mean, statistic), load_element(desc.rstd, statistic)
    ratio = rstd / power_of_two(rstd, mean)
    total, total_x = _sum_group(dtype, columns, desc, n, first, last, ratio)
    if desc.result.address != 0:
        coefficient = rstd * (total_x / size)
        scale = power_of_two(coefficient, mean)
        shift, factor = np.float32(-(mean * scale)), np.float32(coefficient / scale)
        k = np.float32(scale), shift, factor, np.float32(total / size), np.float32(rstd)
        _store_gradient_coefficients(dtype, columns, desc, target, first, last, k)


@device
def sum_coefficients(desc, n, q):
    """Return scale and shift for the sums of a group, whose deviation is x_hat but for a factor of at most two."""
    statistic = n * desc.groups + q
    mean = load_element(desc.mean, statistic)
    scale = power_of_two(load_element(desc.rstd, statistic), mean)
    return np.float32(scale), np.float32(-(mean * scale))


@device
def store_sum_coefficients(dtype, desc, n, target):
    """Store scale and shift for the sums of a sample in columns, one of each per channel."""
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
    """Merge the sums and M2 of a sample's channels over its chunks, into the first chunk's."""
    first = partials_of(desc, n, 0)
    for lane in range(0, desc.padded_channels, 16):
        total, squares = merge_partials(desc, n, n + 1, lane)
        vstore_f64(first, lane, total)
        vstore_f64(first, desc.padded_channels + lane, squares)


@device
def _merge_chunks_of_group(desc, n, first, last):
    """Return the sum and M2 of a group, where every chunk has one of each: in the partials of its first channel."""
    total, squares, size = 0.0, 0.0, 0.0
    for chunk in range(desc.chunks):
        partials, positions = partials_of(desc, n, chunk), positions_of(desc, chunk)
        for c in range(first, last, desc.chunk_channels):
            other, others = load_f64(partials, c), load_f64(partials, c + desc.padded_channels)
            count = np.float64(positions * min(desc.chunk_channels, last - c))
            if size == 0.0:
                total, squares, size = other, others, count
            else:
                total, squares = merged(total, squares, size, other, others, count)
                size += count
    return total, squares


@device
def _merge_channels(dtype, desc, n, first, last):
    """Return the sum and M2 of a group, where every channel has one of each."""
    sums, positions = partials_of(desc, n, 0), np.float64(desc.positions)
    total, squares, size = 0.0, 0.0, positions * (last - first)
    for c in range(first, last):
        total += load_f64(sums, lane_of(dtype, True, c))
    for c in range(first, last):
        lane = lane_of(dtype, True, c)
        apart = between(load_f64(sums, lane), positions, total, size, 1.0 / (positions * size * size))
        squares += load_f64(sums, desc.padded_channels + lane) + apart
    return total, squares


@device
def _store_output_coefficients(dtype, columns, desc, target, first, last, mean, rstd):
    """Store the coefficients of a group's output. The offset has what rounding the mean to float32 takes off it."""
    weights, biases, pitch = desc.parameter_lanes, bias_lanes(desc), desc.padded_channels
    high, whole = np.float32(mean), filled_vectors(columns, desc, first, last)
    scale = power_of_two(rstd, np.float64(high))
    shift, ratio, rest = np.float32(-(high * scale)), rstd / scale, (high - mean) * rstd
    for lane in range(first, whole, 16):
        weight = widen(vload(F32, weights, lane))
        vstore(F32, target, lane, splat_f32(np.float32(scale)))
        vstore(F32, target, pitch + lane, splat_f32(shift))
        vstore(F32, target, 2 * pitch + lane, narrow(saturated(weight * splat_f64(ratio))))
        vstore(F32, target, 3 * pitch + lane, narrow(fma(splat_f64(rest), weight, widen(vload(F32, biases, lane)))))
    for c in range(whole, last):
        lane = lane_of(dtype, columns, c)
        weight = np.float64(load(F32, weights, lane))
        store(F32, target, lane, np.float32(scale))
        store(F32, target, pitch + lane, shift)
        store(F32, target, 2 * pitch + lane, np.float32(saturated(weight * ratio)))
        store(F32, target, 3 * pitch + lane, np.float32(fma(rest, weight, np.float64(load(F32, biases, lane)))))


@device
def reduce_moments(dtype, columns, desc, n, q, target):
    """Reduce the partial moments of group q of sample n to mean and rstd, and store the coefficients of its output."""
    per_group, statistic = desc.channels // desc.groups, n * desc.groups + q
    first, last, size = q * per_group, (q + 1) * per_group, np.float64(per_group * desc.positions)
    if columns and not desc.is_contiguous:
        total, squares = _merge_channels(dtype, desc, n, first, last)
    else:
        total, squares = _merge_chunks_of_group(desc, n, first, last)
    mean, rstd = total / size, 1.0 / np.sqrt(squares / size + desc.eps)
    store_f64(desc.statistics, 2 * statistic, mean)
    store_f64(desc.statistics, 2 * statistic + 1, rstd)
    _store_output_coefficients(dtype, columns, desc, target, first, last, mean, rstd)
