"""BatchNorm's per-channel parameters: brought into the order of lanes, made into coefficients, brought out again.

32 channels at a time. Records are float64, tables float32. Lanes without a channel hold zeros.
"""

import numpy as np

from normgrad.cpu.compile.jit import device
from normgrad.cpu.fields.channel import (
    BIAS,
    CHANNELS,
    CHUNKS,
    MEAN,
    PARTIALS,
    PITCH,
    PLACES,
    RECORDS,
    RSTD,
    SAMPLES,
    SUM_DY,
    SUM_DY_XMU,
    WEIGHT,
)
from normgrad.cpu.intrinsics.memory import item_size, load, load_f64, store, store_f64
from normgrad.cpu.intrinsics.pairs import load_ordered, load_pair, store_ordered, store_pair
from normgrad.cpu.intrinsics.vectors import (
    narrow,
    not_below,
    power_of_two,
    saturated,
    splat_f32,
    splat_f64,
    square_roots,
    vload,
    vload_f64,
    vstore,
    vstore_f64,
    widen,
)
from normgrad.cpu.kernels.channel.access import partial_index, places_of, vector_or
from normgrad.cpu.kernels.channel.coefficients import lane_of, put_vector
from normgrad.cpu.kernels.channel.mixed_dtypes import total_count
from normgrad.cpu.kernels.common.moments import between
from normgrad.cpu.tags import F32

_TINY = 2.0**-200  # in place of a negative M2: far below every square, and its invstd is finite in float32


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
    size, at, pitch = np.float64(desc[SAMPLES] * desc[PLACES]), desc[PARTIALS] + 8 * lane, desc[PITCH]
    total, squares = splat_f64(0.0), splat_f64(0.0)
    for i in range(desc[SAMPLES] * desc[CHUNKS]):
        total = total + vload_f64(at + 16 * i * pitch, 0)
    for n in range(desc[SAMPLES]):
        for chunk in range(desc[CHUNKS]):
            count, at = np.float64(places_of(desc, chunk)), desc[PARTIALS] + 8 * (partial_index(desc, n, chunk) + lane)
            share = splat_f64(1.0 / (count * size * size))
            apart = between(vload_f64(at, 0), splat_f64(count), total, splat_f64(size), share)
            squares = squares + (vload_f64(at, pitch) + apart)
    # Where float32 squares underflow, M2 may be negative, and invstd must be finite: with eps 0 it is Inf for equal
    # elements alone. Where they overflow, it must be NaN, not 0.
    variance = not_below(squares, splat_f64(_TINY)) / splat_f64(size)
    variance = variance + (variance - variance)
    vstore_f64(desc[RECORDS], lane, total / splat_f64(size))
    vstore_f64(desc[RECORDS], pitch + lane, splat_f64(1.0) / square_roots(variance + splat_f64(eps)))


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


@device
def sum_coefficients(kind, columns, desc, table):
    """The table of sums of grad_out·(x − mean): scales of 1 and the negative means; and the invstds."""
    spread(kind, columns, desc, MEAN, 0.0, table + 4 * desc[PITCH])
    spread(kind, columns, desc, RSTD, 0.0, table + 8 * desc[PITCH])
    for lane in range(0, desc[PITCH], 16):
        vstore(F32, table, lane, splat_f32(np.float32(1)))
        vstore(F32, table, desc[PITCH] + lane, -vload(F32, table, desc[PITCH] + lane))


@device
def gradient_coefficients(kind, columns, desc, table):
    """The table of gradients, from the statistics and sums given."""
    pitch, count = desc[PITCH], splat_f64(total_count(desc))
    plane = 4 * pitch
    shifts, factors, means, scales, posts = (
        table + plane, table + 2 * plane, table + 3 * plane, table + 4 * plane, table + 5 * plane,
    )  # fmt: skip
    spread(kind, columns, desc, MEAN, 0.0, shifts)
    spread(kind, columns, desc, SUM_DY_XMU, 0.0, factors)
    spread(kind, columns, desc, SUM_DY, 0.0, means)
    spread(kind, columns, desc, RSTD, 0.0, scales)
    spread(kind, columns, desc, WEIGHT, 1.0, posts)
    for lane in range(0, pitch, 16):
        mean, invstd = widen(vload(F32, shifts, lane)), widen(vload(F32, scales, lane))
        pre = power_of_two(invstd, splat_f64(0.0))
        coefficient = invstd * invstd * (widen(vload(F32, factors, lane)) / count) * pre
        scale = power_of_two(coefficient, mean)
        vstore(F32, table, lane, narrow(scale))
        vstore(F32, shifts, lane, narrow(-(mean * scale)))
        vstore(F32, factors, lane, narrow(saturated(coefficient / scale)))
        vstore(F32, means, lane, narrow(widen(vload(F32, means, lane)) / count * pre))
        vstore(F32, scales, lane, narrow(pre))
        vstore(F32, posts, lane, narrow(saturated(widen(vload(F32, posts, lane)) * (invstd / pre))))


@device
def output_coefficients(kind, columns, desc, table):
    """The table of outputs, from the statistics given; for float32 rows records of them too, and the weights."""
    pitch = desc[PITCH]
    plane = 4 * pitch
    shifts, factors, weights = table + plane, table + 2 * plane, table + 4 * plane
    spread(kind, columns, desc, RSTD, 0.0, table)
    spread(kind, columns, desc, MEAN, 0.0, shifts)
    spread(kind, columns, desc, BIAS, 0.0, table + 3 * plane)
    spread(kind, columns, desc, WEIGHT, 1.0, weights)
    if item_size(kind) == 4 and not columns:
        for c in range(desc[CHANNELS]):
            store_f64(desc[RECORDS], 2 * c, np.float64(load(F32, shifts, c)))
            store_f64(desc[RECORDS], 2 * c + 1, np.float64(load(F32, table, c)))
    for lane in range(0, pitch, 16):
        mean, invstd = widen(vload(F32, shifts, lane)), widen(vload(F32, table, lane))
        scale = power_of_two(invstd, mean)
        vstore(F32, table, lane, narrow(scale))
        vstore(F32, shifts, lane, narrow(-(mean * scale)))
        vstore(F32, factors, lane, narrow(saturated(widen(vload(F32, weights, lane)) * (invstd / scale))))
