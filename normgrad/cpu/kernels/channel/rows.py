"""Chunks of rows: places of one channel of one sample, neighbours in memory.

The sums of gradients over rows: places of one channel of one sample, neighbours in memory.
"""

import numpy as np

from normgrad.cpu.compile.jit import device, in_place
from normgrad.cpu.fields.channel import (
    CHUNK,
    GRAD_OUT,
    INPUT,
    PARTIALS,
    PITCH,
    PLACES,
    RESULT,
    SAMPLES,
    STAT_CHANNEL,
    STREAM,
)
from normgrad.cpu.intrinsics.memory import item_size, load, store_f64
from normgrad.cpu.intrinsics.pairs import (
    load_pair,
    load_pair_first,
    split_pair,
    store_pair,
    store_pair_first,
    stream_pair,
)
from normgrad.cpu.intrinsics.vectors import fma, hsum, splat_f32, splat_f64, store_sums, widen
from normgrad.cpu.kernels.channel.access import address_of, partial_index, places_of
from normgrad.cpu.kernels.channel.coefficients import coefficients, deviation, gradient, output, splat_entry
from normgrad.cpu.kernels.channel.rows_f32 import normalise_singles
from normgrad.cpu.kernels.common.moments import merged, moments
from normgrad.cpu.tags import F32

_SHORT = 128  # places of a row that shares its vectors with the next one


@in_place
def _gradient_row(kind, desc, c, count, grad_out, x, result, table, stream):
    k, whole, left = coefficients(table, desc[PITCH], c), count & ~31, count & 31
    for i in range(0, whole, 32):
        g, v = load_pair(kind, grad_out, i), load_pair(kind, x, i)
        a, b = gradient(g[0], v[0], k), gradient(g[1], v[1], k)
        if stream:
            stream_pair(kind, result, i, a, b)
        else:
            store_pair(kind, result, i, a, b)
    if left > 0:
        g, v = load_pair_first(kind, grad_out, whole, left), load_pair_first(kind, x, whole, left)
        a, b = gradient(g[0], v[0], k), gradient(g[1], v[1], k)
        store_pair_first(kind, result, whole, a, b, left)


@device
def _is_run(desc, count, size, x_step, step):
    """Whether vectors are better filled with the end of one row and the beginning of the next, which share a mean."""
    follow = x_step == size * count and step == size * count
    return follow and 32 < count < _SHORT and count % 32 != 0 and desc[STAT_CHANNEL] > 1


@in_place
def _store_of_run(kind, result, i, total, a, b, stream):
    """Store 32 places of a run, or what is left of it."""
    if i + 32 > total:
        store_pair_first(kind, result, i, a, b, total - i)
    elif stream:
        stream_pair(kind, result, i, a, b)
    else:
        store_pair(kind, result, i, a, b)


@in_place
def _after_32(row, left, count):
    """Which row of a run comes 32 places further, and how much is left of it."""
    return (row, left - 32) if left > 32 else (row + 1, left - 32 + count)


@in_place
def _gradient_run(kind, desc, first, last, count, grad_out, x, result, table, stream):
    """grad_input of rows of a group that follow each other in memory: a vector has places of up to two of them."""
    pitch, total = desc[PITCH], (last - first) * count
    scale, shift, factor, mean_g, _, rstd = coefficients(table, pitch, first)
    weights = table + 4 * (4 * pitch + first)
    row, left, i = 0, count, 0
    while i < total:
        if i + 32 <= total:
            g, v = load_pair(kind, grad_out, i), load_pair(kind, x, i)
        else:
            g, v = load_pair_first(kind, grad_out, i, total - i), load_pair_first(kind, x, i, total - i)
        weight = split_pair(kind, left, load(F32, weights, row), load(F32, weights, row + 1))
        a = gradient(g[0], v[0], (scale, shift, factor, mean_g, weight[0], rstd))
        b = gradient(g[1], v[1], (scale, shift, factor, mean_g, weight[1], rstd))
        _store_of_run(kind, result, i, total, a, b, stream)
        i, (row, left) = i + 32, _after_32(row, left, count)


@device
def gradient_rows(kind, desc, n, first, last, part, table):
    """grad_input of a chunk."""
    place, count, size = part * desc[CHUNK], places_of(desc, part), item_size(kind)
    grad_out, x = address_of(desc, GRAD_OUT, size, n, first, place), address_of(desc, INPUT, size, n, first, place)
    result = address_of(desc, RESULT, size, n, first, place)
    go_step, x_step, step = size * desc[GRAD_OUT + 2], size * desc[INPUT + 2], size * desc[RESULT + 2]
    if go_step == x_step and _is_run(desc, count, size, x_step, step):
        stream = desc[STREAM] != 0 and result % 64 == 0
        _gradient_run(kind, desc, first, last, count, grad_out, x, result, table, stream)
        return
    for c in range(first, last):
        stream = desc[STREAM] != 0 and result % 64 == 0
        _gradient_row(kind, desc, c, count, grad_out, x, result, table, stream)
        grad_out, x, result = grad_out + go_step, x + x_step, result + step


@device
def moments_rows(kind, desc, n, first, last, part):
    """Sum and M2 of a chunk's elements, to the partials of its first channel."""
    place, count, size = part * desc[CHUNK], places_of(desc, part), item_size(kind)
    x, step = address_of(desc, INPUT, size, n, first, place), size * desc[INPUT + 2]
    length = count * (last - first) if step == size * count else count  # rows that follow each other are one
    total, squares = moments(kind, x, length, size)
    done = length
    while done < count * (last - first):
        x += step
        other, others = moments(kind, x, count, size)
        total, squares = merged(total, squares, np.float64(done), other, others, np.float64(count))
        done += count
    at = partial_index(desc, n, part) + first
    store_f64(desc[PARTIALS], at, total)
    store_f64(desc[PARTIALS], at + desc[PITCH], squares)


@in_place
def _normalise_row(kind, desc, c, x, result, count, table, stream):
    pitch, i = desc[PITCH], 0
    scale, shift = splat_entry(table, pitch, 0, c), splat_entry(table, pitch, 1, c)
    factor, offset = splat_entry(table, pitch, 2, c), splat_entry(table, pitch, 3, c)
    while i + 32 <= count:
        v = load_pair(kind, x, i)
        a, b = output(v[0], scale, shift, factor, offset), output(v[1], scale, shift, factor, offset)
        if stream:
            stream_pair(kind, result, i, a, b)
        else:
            store_pair(kind, result, i, a, b)
        i += 32
    if i < count:
        v = load_pair_first(kind, x, i, count - i)
        a, b = output(v[0], scale, shift, factor, offset), output(v[1], scale, shift, factor, offset)
        store_pair_first(kind, result, i, a, b, count - i)


@in_place
def _normalise_run(kind, desc, first, last, count, x, result, table, stream):
    """The output of rows of a group that follow each other in memory: a vector has places of up to two of them."""
    pitch, total = desc[PITCH], (last - first) * count
    scale, shift = splat_entry(table, pitch, 0, first), splat_entry(table, pitch, 1, first)
    factors, offsets = table + 4 * (2 * pitch + first), table + 4 * (3 * pitch + first)
    row, left, i = 0, count, 0
    while i < total:
        v = load_pair(kind, x, i) if i + 32 <= total else load_pair_first(kind, x, i, total - i)
        factor = split_pair(kind, left, load(F32, factors, row), load(F32, factors, row + 1))
        offset = split_pair(kind, left, load(F32, offsets, row), load(F32, offsets, row + 1))
        a, b = output(v[0], scale, shift, factor[0], offset[0]), output(v[1], scale, shift, factor[1], offset[1])
        _store_of_run(kind, result, i, total, a, b, stream)
        i, (row, left) = i + 32, _after_32(row, left, count)


@device
def normalise_rows(kind, desc, n, first, last, part, table, weights, biases):
    """The output of a chunk; of float32 data with weight and bias as they are given."""
    place, count, size = part * desc[CHUNK], places_of(desc, part), item_size(kind)
    x, result = address_of(desc, INPUT, size, n, first, place), address_of(desc, RESULT, size, n, first, place)
    x_step, step = size * desc[INPUT + 2], size * desc[RESULT + 2]
    for c in range(first, last):
        stream = desc[STREAM] != 0 and result % 64 == 0
        if size == 4:
            normalise_singles(desc, n, c, x, result, count, weights, biases, stream)
        else:
            _normalise_row(kind, desc, c, x, result, count, table, stream)
        x, result = x + x_step, result + step


@device
def normalise_group_rows(kind, desc, n, first, last, part, table, weights, biases):
    """The same of rows of a group, which share their mean."""
    count, size = places_of(desc, part), item_size(kind)
    x_step, step = size * desc[INPUT + 2], size * desc[RESULT + 2]
    if size < 4 and _is_run(desc, count, size, x_step, step):  # float32 is computed in float64, a row at a time
        x, result = address_of(desc, INPUT, size, n, first, 0), address_of(desc, RESULT, size, n, first, 0)
        stream = desc[STREAM] != 0 and result % 64 == 0
        _normalise_run(kind, desc, first, last, count, x, result, table, stream)
    else:
        normalise_rows(kind, desc, n, first, last, part, table, weights, biases)


_SHORT_SUMS = 128  # places of a row that needs no float64 before its lanes are added up
_TOGETHER = 4  # rows whose lanes are added up together
_FEW = 1024  # up to so many terms of a sum, one float32 rounding would be a visible share of the error bound


@in_place
def _pair_sums(g, x, scale, shift):
    return g[0] + g[1], fma(g[1], deviation(x[1], scale, shift), g[0] * deviation(x[0], scale, shift))


@in_place
def _sums_at(kind, grad_out, x, i, scale, shift):
    return _pair_sums(load_pair(kind, grad_out, i), load_pair(kind, x, i), scale, shift)


@in_place
def _rest_in_float64(kind, grad_out, x, i, count, scale, shift, total, total_x):
    scale, shift = widen(scale), widen(shift)
    while i < count:
        g, v = load_pair_first(kind, grad_out, i, count - i), load_pair_first(kind, x, i, count - i)
        g0, g1 = widen(g[0]), widen(g[1])
        total = total + (g0 + g1)
        total_x = fma(g1, deviation(widen(v[1]), scale, shift), fma(g0, deviation(widen(v[0]), scale, shift), total_x))
        i += 32
    return total, total_x


@in_place
def _rest(kind, grad_out, x, i, count, scale, shift, total, total_x):
    a, b = splat_f32(np.float32(0)), splat_f32(np.float32(0))
    while i + 32 <= count:
        a0, b0 = _sums_at(kind, grad_out, x, i, scale, shift)
        a, b = a + a0, b + b0
        i += 32
    if i < count:
        g, v = load_pair_first(kind, grad_out, i, count - i), load_pair_first(kind, x, i, count - i)
        a0, b0 = _pair_sums(g, v, scale, shift)
        a, b = a + a0, b + b0
    return total + widen(a), total_x + widen(b)


@in_place
def _lane_sums(kind, grad_out, x, count, scale, shift, precise):
    """sum(g) and sum(g·deviation) in 16 lanes: float32 trees of 8 terms a lane, float64 beyond."""
    scale, shift = splat_f32(scale), splat_f32(shift)
    total, total_x = splat_f64(0.0), splat_f64(0.0)
    i = 0
    while i + 128 <= count:
        a0, b0 = _sums_at(kind, grad_out, x, i, scale, shift)
        a1, b1 = _sums_at(kind, grad_out, x, i + 32, scale, shift)
        a2, b2 = _sums_at(kind, grad_out, x, i + 64, scale, shift)
        a3, b3 = _sums_at(kind, grad_out, x, i + 96, scale, shift)
        total = total + widen((a0 + a1) + (a2 + a3))
        total_x = total_x + widen((b0 + b1) + (b2 + b3))
        i += 128
    if i == count:
        return total, total_x
    if precise:
        return _rest_in_float64(kind, grad_out, x, i, count, scale, shift, total, total_x)
    return _rest(kind, grad_out, x, i, count, scale, shift, total, total_x)


@in_place
def _added(g, x, scale, shift, a, b):
    x0, x1 = deviation(x[0], scale, shift), deviation(x[1], scale, shift)
    return a + (g[0] + g[1]), fma(g[1], x1, fma(g[0], x0, b))


@in_place
def _added_at(kind, grad_out, x, i, scale, shift, a, b):
    return _added(load_pair(kind, grad_out, i), load_pair(kind, x, i), scale, shift, a, b)


@in_place
def _added_first(kind, grad_out, x, i, left, scale, shift, a, b):
    g, v = load_pair_first(kind, grad_out, i, left), load_pair_first(kind, x, i, left)
    return _added(g, v, scale, shift, a, b)


@in_place
def _four_short_rows(kind, grad_out, go_step, x, x_step, count, scale, shifts, sums, sums_x):
    """The sums of four rows, to memory, with at most 8 terms a lane; their lanes are added up together."""
    scale = splat_f32(scale)
    m0, m1, m2, m3 = splat_f32(shifts[0]), splat_f32(shifts[1]), splat_f32(shifts[2]), splat_f32(shifts[3])
    go_1, go_2, go_3 = grad_out + go_step, grad_out + 2 * go_step, grad_out + 3 * go_step
    x_1, x_2, x_3 = x + x_step, x + 2 * x_step, x + 3 * x_step
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = splat_f32(np.float32(0))
    whole = count & ~31
    for i in range(0, whole, 32):
        a0, b0 = _added_at(kind, grad_out, x, i, scale, m0, a0, b0)
        a1, b1 = _added_at(kind, go_1, x_1, i, scale, m1, a1, b1)
        a2, b2 = _added_at(kind, go_2, x_2, i, scale, m2, a2, b2)
        a3, b3 = _added_at(kind, go_3, x_3, i, scale, m3, a3, b3)
    if whole < count:
        left = count & 31
        a0, b0 = _added_first(kind, grad_out, x, whole, left, scale, m0, a0, b0)
        a1, b1 = _added_first(kind, go_1, x_1, whole, left, scale, m1, a1, b1)
        a2, b2 = _added_first(kind, go_2, x_2, whole, left, scale, m2, a2, b2)
        a3, b3 = _added_first(kind, go_3, x_3, whole, left, scale, m3, a3, b3)
    store_sums(sums, widen(a0), widen(a1), widen(a2), widen(a3))
    store_sums(sums_x, widen(b0), widen(b1), widen(b2), widen(b3))


@device
def sum_rows(kind, desc, n, first, last, part, scale, shift, shifts):
    """Sums of a chunk of gradients, to the partials: of grad_out, and of grad_out·deviation.

    Either all rows have one `shift`, or `shifts` is the address of one for each channel. A row's sums are then results
    themselves.
    """
    place, count, size = part * desc[CHUNK], places_of(desc, part), item_size(kind)
    grad_out, x = address_of(desc, GRAD_OUT, size, n, first, place), address_of(desc, INPUT, size, n, first, place)
    go_step, x_step = size * desc[GRAD_OUT + 2], size * desc[INPUT + 2]
    precise = shifts != 0 and desc[SAMPLES] * desc[PLACES] <= _FEW
    four = shift, shift, shift, shift
    sums = desc[PARTIALS] + 8 * partial_index(desc, n, part)
    sums_x = sums + 8 * desc[PITCH]
    c = first
    while count <= _SHORT_SUMS and not precise and c + _TOGETHER <= last:
        if shifts != 0:
            at = shifts + 4 * c
            four = load(F32, at, 0), load(F32, at, 1), load(F32, at, 2), load(F32, at, 3)
        _four_short_rows(kind, grad_out, go_step, x, x_step, count, scale, four, sums + 8 * c, sums_x + 8 * c)
        grad_out, x = grad_out + _TOGETHER * go_step, x + _TOGETHER * x_step
        c += _TOGETHER
    while c < last:
        if shifts != 0:
            shift = load(F32, shifts, c)
        total, total_x = _lane_sums(kind, grad_out, x, count, scale, shift, precise)
        store_f64(sums, c, hsum(total))
        store_f64(sums_x, c, hsum(total_x))
        grad_out, x = grad_out + go_step, x + x_step
        c += 1
