"""From the moments of a unit of GroupNorm to what its output is made of: records in float64, tables in float32.

In rows a chunk has one sum and one sum of squares, in the place of its first channel, and in columns where there is one
group; else every channel has.
"""

import numpy as np

from normgrad.cpu.batch_norm_tables import fill_lanes
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
from normgrad.cpu.channels import partial_index, places_of, usable
from normgrad.cpu.jit import device
from normgrad.cpu.kinds import F32
from normgrad.cpu.memory import load, load_f64, store_f64
from normgrad.cpu.moments import merged
from normgrad.cpu.tables import fill_entry, filled_vectors, lane_of
from normgrad.cpu.vectors import (
    fma,
    splat_f32,
    splat_f64,
    usable_lanes,
    vload,
    vload_f64,
    vstore_f64,
    widen,
)


@device
def _chunk_moments(desc, n, first, last):
    """Sum and squares about the mean of a group, chunk after chunk."""
    total, squares, size = 0.0, 0.0, 0.0
    for chunk in range(desc[CHUNKS]):
        at, places = partial_index(desc, n, chunk), places_of(desc, chunk)
        for c in range(first, last, desc[CHANNELS_AT_ONCE]):
            other, others = load_f64(desc[PARTIALS], at + c), load_f64(desc[PARTIALS], at + c + desc[PITCH])
            count = np.float64(places * min(desc[CHANNELS_AT_ONCE], last - c))
            if size == 0.0:
                total, squares, size = other, others, count
            else:
                total, squares, size = merged(total, squares, size, other, others, count)
    return total, squares


@device
def merge_chunks(desc, n):
    """Sums and squares about the mean of a sample's channels over its chunks, into the first one's."""
    pitch, at, chunks = desc[PITCH], desc[PARTIALS] + 8 * partial_index(desc, n, np.int64(0)), desc[CHUNKS]
    for lane in range(0, pitch, 16):
        total = splat_f64(0.0)
        for chunk in range(chunks):
            total = total + vload_f64(at + 16 * pitch * chunk, lane)
        mean, squares = total * splat_f64(1.0 / desc[PLACES]), splat_f64(0.0)
        for chunk in range(chunks):
            one, count = at + 16 * pitch * chunk, np.float64(places_of(desc, chunk))
            distance = fma(vload_f64(one, lane), splat_f64(1.0 / count), -mean)
            squares = squares + fma(distance * splat_f64(count), distance, vload_f64(one, pitch + lane))
        vstore_f64(at, lane, total)
        vstore_f64(at, pitch + lane, squares)


@device
def _columns_moments(kind, desc, n, first, last):
    """Sum and squares about the mean of a group, from those of its channels."""
    sums, places = desc[PARTIALS] + 8 * partial_index(desc, n, np.int64(0)), np.float64(desc[PLACES])
    total, squares, per_place = 0.0, 0.0, 1.0 / places
    for c in range(first, last):
        total += load_f64(sums, lane_of(kind, True, c))
    mean = total / (places * (last - first))
    for c in range(first, last):
        lane = lane_of(kind, True, c)
        distance = load_f64(sums, lane) * per_place - mean
        squares += load_f64(sums, desc[PITCH] + lane) + distance * distance * places
    return total, squares


@device
def _fill(kind, columns, desc, table, first, last, mean, rstd, weights, biases):
    """Entries of (x − mean)·factor + offset, in which is the rest of the mean; whether float32 will do for all."""
    high, fine, pitch = np.float32(mean), abs(mean) <= 2.0**126, desc[PITCH]
    whole = filled_vectors(columns, desc, first, last)
    rest, flag = mean - high, splat_f32(np.float32(fine))
    for lane in range(first, whole, 16):
        factor = widen(vload(F32, weights, lane)) * splat_f64(rstd)
        offset = fma(splat_f64(-rest), factor, widen(vload(F32, biases, lane)))
        flags = flag * usable_lanes(factor) * usable_lanes(offset)
        fine = fill_lanes(table, pitch, lane, splat_f32(high), splat_f64(0.0), factor, offset, flags) and fine
    for c in range(whole, last):
        lane = lane_of(kind, columns, c)
        factor = rstd * np.float64(load(F32, weights, lane))
        offset = np.float64(load(F32, biases, lane)) - rest * factor
        channel_fine = abs(mean) <= 2.0**126 and usable(factor) and usable(offset)
        fill_entry(table, pitch, lane, mean, 0.0, factor, offset, channel_fine)
        fine = fine and channel_fine
    return fine


@device
def group_statistics(kind, columns, desc, n, q, table, eps, weights, biases):
    """Mean and rstd of a sample's group, to its record, and the table's entries; whether float32 will do for all."""
    per_group, statistic = desc[CHANNELS] // desc[GROUPS], n * desc[GROUPS] + q
    first, last, size = q * per_group, (q + 1) * per_group, np.float64(per_group * desc[PLACES])
    if columns and not desc[ONE_RUN]:
        total, squares = _columns_moments(kind, desc, n, first, last)
    else:
        total, squares = _chunk_moments(desc, n, first, last)
    mean, rstd = total / size, 1.0 / np.sqrt(squares / size + eps)
    store_f64(desc[RECORDS], 2 * statistic, mean)
    store_f64(desc[RECORDS], 2 * statistic + 1, rstd)
    return _fill(kind, columns, desc, table, first, last, mean, rstd, weights, biases)
