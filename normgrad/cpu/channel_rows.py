"""Chunks of rows: places of one channel of one sample, neighbours in memory."""

import numpy as np

from normgrad.cpu.channel_fields import (
    CHUNK,
    GRAD_OUT,
    INPUT,
    PARTIALS,
    PITCH,
    RESULT,
    STAT_CHANNEL,
    STREAM,
)
from normgrad.cpu.channels import address_of, partial_index, places_of
from normgrad.cpu.exact import exact_gradient, exact_moments, exact_normalised
from normgrad.cpu.jit import device, in_place
from normgrad.cpu.kinds import F32
from normgrad.cpu.memory import item_size, load, store_f64
from normgrad.cpu.moments import merged, moments
from normgrad.cpu.pairs import (
    is_bfloat,
    load_pair,
    load_pair_first,
    load_pair_or,
    split_pair,
    store_normal_pair,
    store_normal_pair_first,
    stream_normal_pair,
)
from normgrad.cpu.singles import normalise_singles
from normgrad.cpu.vectors import any_subnormal, fma, hsum, splat_f32, splat_f64, unlikely, widen

_SHORT = 128  # places of a row that shares its vectors with the next one
WORST = 2.0**24  # by how much squares about a shift may be larger than those about the mean


@in_place
def _gradients(g, x, mean, slope, factor, offset):
    return fma(factor, g[0], fma(slope, x[0] - mean, offset)), fma(factor, g[1], fma(slope, x[1] - mean, offset))


@in_place
def _gradient_row(kind, desc, n, c, place, count, grad_out, x, result, table, stream):
    pitch = desc[PITCH]
    mean, slope = splat_f32(load(F32, table, c)), splat_f32(load(F32, table, pitch + c))
    factor, offset = splat_f32(load(F32, table, 2 * pitch + c)), splat_f32(load(F32, table, 3 * pitch + c))
    whole, left = count & ~31, count & 31
    for i in range(0, whole, 32):
        a, b = _gradients(load_pair(kind, grad_out, i), load_pair(kind, x, i), mean, slope, factor, offset)
        # Rounded to a subnormal float32 and then to bfloat16, a value would be rounded twice.
        if is_bfloat(kind) and unlikely(any_subnormal(a, b)):
            exact_gradient(desc, n, c, place + i, place + i + 32)
        elif stream:
            stream_normal_pair(kind, result, i, a, b)
        else:
            store_normal_pair(kind, result, i, a, b)
    if left > 0:
        g, v = load_pair_first(kind, grad_out, whole, left), load_pair_first(kind, x, whole, left)
        a, b = _gradients(g, v, mean, slope, factor, offset)
        if is_bfloat(kind) and unlikely(any_subnormal(a, b)):
            exact_gradient(desc, n, c, place + whole, place + count)
        else:
            store_normal_pair_first(kind, result, whole, a, b, left)


@device
def _exact_two_rows(desc, n, c, last, count, left):
    """grad_input of 32 places that follow each other: so many are left of one row, the others are the next one's."""
    exact_gradient(desc, n, c, count - left, min(count, count - left + 32))
    if left < 32 and c + 1 < last:
        exact_gradient(desc, n, c + 1, np.int64(0), 32 - left)


@device
def _is_run(desc, count, size, x_step, step):
    """Whether vectors are better filled with the end of one row and the beginning of the next, which share a mean."""
    follow = x_step == size * count and step == size * count
    return follow and 32 < count < _SHORT and count % 32 != 0 and desc[STAT_CHANNEL] > 1


@device
def _are_fine(table, pitch, first, last):
    for c in range(first, last):
        if load(F32, table, 4 * pitch + c) == 0:
            return False
    return True


@in_place
def _store_of_run(kind, result, i, total, a, b, stream):
    """Store 32 places of a run, or what is left of it."""
    if i + 32 > total:
        store_normal_pair_first(kind, result, i, a, b, total - i)
    elif stream:
        stream_normal_pair(kind, result, i, a, b)
    else:
        store_normal_pair(kind, result, i, a, b)


@in_place
def _after_32(row, left, count):
    """Which row of a run comes 32 places further, and how much is left of it."""
    return (row, left - 32) if left > 32 else (row + 1, left - 32 + count)


@in_place
def _gradient_run(kind, desc, n, first, last, count, grad_out, x, result, table, stream):
    """grad_input of rows of a group that follow each other in memory: a vector has places of up to two of them."""
    pitch, total = desc[PITCH], (last - first) * count
    mean, slope = splat_f32(load(F32, table, first)), splat_f32(load(F32, table, pitch + first))
    factors, offset = table + 4 * (2 * pitch + first), splat_f32(load(F32, table, 3 * pitch + first))
    row, left, i = 0, count, 0
    while i < total:
        if i + 32 <= total:
            g, v = load_pair(kind, grad_out, i), load_pair(kind, x, i)
        else:
            g, v = load_pair_first(kind, grad_out, i, total - i), load_pair_first(kind, x, i, total - i)
        f = split_pair(kind, left, load(F32, factors, row), load(F32, factors, row + 1))
        a = fma(f[0], g[0], fma(slope, v[0] - mean, offset))
        b = fma(f[1], g[1], fma(slope, v[1] - mean, offset))
        if is_bfloat(kind) and unlikely(any_subnormal(a, b)):
            _exact_two_rows(desc, n, first + row, last, count, left)
        else:
            _store_of_run(kind, result, i, total, a, b, stream)
        i, (row, left) = i + 32, _after_32(row, left, count)


@device
def gradient_rows(kind, desc, n, first, last, part, table):
    """grad_input of a chunk: factor·g + slope·(x − mean) + offset."""
    place, count, size, pitch = part * desc[CHUNK], places_of(desc, part), item_size(kind), desc[PITCH]
    grad_out, x = address_of(desc, GRAD_OUT, size, n, first, place), address_of(desc, INPUT, size, n, first, place)
    result = address_of(desc, RESULT, size, n, first, place)
    go_step, x_step, step = size * desc[GRAD_OUT + 2], size * desc[INPUT + 2], size * desc[RESULT + 2]
    if go_step == x_step and _is_run(desc, count, size, x_step, step) and _are_fine(table, pitch, first, last):
        stream = desc[STREAM] != 0 and result % 64 == 0
        _gradient_run(kind, desc, n, first, last, count, grad_out, x, result, table, stream)
        return
    for c in range(first, last):
        if load(F32, table, 4 * pitch + c) == 0:
            exact_gradient(desc, n, c, place, place + count)
        else:
            stream = desc[STREAM] != 0 and result % 64 == 0
            _gradient_row(kind, desc, n, c, place, count, grad_out, x, result, table, stream)
        grad_out, x, result = grad_out + go_step, x + x_step, result + step


@in_place
def _moments(low, high, shift, total, squares):
    a, b = widen(low) - shift, widen(high) - shift
    return total + (a + b), fma(b, b, fma(a, a, squares))


@device
def _row_moments(kind, x, count, shift):
    """sum(x − shift), sum((x − shift)²) in float64."""
    centre = splat_f64(shift)
    s0, q0, s1, q1 = splat_f64(0.0), splat_f64(0.0), splat_f64(0.0), splat_f64(0.0)
    i = 0
    while i + 64 <= count:
        v = load_pair(kind, x, i)
        s0, q0 = _moments(v[0], v[1], centre, s0, q0)
        v = load_pair(kind, x, i + 32)
        s1, q1 = _moments(v[0], v[1], centre, s1, q1)
        i += 64
    s0, q0 = s0 + s1, q0 + q1
    while i < count:
        v = load_pair_or(kind, x, i, count - i, np.float32(shift))
        s0, q0 = _moments(v[0], v[1], centre, s0, q0)
        i += 32
    return hsum(s0), hsum(q0)


@device
def moments_of_row(kind, desc, n, c, place, count, x):
    """Sum of a row, and of the squares about its mean."""
    shift = np.float64(load(kind, x, 0))
    total, squares = _row_moments(kind, x, count, shift)
    about_mean = squares - total * total / count
    if squares <= WORST * about_mean:
        return total + count * shift, about_mean
    return exact_moments(desc, n, c, place, place + count)


@device
def moments_rows(kind, desc, n, first, last, part):
    """Sum of a chunk's numbers, and of the squares about their mean, to the partials of its first channel."""
    place, count, size = part * desc[CHUNK], places_of(desc, part), item_size(kind)
    x, step = address_of(desc, INPUT, size, n, first, place), size * desc[INPUT + 2]
    length = count * (last - first) if step == size * count else count  # rows that follow each other are one
    total, squares = moments(kind, x, length)
    done = length
    while done < count * (last - first):
        x += step
        other, others = moments(kind, x, count)
        total, squares, _ = merged(total, squares, np.float64(done), other, others, np.float64(count))
        done += count
    at = partial_index(desc, n, part) + first
    store_f64(desc[PARTIALS], at, total)
    store_f64(desc[PARTIALS], at + desc[PITCH], squares)


@in_place
def _normalised(x, mean, factor, offset):
    return fma(x[0] - mean, factor, offset), fma(x[1] - mean, factor, offset)


@in_place
def _normalise_row(kind, desc, n, c, place, x, result, count, table, stream):
    mean, pitch = splat_f32(load(F32, table, c)), desc[PITCH]
    factor, offset = splat_f32(load(F32, table, 2 * pitch + c)), splat_f32(load(F32, table, 3 * pitch + c))
    i = 0
    while i + 32 <= count:
        a, b = _normalised(load_pair(kind, x, i), mean, factor, offset)
        if is_bfloat(kind) and unlikely(any_subnormal(a, b)):
            exact_normalised(desc, n, c, place + i, place + i + 32)
        elif stream:
            stream_normal_pair(kind, result, i, a, b)
        else:
            store_normal_pair(kind, result, i, a, b)
        i += 32
    if i < count:
        a, b = _normalised(load_pair_first(kind, x, i, count - i), mean, factor, offset)
        if is_bfloat(kind) and unlikely(any_subnormal(a, b)):
            exact_normalised(desc, n, c, place + i, place + count)
        else:
            store_normal_pair_first(kind, result, i, a, b, count - i)


@device
def _exact_two_outputs(desc, n, c, last, count, left):
    """The output of 32 places that follow each other: so many are left of one row, the others are the next one's."""
    exact_normalised(desc, n, c, count - left, min(count, count - left + 32))
    if left < 32 and c + 1 < last:
        exact_normalised(desc, n, c + 1, np.int64(0), 32 - left)


@in_place
def _normalise_run(kind, desc, n, first, last, count, x, result, table, stream):
    """The output of rows of a group that follow each other in memory: a vector has places of up to two of them."""
    pitch, total, centre = desc[PITCH], (last - first) * count, splat_f32(load(F32, table, first))
    factors, offsets = table + 4 * (2 * pitch + first), table + 4 * (3 * pitch + first)
    row, left, i = 0, count, 0
    while i < total:
        v = load_pair(kind, x, i) if i + 32 <= total else load_pair_first(kind, x, i, total - i)
        factor = split_pair(kind, left, load(F32, factors, row), load(F32, factors, row + 1))
        offset = split_pair(kind, left, load(F32, offsets, row), load(F32, offsets, row + 1))
        a, b = fma(v[0] - centre, factor[0], offset[0]), fma(v[1] - centre, factor[1], offset[1])
        if is_bfloat(kind) and unlikely(any_subnormal(a, b)):
            _exact_two_outputs(desc, n, first + row, last, count, left)
        else:
            _store_of_run(kind, result, i, total, a, b, stream)
        i, (row, left) = i + 32, _after_32(row, left, count)


@device
def normalise_rows(kind, desc, n, first, last, part, table, weights, biases):
    """The output of a chunk: (x − mean)·factor + offset; weight and bias, of float32 data, as float32."""
    place, count, size, pitch = part * desc[CHUNK], places_of(desc, part), item_size(kind), desc[PITCH]
    x, result = address_of(desc, INPUT, size, n, first, place), address_of(desc, RESULT, size, n, first, place)
    x_step, step = size * desc[INPUT + 2], size * desc[RESULT + 2]
    for c in range(first, last):
        stream = desc[STREAM] != 0 and result % 64 == 0
        if load(F32, table, 4 * pitch + c) == 0:
            exact_normalised(desc, n, c, place, place + count)
        elif size == 4:
            normalise_singles(desc, n, c, x, result, count, weights, biases, stream)
        else:
            _normalise_row(kind, desc, n, c, place, x, result, count, table, stream)
        x, result = x + x_step, result + step


@device
def normalise_group_rows(kind, desc, n, first, last, part, table, weights, biases):
    """The same of rows of a group, which share their mean."""
    count, size = places_of(desc, part), item_size(kind)
    x_step, step = size * desc[INPUT + 2], size * desc[RESULT + 2]
    run = size < 4 and _is_run(desc, count, size, x_step, step)  # float32 is computed in float64, a row at a time
    if run and _are_fine(table, desc[PITCH], first, last):
        x, result = address_of(desc, INPUT, size, n, first, 0), address_of(desc, RESULT, size, n, first, 0)
        stream = desc[STREAM] != 0 and result % 64 == 0
        _normalise_run(kind, desc, n, first, last, count, x, result, table, stream)
    else:
        normalise_rows(kind, desc, n, first, last, part, table, weights, biases)
