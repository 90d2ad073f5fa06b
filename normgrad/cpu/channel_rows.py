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
from normgrad.cpu.channel_formulas import gradient, output
from normgrad.cpu.channels import address_of, partial_index, places_of
from normgrad.cpu.jit import device, in_place
from normgrad.cpu.kinds import F32
from normgrad.cpu.memory import item_size, load, store_f64
from normgrad.cpu.moments import merged, moments
from normgrad.cpu.pairs import (
    load_pair,
    load_pair_first,
    split_pair,
    store_pair,
    store_pair_first,
    stream_pair,
)
from normgrad.cpu.singles import normalise_singles
from normgrad.cpu.tables import coefficients, splat_entry

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
