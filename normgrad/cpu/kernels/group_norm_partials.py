"""From the sums of a unit of GroupNorm to the coefficients of its gradients.

Partials and tables are worked on in whole vectors, so the weight is there as float32 in the order of their lanes.

From the moments of a unit of GroupNorm to the coefficients of its output: records in float64, tables in float32.

In rows a chunk has one sum and one sum of squares, in the place of its first channel, and in columns where there is one
group; else every channel has.
"""

import numpy as np

from normgrad.cpu.compile.jit import device, in_place
from normgrad.cpu.fields.channel import (
    CHANNELS,
    CHANNELS_AT_ONCE,
    CHUNKS,
    GROUPS,
    MEAN,
    ONE_RUN,
    PARTIALS,
    PITCH,
    PLACES,
    RECORDS,
    RESULT,
    RSTD,
    SAMPLES,
)
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
from normgrad.cpu.kernels.channel.access import partial_index, places_of, vector_value
from normgrad.cpu.kernels.channel.coefficients import filled_vectors, lane_of, whole_vectors
from normgrad.cpu.kernels.common.moments import between, merged
from normgrad.cpu.tags import F32


@in_place
def _sum_chunks(desc, n, lane):
    """The sums of 16 lanes over a sample's chunks."""
    g, gx = splat_f64(0.0), splat_f64(0.0)
    for chunk in range(desc[CHUNKS]):
        at = desc[PARTIALS] + 8 * (partial_index(desc, n, chunk) + lane)
        g, gx = g + vload_f64(at, 0), gx + vload_f64(at, desc[PITCH])
    return g, gx


@in_place
def _weigh(desc, n, lane, ratio, weights, total, total_x):
    """Add the weighted sums of 16 lanes of one group to the group's; the first chunk gets those over all chunks."""
    g, gx = _sum_chunks(desc, n, lane)
    gx = gx * splat_f64(ratio)
    at = desc[PARTIALS] + 8 * (partial_index(desc, n, np.int64(0)) + lane)
    vstore_f64(at, 0, g)
    vstore_f64(at, desc[PITCH], gx)
    weight = widen(vload(F32, weights, lane))
    return total + weight * g, total_x + weight * gx


@device
def _weigh_one(desc, n, lane, ratio, weights):
    """As _weigh, of a single lane."""
    g, gx = 0.0, 0.0
    for chunk in range(desc[CHUNKS]):
        at = partial_index(desc, n, chunk) + lane
        g += load_f64(desc[PARTIALS], at)
        gx += load_f64(desc[PARTIALS], at + desc[PITCH])
    gx *= ratio
    at = partial_index(desc, n, np.int64(0)) + lane
    store_f64(desc[PARTIALS], at, g)
    store_f64(desc[PARTIALS], at + desc[PITCH], gx)
    weight = np.float64(load(F32, weights, lane))
    return weight * g, weight * gx


@device
def _group_sums(kind, columns, desc, n, first, last, ratio, weights):
    """The sums of weight·grad_out and of weight·grad_out·x̂ over a group; x̂ is the ratio times the deviation."""
    total, total_x, whole = 0.0, 0.0, whole_vectors(columns, first, last)
    if whole > first:
        sums, sums_x = splat_f64(0.0), splat_f64(0.0)
        for lane in range(first, whole, 16):
            sums, sums_x = _weigh(desc, n, lane, ratio, weights, sums, sums_x)
        total, total_x = hsum(sums), hsum(sums_x)
    for c in range(whole, last):
        g, gx = _weigh_one(desc, n, lane_of(kind, columns, c), ratio, weights)
        total += g
        total_x += gx
    return total, total_x


@in_place
def _fill_vector(table, pitch, lane, scale, shift, factor, mean_g, weight, rstd):
    vstore(F32, table, lane, scale)
    vstore(F32, table, pitch + lane, shift)
    vstore(F32, table, 2 * pitch + lane, factor)
    vstore(F32, table, 3 * pitch + lane, mean_g)
    vstore(F32, table, 4 * pitch + lane, weight)
    vstore(F32, table, 5 * pitch + lane, rstd)


@in_place
def _fill_lane(table, pitch, lane, scale, shift, factor, mean_g, weight, rstd):
    store(F32, table, lane, scale)
    store(F32, table, pitch + lane, shift)
    store(F32, table, 2 * pitch + lane, factor)
    store(F32, table, 3 * pitch + lane, mean_g)
    store(F32, table, 4 * pitch + lane, weight)
    store(F32, table, 5 * pitch + lane, rstd)


@device
def _fill_gradient_coefficients(kind, columns, desc, table, first, last, scale, shift, factor, mean_g, rstd, weights):
    """The coefficients of a group's gradients."""
    whole, pitch = filled_vectors(columns, desc, first, last), desc[PITCH]
    a, b, c, d, f = splat_f32(scale), splat_f32(shift), splat_f32(factor), splat_f32(mean_g), splat_f32(rstd)
    for lane in range(first, whole, 16):
        _fill_vector(table, pitch, lane, a, b, c, d, vload(F32, weights, lane), f)
    for channel in range(whole, last):
        lane = lane_of(kind, columns, channel)
        _fill_lane(table, pitch, lane, scale, shift, factor, mean_g, load(F32, weights, lane), rstd)


@device
def group_gradients(kind, columns, desc, n, q, table, weights):
    """The coefficients of a sample's group from its partials.

    The sums over all positions are left in the partials of the sample's first chunk.
    """
    per_group, statistic = desc[CHANNELS] // desc[GROUPS], n * desc[GROUPS] + q
    first, last, size = q * per_group, (q + 1) * per_group, np.float64(per_group * desc[PLACES])
    mean, rstd = vector_value(desc, MEAN, statistic), vector_value(desc, RSTD, statistic)
    ratio = rstd / power_of_two(rstd, mean)
    total, total_x = _group_sums(kind, columns, desc, n, first, last, ratio, weights)
    if desc[RESULT] != 0:
        coefficient = rstd * (total_x / size)
        scale = power_of_two(coefficient, mean)
        a, b, c = np.float32(scale), np.float32(-(mean * scale)), np.float32(coefficient / scale)
        _fill_gradient_coefficients(
            kind, columns, desc, table, first, last, a, b, c, np.float32(total / size), np.float32(rstd), weights
        )


@device
def sum_coefficients(desc, n, q):
    """scale and shift of the sums of a sample's group, whose deviation is x̂ but for a factor of less than two."""
    statistic = n * desc[GROUPS] + q
    mean = vector_value(desc, MEAN, statistic)
    scale = power_of_two(vector_value(desc, RSTD, statistic), mean)
    return np.float32(scale), np.float32(-(mean * scale))


@device
def spread_sum_coefficients(kind, desc, n, table):
    """scale and shift of a sample's sums in columns, one of each per channel."""
    per_group, pitch = desc[CHANNELS] // desc[GROUPS], desc[PITCH]
    for q in range(desc[GROUPS]):
        first = q * per_group
        scale, shift = sum_coefficients(desc, n, q)
        whole = whole_vectors(True, first, first + per_group)
        for lane in range(first, whole, 16):
            vstore(F32, table, lane, splat_f32(scale))
            vstore(F32, table, pitch + lane, splat_f32(shift))
        for c in range(whole, first + per_group):
            store(F32, table, lane_of(kind, True, c), scale)
            store(F32, table, pitch + lane_of(kind, True, c), shift)


@device
def total_samples(desc, block):
    """Add up the sums of 32 channels over the samples, into the first one's."""
    pitch, step = desc[PITCH], 16 * desc[PITCH] * desc[CHUNKS]
    at = first = desc[PARTIALS] + 8 * 32 * block
    zero = splat_f64(0.0)
    g0, g1, x0, x1 = zero, zero, zero, zero
    for _ in range(desc[SAMPLES]):
        g0, g1 = g0 + vload_f64(at, 0), g1 + vload_f64(at, 16)
        x0, x1 = x0 + vload_f64(at, pitch), x1 + vload_f64(at, pitch + 16)
        at += step
    vstore_f64(first, 0, g0)
    vstore_f64(first, 16, g1)
    vstore_f64(first, pitch, x0)
    vstore_f64(first, pitch + 16, x1)


@device
def _chunk_moments(desc, n, first, last):
    """Sum and M2 of a group, chunk after chunk."""
    total, squares, size = 0.0, 0.0, 0.0
    for chunk in range(desc[CHUNKS]):
        at, places = partial_index(desc, n, chunk), places_of(desc, chunk)
        for c in range(first, last, desc[CHANNELS_AT_ONCE]):
            other, others = load_f64(desc[PARTIALS], at + c), load_f64(desc[PARTIALS], at + c + desc[PITCH])
            count = np.float64(places * min(desc[CHANNELS_AT_ONCE], last - c))
            if size == 0.0:
                total, squares, size = other, others, count
            else:
                total, squares = merged(total, squares, size, other, others, count)
                size += count
    return total, squares


@device
def merge_chunks(desc, n):
    """Sums and M2 of a sample's channels over its chunks, into the first one's."""
    pitch, at, chunks = desc[PITCH], desc[PARTIALS] + 8 * partial_index(desc, n, np.int64(0)), desc[CHUNKS]
    for lane in range(0, pitch, 16):
        total, squares = splat_f64(0.0), splat_f64(0.0)
        for chunk in range(chunks):
            total = total + vload_f64(at + 16 * pitch * chunk, lane)
        for chunk in range(chunks):
            one, count, size = at + 16 * pitch * chunk, np.float64(places_of(desc, chunk)), np.float64(desc[PLACES])
            share = splat_f64(1.0 / (count * size * size))
            apart = between(vload_f64(one, lane), splat_f64(count), total, splat_f64(size), share)
            squares = squares + (vload_f64(one, pitch + lane) + apart)
        vstore_f64(at, lane, total)
        vstore_f64(at, pitch + lane, squares)


@device
def _columns_moments(kind, desc, n, first, last):
    """Sum and M2 of a group, from those of its channels."""
    sums, places = desc[PARTIALS] + 8 * partial_index(desc, n, np.int64(0)), np.float64(desc[PLACES])
    total, squares, size = 0.0, 0.0, places * (last - first)
    for c in range(first, last):
        total += load_f64(sums, lane_of(kind, True, c))
    for c in range(first, last):
        lane = lane_of(kind, True, c)
        apart = between(load_f64(sums, lane), places, total, size, 1.0 / (places * size * size))
        squares += load_f64(sums, desc[PITCH] + lane) + apart
    return total, squares


@device
def _fill_output_coefficients(kind, columns, desc, table, first, last, mean, rstd, weights, biases):
    """The coefficients of a group's output. The offset has what the float32 mean leaves of the mean."""
    high, pitch, whole = np.float32(mean), desc[PITCH], filled_vectors(columns, desc, first, last)
    scale = power_of_two(rstd, np.float64(high))
    shift, ratio, rest = np.float32(-(high * scale)), rstd / scale, (high - mean) * rstd
    for lane in range(first, whole, 16):
        weight = widen(vload(F32, weights, lane))
        vstore(F32, table, lane, splat_f32(np.float32(scale)))
        vstore(F32, table, pitch + lane, splat_f32(shift))
        vstore(F32, table, 2 * pitch + lane, narrow(saturated(weight * splat_f64(ratio))))
        vstore(F32, table, 3 * pitch + lane, narrow(fma(splat_f64(rest), weight, widen(vload(F32, biases, lane)))))
    for c in range(whole, last):
        lane = lane_of(kind, columns, c)
        weight = np.float64(load(F32, weights, lane))
        store(F32, table, lane, np.float32(scale))
        store(F32, table, pitch + lane, shift)
        store(F32, table, 2 * pitch + lane, np.float32(saturated(weight * ratio)))
        store(F32, table, 3 * pitch + lane, np.float32(fma(rest, weight, np.float64(load(F32, biases, lane)))))


@device
def group_statistics(kind, columns, desc, n, q, table, eps, weights, biases):
    """Mean and rstd of a sample's group, to its record, and the table's entries."""
    per_group, statistic = desc[CHANNELS] // desc[GROUPS], n * desc[GROUPS] + q
    first, last, size = q * per_group, (q + 1) * per_group, np.float64(per_group * desc[PLACES])
    if columns and not desc[ONE_RUN]:
        total, squares = _columns_moments(kind, desc, n, first, last)
    else:
        total, squares = _chunk_moments(desc, n, first, last)
    mean, rstd = total / size, 1.0 / np.sqrt(squares / size + eps)
    store_f64(desc[RECORDS], 2 * statistic, mean)
    store_f64(desc[RECORDS], 2 * statistic + 1, rstd)
    _fill_output_coefficients(kind, columns, desc, table, first, last, mean, rstd, weights, biases)
