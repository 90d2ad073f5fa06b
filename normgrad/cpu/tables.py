"""From sums to what the results are made of: records in float64, tables in float32 for the fast arithmetic."""

import numpy as np

from normgrad.cpu.channel_fields import (
    BIAS,
    CHANNELS,
    CHUNKS,
    GROUPS,
    PARTIALS,
    PITCH,
    PLACES,
    RECORDS,
    WEIGHT,
)
from normgrad.cpu.channels import partial_index, places_of, usable, vector_or
from normgrad.cpu.copies import store_exact
from normgrad.cpu.jit import device
from normgrad.cpu.kinds import F32
from normgrad.cpu.memory import load_f64, store, store_f64
from normgrad.cpu.rows import lane_of_column

# Values about this size and larger: whatever a term loses as a subnormal number does not show.
VISIBLE = 2.0**-100


@device
def lane_of(kind, columns, c):
    """Where a channel is in partials and tables."""
    return lane_of_column(kind, c) if columns else c


@device
def fill_entry(table, pitch, lane, first, second, third, fourth, fine):
    store(F32, table, lane, np.float32(first))
    store(F32, table, pitch + lane, np.float32(second))
    store(F32, table, 2 * pitch + lane, np.float32(third))
    store(F32, table, 3 * pitch + lane, np.float32(fourth))
    store(F32, table, 4 * pitch + lane, np.float32(fine))


@device
def mark_all(kind, desc, table, fine):
    """In columns one flag speaks for all channels, which share vectors; lanes without a channel are to give zeros."""
    pitch = desc[PITCH]
    for c in range(desc[CHANNELS], pitch):
        fill_entry(table, pitch, lane_of_column(kind, c), 0.0, 0.0, 0.0, 0.0, True)
    store(F32, table, 4 * pitch, np.float32(fine))


@device
def fine_gradient(mean, slope, offset):
    """Whether float32 will do for slope·(x − mean) + offset."""
    fine = usable(slope) and usable(offset) and abs(mean) <= 2.0**126
    return fine and (slope == 0.0 or abs(offset) >= VISIBLE)


@device
def _normal_entry(table, pitch, lane, mean, rstd, weight, bias):
    """An entry of (x − mean)·factor + offset, in which is the rest of the mean; whether float32 will do for it."""
    factor = rstd * weight
    offset = bias - (mean - np.float32(mean)) * factor
    fine = usable(factor) and usable(offset) and abs(mean) <= 2.0**126
    fill_entry(table, pitch, lane, mean, 0.0, factor, offset, fine)
    return fine


@device
def group_statistics(kind, columns, desc, n, q, table, eps):
    """Mean and rstd of a sample's group, to its record, and the table's entries; whether float32 will do for all."""
    per_group, statistic, pitch = desc[CHANNELS] // desc[GROUPS], n * desc[GROUPS] + q, desc[PITCH]
    first, last, size = q * per_group, (q + 1) * per_group, np.float64(per_group * desc[PLACES])
    total, squares = 0.0, 0.0
    for chunk in range(desc[CHUNKS]):
        for c in range(first, last):
            total += load_f64(desc[PARTIALS], partial_index(desc, n, chunk) + lane_of(kind, columns, c))
    mean = total / size
    for chunk in range(desc[CHUNKS]):
        count = np.float64(places_of(desc, chunk))
        for c in range(first, last):
            at = partial_index(desc, n, chunk) + lane_of(kind, columns, c)
            distance = load_f64(desc[PARTIALS], at) / count - mean
            squares += load_f64(desc[PARTIALS], at + pitch) + distance * distance * count
    rstd = 1.0 / np.sqrt(squares / size + eps)
    store_f64(desc[RECORDS], 2 * statistic, mean)
    store_f64(desc[RECORDS], 2 * statistic + 1, rstd)
    fine = True
    for c in range(first, last):
        weight, bias = vector_or(desc, WEIGHT, c, 1.0), vector_or(desc, BIAS, c, 0.0)
        fine = _normal_entry(table, pitch, lane_of(kind, columns, c), mean, rstd, weight, bias) and fine
    return fine


@device
def put_vector(desc, output, index, value):
    """Store an element of a small output, where it is wanted."""
    if desc[output] != 0:
        store_exact(desc[output + 2], desc[output], index * desc[output + 1], value)
