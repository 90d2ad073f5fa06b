"""From the sums of a unit of GroupNorm to what its gradients are made of: records in float64, tables in float32.

Partials and tables are worked on in whole vectors, so the weight is there as float32 in the order of their lanes.
"""

import numpy as np

from normgrad.cpu.channel_fields import (
    CHANNELS,
    CHUNKS,
    GROUPS,
    MEAN,
    PARTIALS,
    PITCH,
    PLACES,
    RECORDS,
    RESULT,
    RSTD,
    SAMPLES,
)
from normgrad.cpu.channels import partial_index, usable, vector_value
from normgrad.cpu.exact import exact_gradient_sums
from normgrad.cpu.jit import device, in_place
from normgrad.cpu.kinds import F32
from normgrad.cpu.memory import load, load_f64, store, store_f64
from normgrad.cpu.tables import fill_entry, filled_vectors, fine_gradient, lane_of, whole_vectors
from normgrad.cpu.trusted_sums import LARGEST
from normgrad.cpu.vectors import (
    all_usable,
    hsum,
    narrow,
    splat_f32,
    splat_f64,
    usable_lanes,
    vload,
    vload_f64,
    vstore,
    vstore_f64,
    widen,
)


@in_place
def _total(desc, n, lane):
    """The sums of 16 lanes over a sample's chunks."""
    g, gx = splat_f64(0.0), splat_f64(0.0)
    for chunk in range(desc[CHUNKS]):
        at = desc[PARTIALS] + 8 * (partial_index(desc, n, chunk) + lane)
        g, gx = g + vload_f64(at, 0), gx + vload_f64(at, desc[PITCH])
    return g, gx


@in_place
def _weigh(desc, n, lane, rstd, weights, total, total_x):
    """Add the weighted sums of 16 lanes of one group to the group's; their sums become those of (x − mean)·rstd."""
    g, gx = _total(desc, n, lane)
    gx = gx * splat_f64(rstd)
    at = desc[PARTIALS] + 8 * (partial_index(desc, n, np.int64(0)) + lane)
    vstore_f64(at, 0, g)
    vstore_f64(at, desc[PITCH], gx)
    weight = widen(vload(F32, weights, lane))
    return total + weight * g, total_x + weight * gx


@device
def _weigh_one(desc, n, lane, rstd, weights):
    """As _weigh, of a single lane."""
    g, gx = 0.0, 0.0
    for chunk in range(desc[CHUNKS]):
        at = partial_index(desc, n, chunk) + lane
        g += load_f64(desc[PARTIALS], at)
        gx += load_f64(desc[PARTIALS], at + desc[PITCH])
    gx *= rstd
    at = partial_index(desc, n, np.int64(0)) + lane
    store_f64(desc[PARTIALS], at, g)
    store_f64(desc[PARTIALS], at + desc[PITCH], gx)
    weight = np.float64(load(F32, weights, lane))
    return weight * g, weight * gx


@device
def _weigh_exactly(desc, n, c, lane, rstd, weights):
    """As _weigh_one, where rstd or the weight may be infinite: Inf times a sum is not the sum of Inf times each."""
    g, gx = exact_gradient_sums(desc, n, c, np.int64(0), desc[PLACES], 1.0, rstd)
    at = partial_index(desc, n, np.int64(0)) + lane
    store_f64(desc[PARTIALS], at, g)
    store_f64(desc[PARTIALS], at + desc[PITCH], gx)
    return exact_gradient_sums(desc, n, c, np.int64(0), desc[PLACES], np.float64(load(F32, weights, lane)), rstd)


@device
def _group_sums(kind, columns, desc, n, first, last, rstd, weights):
    """The sums of weight·grad_out and of weight·grad_out·(x − mean)·rstd over a group."""
    total, total_x = 0.0, 0.0
    if not (abs(rstd) <= LARGEST and load(F32, weights, desc[PITCH]) != 0):
        for c in range(first, last):
            g, gx = _weigh_exactly(desc, n, c, lane_of(kind, columns, c), rstd, weights)
            total += g
            total_x += gx
        return total, total_x
    whole = whole_vectors(columns, first, last)
    if whole > first:
        sums, sums_x = splat_f64(0.0), splat_f64(0.0)
        for lane in range(first, whole, 16):
            sums, sums_x = _weigh(desc, n, lane, rstd, weights, sums, sums_x)
        total, total_x = hsum(sums), hsum(sums_x)
    for c in range(whole, last):
        g, gx = _weigh_one(desc, n, lane_of(kind, columns, c), rstd, weights)
        total += g
        total_x += gx
    return total, total_x


@device
def _fill_vectors(table, pitch, first, whole, mean, slope, rstd, offset, group_fine, weights):
    """Entries of whole vectors; whether float32 will do for all."""
    fine, flag = group_fine, splat_f32(np.float32(group_fine))
    centre, slopes, offsets = splat_f32(np.float32(mean)), splat_f32(np.float32(slope)), splat_f32(np.float32(offset))
    for lane in range(first, whole, 16):
        factor = widen(vload(F32, weights, lane)) * splat_f64(rstd)
        fine = fine and all_usable(factor)
        vstore(F32, table, lane, centre)
        vstore(F32, table, pitch + lane, slopes)
        vstore(F32, table, 2 * pitch + lane, narrow(factor))
        vstore(F32, table, 3 * pitch + lane, offsets)
        vstore(F32, table, 4 * pitch + lane, flag * usable_lanes(factor))
    return fine


@device
def _fill_group(kind, columns, desc, table, first, last, mean, slope, rstd, offset, fine, weights):
    whole, group_fine, pitch = filled_vectors(columns, desc, first, last), fine, desc[PITCH]
    if whole > first:
        fine = _fill_vectors(table, pitch, first, whole, mean, slope, rstd, offset, group_fine, weights)
    for c in range(whole, last):
        lane = lane_of(kind, columns, c)
        factor = rstd * np.float64(load(F32, weights, lane))
        channel_fine = group_fine and usable(factor)
        fill_entry(table, pitch, lane, mean, slope, factor, offset, channel_fine)
        fine = fine and channel_fine
    return fine


@device
def group_gradients(kind, columns, desc, n, q, table, weights):
    """The record of a sample's group from its partials, and the table's entries; whether float32 will do for all.

    The sums over all places are left in the partials of the sample's first chunk.
    """
    per_group, statistic = desc[CHANNELS] // desc[GROUPS], n * desc[GROUPS] + q
    first, last = q * per_group, (q + 1) * per_group
    mean, rstd = vector_value(desc, MEAN, statistic), vector_value(desc, RSTD, statistic)
    total, total_x = _group_sums(kind, columns, desc, n, first, last, rstd, weights)
    if desc[RESULT] == 0:
        return True
    size = np.float64(per_group * desc[PLACES])
    mean_g, mean_gx = total / size, total_x / size
    store_f64(desc[RECORDS], 2 * statistic, mean_g)
    store_f64(desc[RECORDS], 2 * statistic + 1, mean_gx)
    slope, offset = -(rstd * rstd * mean_gx), -(rstd * mean_g)
    fine = fine_gradient(mean, slope, offset)
    return _fill_group(kind, columns, desc, table, first, last, mean, slope, rstd, offset, fine, weights)


@device
def spread_group_means(kind, desc, n, means):
    """A sample's means in columns, one per channel."""
    per_group = desc[CHANNELS] // desc[GROUPS]
    for q in range(desc[GROUPS]):
        mean, first = np.float32(vector_value(desc, MEAN, n * desc[GROUPS] + q)), q * per_group
        whole = whole_vectors(True, first, first + per_group)
        for lane in range(first, whole, 16):
            vstore(F32, means, lane, splat_f32(mean))
        for c in range(whole, first + per_group):
            store(F32, means, lane_of(kind, True, c), mean)


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
