"""From the moments of a unit of GroupNorm to the coefficients of its output: records in float64, tables in float32.

In rows a chunk has one sum and one sum of squares, in the place of its first channel, and in columns where there is one
group; else every channel has.
"""

import numpy as np

from normgrad.cpu.channel_fields import (
    CHANNELS,
    CHANNELS_AT_ONCE,
    CHUNKS,
    GROUPS,
    ONE_RUN,
    PARTIALS,
    PITCH,
    PLACES,
    RECORDS,
)
from normgrad.cpu.channels import partial_index, places_of
from normgrad.cpu.jit import device
from normgrad.cpu.kinds import F32
from normgrad.cpu.memory import load, load_f64, store, store_f64
from normgrad.cpu.moments import between, merged
from normgrad.cpu.tables import filled_vectors, lane_of
from normgrad.cpu.vectors import (
    fma,
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
def _fill(kind, columns, desc, table, first, last, mean, rstd, weights, biases):
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
    _fill(kind, columns, desc, table, first, last, mean, rstd, weights, biases)
