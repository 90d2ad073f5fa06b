"""BatchNorm's small vectors: brought into the order of lanes, made into tables, brought out again; 32 channels at once.

Records are float64, tables float32 for the fast arithmetic. Lanes without a channel give zeros.
"""

import numpy as np

from normgrad.cpu.channel_fields import (
    BIAS,
    CHANNELS,
    CHUNKS,
    COUNTER,
    COUNTS,
    MEAN,
    PARTIALS,
    PITCH,
    PLACES,
    PLANES,
    RECORDS,
    RSTD,
    SAMPLES,
    SUM_DY,
    SUM_DY_XMU,
    WEIGHT,
)
from normgrad.cpu.channels import partial_index, places_of, vector_or, vector_value
from normgrad.cpu.jit import device, in_place
from normgrad.cpu.kinds import F32
from normgrad.cpu.memory import item_size, load, load_f64, store, store_f64
from normgrad.cpu.pairs import is_bfloat, load_ordered, load_pair, store_ordered, store_pair
from normgrad.cpu.tables import VISIBLE, lane_of, put_vector
from normgrad.cpu.vectors import (
    all_between,
    fma,
    lanes_between,
    narrow,
    splat_f32,
    splat_f64,
    square_roots,
    usable_lanes,
    vload,
    vload_f64,
    vstore,
    vstore_f64,
    widen,
)

_MOST = 2.0**126  # of a mean: a difference from it is then finite
_MOST_IN_HALF = 2.0**16  # of a factor: terms of opposite signs, rounded, do not make a sum that float16 does not hold


@device
def spread(kind, columns, desc, vector, absent, target):
    """A small vector as float32 in the order of lanes."""
    channels, pitch, whole = desc[CHANNELS], desc[PITCH], 0
    if desc[vector] == 0:
        whole = channels & ~31
        for lane in range(0, whole, 16):
            vstore(F32, target, lane, splat_f32(np.float32(absent)))
    elif desc[vector + 1] == 1 and desc[vector + 2] == 0:
        whole = channels & ~31
        for c in range(0, whole, 32):
            v = load_ordered(kind, desc[vector], c) if columns else load_pair(F32, desc[vector], c)
            vstore(F32, target, c, v[0])
            vstore(F32, target, c + 16, v[1])
    for c in range(whole, pitch):
        value = vector_or(desc, vector, c, absent) if c < channels else 0.0
        store(F32, target, lane_of(kind, columns, c), np.float32(value))


@device
def put_lanes(kind, columns, desc, output, block, source):
    """Store 32 channels of a small output from float64 in the order of lanes, where it is wanted."""
    first, last = 32 * block, min(desc[CHANNELS], 32 * (block + 1))
    if desc[output] != 0 and desc[output + 1] == 1 and desc[output + 2] == 0 and last - first == 32:
        low, high = narrow(vload_f64(source, first)), narrow(vload_f64(source, first + 16))
        if columns:
            store_ordered(kind, desc[output], first, low, high)
        else:
            store_pair(F32, desc[output], first, low, high)
        return
    for c in range(first, last):
        put_vector(desc, output, c, load_f64(source, lane_of(kind, columns, c)))


@device
def _statistics(desc, lane, eps):
    """Mean and invstd of 16 channels over all samples, to the records."""
    size, at, zero = splat_f64(1.0 / (desc[SAMPLES] * desc[PLACES])), desc[PARTIALS] + 8 * lane, splat_f64(0.0)
    pitch, total, squares = desc[PITCH], zero, zero
    for i in range(desc[SAMPLES] * desc[CHUNKS]):
        total = total + vload_f64(at + 16 * i * pitch, 0)
    mean = total * size
    for n in range(desc[SAMPLES]):
        for chunk in range(desc[CHUNKS]):
            count, at = np.float64(places_of(desc, chunk)), desc[PARTIALS] + 8 * (partial_index(desc, n, chunk) + lane)
            distance = fma(vload_f64(at, 0), splat_f64(1.0 / count), -mean)
            squares = squares + fma(distance * splat_f64(count), distance, vload_f64(at, pitch))
    vstore_f64(desc[RECORDS], lane, mean)
    vstore_f64(desc[RECORDS], pitch + lane, splat_f64(1.0) / square_roots(fma(squares, size, splat_f64(eps))))


@device
def block_statistics(desc, block, eps):
    """Mean and invstd of 32 channels, to the records: all means, then all invstds."""
    _statistics(desc, 32 * block, eps)
    _statistics(desc, 32 * block + 16, eps)


@device
def total_block(desc, block):
    """Add up the partials of 32 channels over samples and chunks, into the first of them."""
    lane, pitch = 32 * block, desc[PITCH]
    zero = splat_f64(0.0)
    g0, g1, x0, x1 = zero, zero, zero, zero
    for i in range(desc[SAMPLES] * desc[CHUNKS]):
        at = desc[PARTIALS] + 8 * (2 * i * pitch + lane)
        g0, g1 = g0 + vload_f64(at, 0), g1 + vload_f64(at, 16)
        x0, x1 = x0 + vload_f64(at, pitch), x1 + vload_f64(at, pitch + 16)
    at = desc[PARTIALS] + 8 * lane
    vstore_f64(at, 0, g0)
    vstore_f64(at, 16, g1)
    vstore_f64(at, pitch, x0)
    vstore_f64(at, pitch + 16, x1)


@in_place
def fill_lanes(table, pitch, lane, mean, slope, factor, offset, flag):
    vstore(F32, table, lane, mean)
    vstore(F32, table, pitch + lane, narrow(slope))
    vstore(F32, table, 2 * pitch + lane, narrow(factor))
    vstore(F32, table, 3 * pitch + lane, narrow(offset))
    vstore(F32, table, 4 * pitch + lane, flag)
    return all_between(flag, np.float32(1), np.float32(2))


@device
def _record(kind, columns, desc, first, second, scale):
    """The record of each channel, from float32 in the order of lanes: what the exact arithmetic needs."""
    for c in range(desc[CHANNELS]):
        lane = lane_of(kind, columns, c)
        store_f64(desc[RECORDS], 2 * c, np.float64(load(F32, first, lane)) * scale)
        store_f64(desc[RECORDS], 2 * c + 1, np.float64(load(F32, second, lane)) * scale)


@device
def channel_gradients(kind, columns, desc, table, exact):
    """BatchNorm's records from the sums given, and the table; whether float32 will do for all channels.

    Records are made where they are read: for results in float64, `exact` or where float32 will not do.
    """
    count, fine, pitch = 0.0, True, desc[PITCH]
    largest = _MOST if item_size(kind) == 4 or is_bfloat(kind) else _MOST_IN_HALF
    for i in range(desc[COUNTS]):
        count += vector_value(desc, COUNTER, i)
    means, plane = table + 4 * PLANES * pitch, 4 * pitch
    invstds, weights, sums, sums_x = means + plane, means + 2 * plane, means + 3 * plane, means + 4 * plane
    spread(kind, columns, desc, MEAN, 0.0, means)
    spread(kind, columns, desc, RSTD, 0.0, invstds)
    spread(kind, columns, desc, WEIGHT, 1.0, weights)
    spread(kind, columns, desc, SUM_DY, 0.0, sums)
    spread(kind, columns, desc, SUM_DY_XMU, 0.0, sums_x)
    for lane in range(0, pitch, 16):
        mean, invstd = vload(F32, means, lane), widen(vload(F32, invstds, lane))
        factor, size = invstd * widen(vload(F32, weights, lane)), splat_f64(count)
        slope = -(invstd * invstd * (widen(vload(F32, sums_x, lane)) / size) * factor)
        offset = -(widen(vload(F32, sums, lane)) / size * factor)
        flag = usable_lanes(slope) * usable_lanes(offset) * usable_lanes(factor)
        flag = flag * lanes_between(widen(mean), 0.0, _MOST) * lanes_between(factor, 0.0, largest)
        seen = lanes_between(offset, VISIBLE, np.inf) + lanes_between(slope, 0.0, 0.0)
        fine = fill_lanes(table, pitch, lane, mean, slope, factor, offset, flag * seen) and fine
    if exact or is_bfloat(kind) or not fine:
        _record(kind, columns, desc, sums, sums_x, 1.0 / count)
    return fine


@device
def channel_normals(kind, columns, desc, table, exact):
    """The same from the statistics given."""
    fine, pitch = True, desc[PITCH]
    means, plane = table + 4 * PLANES * pitch, 4 * pitch
    invstds, weights, biases = means + plane, means + 2 * plane, means + 3 * plane
    spread(kind, columns, desc, MEAN, 0.0, means)
    spread(kind, columns, desc, RSTD, 0.0, invstds)
    spread(kind, columns, desc, WEIGHT, 1.0, weights)
    spread(kind, columns, desc, BIAS, 0.0, biases)
    for lane in range(0, pitch, 16):
        mean, factor = vload(F32, means, lane), widen(vload(F32, invstds, lane)) * widen(vload(F32, weights, lane))
        offset = widen(vload(F32, biases, lane))
        flag = usable_lanes(factor) * usable_lanes(offset) * lanes_between(widen(mean), 0.0, _MOST)
        fine = fill_lanes(table, pitch, lane, mean, splat_f64(0.0), factor, offset, flag) and fine
    if exact or is_bfloat(kind) or not fine or (item_size(kind) == 4 and not columns):
        _record(kind, columns, desc, means, invstds, 1.0)
    return fine
