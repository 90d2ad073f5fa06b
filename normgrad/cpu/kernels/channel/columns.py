"""Chunks of columns: some places of one sample with all their channels, which are neighbours in memory.

Vectors hold channels, in the lane order of pairs; so do the partials and the tables.
"""

import numpy as np

from normgrad.cpu.compile.jit import device, in_place
from normgrad.cpu.fields.channel import (
    CHANNELS,
    CHUNK,
    GRAD_OUT,
    INPUT,
    PARTIALS,
    PITCH,
    PLACES,
    RESULT,
    SAMPLES,
    STREAM,
)
from normgrad.cpu.intrinsics.memory import item_size, prefetch_l2, store_f64
from normgrad.cpu.intrinsics.pairs import (
    load_pair,
    load_pair_first,
    store_pair,
    store_pair_first,
    stream_pair,
)
from normgrad.cpu.intrinsics.vectors import fma, splat_f32, splat_f64, vload, vload_f64, vstore_f64, widen
from normgrad.cpu.kernels.channel.access import address_of, partial_index, places_of
from normgrad.cpu.kernels.channel.coefficients import deviation, gradient, lane_coefficients, output
from normgrad.cpu.kernels.common.moments import about_mean, moments
from normgrad.cpu.tags import F32

RUN = 16  # places that are worked on at once
_AT_ONCE = 4  # the same of outputs, of which few keep the stores nearly in order
_AHEAD = 8  # places after which the data of outputs is prefetched
_NARROW = 128  # channels of float32 up to which that is faster than place by place whatever the size
_KEPT = 1 << 21  # elements of float32 up to which it is

# Where a literal would be an argument stands np.bool_(..) or np.int64(..): Numba compiles a function for every literal.


@in_place
def load_channels(kind, address, whole, count):
    """32 channels, or the first ones of them."""
    if whole:
        return load_pair(kind, address, 0)
    return load_pair_first(kind, address, 0, count)


@in_place
def ask_for_channels(kind, address):
    """Ask for 32 channels in the second-level cache."""
    prefetch_l2(address)
    if item_size(kind) == 4:
        prefetch_l2(address + 64)


@in_place
def _store(kind, address, low, high, whole, count, stream):
    if not whole:
        store_pair_first(kind, address, 0, low, high, count)
    elif stream:
        stream_pair(kind, address, 0, low, high)
    else:
        store_pair(kind, address, 0, low, high)


@in_place
def add_pair(sums, c, low, high):
    vstore_f64(sums, c, vload_f64(sums, c) + widen(low))
    vstore_f64(sums, c + 16, vload_f64(sums, c + 16) + widen(high))


@device
def clear_sums(desc, n, chunk):
    sums = desc[PARTIALS] + 8 * partial_index(desc, n, chunk)
    for c in range(0, 2 * desc[PITCH], 16):
        vstore_f64(sums, c, splat_f64(0.0))


@in_place
def add_terms(kind, grad_out, ahead, x, x_ahead, whole, count, scale, shift, s):
    """Add grad_out and grad_out·deviation of 32 channels at a place to s, both in pairs."""
    ask_for_channels(kind, grad_out + ahead)
    ask_for_channels(kind, x + x_ahead)
    g, v = load_channels(kind, grad_out, whole, count), load_channels(kind, x, whole, count)
    x0, x1 = deviation(v[0], scale[0], shift[0]), deviation(v[1], scale[1], shift[1])
    return s[0] + g[0], s[1] + g[1], fma(g[0], x0, s[2]), fma(g[1], x1, s[3])


@in_place
def _add_columns(kind, grad_out, go_step, x, x_step, rows, sums, pitch, c, table, whole, count):
    """The sums of 32 channels over some places: two runs of up to 8 terms in float32, float64 beyond."""
    scale, at = (vload(F32, table, c), vload(F32, table, c + 16)), pitch + c
    shift, zero = (vload(F32, table, at), vload(F32, table, at + 16)), splat_f32(np.float32(0))
    s, t = (zero, zero, zero, zero), (zero, zero, zero, zero)
    ahead, x_ahead = RUN * go_step, RUN * x_step
    for _ in range(rows // 2):
        s = add_terms(kind, grad_out, ahead, x, x_ahead, whole, count, scale, shift, s)
        t = add_terms(kind, grad_out + go_step, ahead, x + x_step, x_ahead, whole, count, scale, shift, t)
        grad_out, x = grad_out + 2 * go_step, x + 2 * x_step
    if rows % 2:
        s = add_terms(kind, grad_out, ahead, x, x_ahead, whole, count, scale, shift, s)
    add_pair(sums, c, s[0] + t[0], s[1] + t[1])
    add_pair(sums, pitch + c, s[2] + t[2], s[3] + t[3])


@device
def add_places(kind, desc, n, chunk, first, last, table):
    """Add the terms of some places of a chunk to its sums: grad_out, and grad_out·deviation."""
    size, channels, place = item_size(kind), desc[CHANNELS], chunk * desc[CHUNK]
    sums, pitch = desc[PARTIALS] + 8 * partial_index(desc, n, chunk), desc[PITCH]
    go_step, x_step, whole = size * desc[GRAD_OUT + 3], size * desc[INPUT + 3], channels & ~31
    yes, no, left = np.bool_(True), np.bool_(False), channels & 31
    while first < last:
        rows = min(RUN, last - first)
        g = address_of(desc, GRAD_OUT, size, n, 0, place + first)
        x = address_of(desc, INPUT, size, n, 0, place + first)
        for c in range(0, whole, 32):
            _add_columns(kind, g, go_step, x, x_step, rows, sums, pitch, c, table, yes, np.int64(32))
            g, x = g + 32 * size, x + 32 * size
        if left > 0:
            _add_columns(kind, g, go_step, x, x_step, rows, sums, pitch, whole, table, no, left)
        first += rows


@in_place
def _gradient_columns(kind, desc, c, rows, grad_out, x, result, table, stream, whole, count):
    """grad_input of 32 channels at some places."""
    size, pitch = item_size(kind), desc[PITCH]
    go_step, x_step, step = size * desc[GRAD_OUT + 3], size * desc[INPUT + 3], size * desc[RESULT + 3]
    low, high = lane_coefficients(table, pitch, c), lane_coefficients(table, pitch, c + 16)
    ahead, x_ahead = RUN * go_step, RUN * x_step
    for _ in range(rows):
        ask_for_channels(kind, grad_out + ahead)
        ask_for_channels(kind, x + x_ahead)
        g, v = load_channels(kind, grad_out, whole, count), load_channels(kind, x, whole, count)
        a, b = gradient(g[0], v[0], low), gradient(g[1], v[1], high)
        _store(kind, result, a, b, whole, count, stream)
        grad_out, x, result = grad_out + go_step, x + x_step, result + step


@device
def gradient_places(kind, desc, n, chunk, first, last, table):
    """grad_input of some places of a chunk."""
    size, channels, place = item_size(kind), desc[CHANNELS], chunk * desc[CHUNK]
    whole, left, yes, no = channels & ~31, channels & 31, np.bool_(True), np.bool_(False)
    for start in range(place + first, place + last, RUN):
        g, x = address_of(desc, GRAD_OUT, size, n, 0, start), address_of(desc, INPUT, size, n, 0, start)
        result, rows = address_of(desc, RESULT, size, n, 0, start), min(RUN, place + last - start)
        stream = desc[STREAM] != 0 and (result | size * desc[RESULT + 3]) % 64 == 0
        for c in range(0, whole, 32):
            at = c * size
            _gradient_columns(kind, desc, c, rows, g + at, x + at, result + at, table, stream, yes, np.int64(32))
        if left > 0:
            at = whole * size
            _gradient_columns(kind, desc, whole, rows, g + at, x + at, result + at, table, no, no, left)


@in_place
def _moments(v, m, s, q):
    a = widen(v) - widen(m)
    return s + a, fma(a, a, q)


@in_place
def _load_at(kind, address, c, channels):
    if c + 32 <= channels:
        return load_pair(kind, address, c)
    return load_pair_first(kind, address, c, channels - c)


@device
def add_moments(kind, desc, n, chunk, first, last):
    """Add x − shift and its square at some places of a chunk to its sums; the shift is the chunk's first place."""
    size, channels, place = item_size(kind), desc[CHANNELS], chunk * desc[CHUNK]
    sums = desc[PARTIALS] + 8 * partial_index(desc, n, chunk)
    squares = sums + 8 * desc[PITCH]
    step, shift = size * desc[INPUT + 3], address_of(desc, INPUT, size, n, 0, place)
    x = address_of(desc, INPUT, size, n, 0, place + first)
    for c in range(0, channels, 32):
        m = _load_at(kind, shift, c, channels)
        s0, s1 = vload_f64(sums, c), vload_f64(sums, c + 16)
        q0, q1 = vload_f64(squares, c), vload_f64(squares, c + 16)
        for r in range(last - first):
            ahead = x + (r + RUN) * step + c * size
            ask_for_channels(kind, ahead)
            v = _load_at(kind, x + r * step, c, channels)
            s0, q0 = _moments(v[0], m[0], s0, q0)
            s1, q1 = _moments(v[1], m[1], s1, q1)
        vstore_f64(sums, c, s0)
        vstore_f64(sums, c + 16, s1)
        vstore_f64(squares, c, q0)
        vstore_f64(squares, c + 16, q1)


@device
def add_run(kind, desc, n, chunk):
    """The sum and M2 of all elements of a chunk, to the partials of the first channel."""
    size = item_size(kind)
    x, count = address_of(desc, INPUT, size, n, 0, chunk * desc[CHUNK]), places_of(desc, chunk) * desc[CHANNELS]
    total, squares = moments(kind, x, count, size)
    at = partial_index(desc, n, chunk)
    store_f64(desc[PARTIALS], at, total)
    store_f64(desc[PARTIALS], at + desc[PITCH], squares)


@device
def settle_moments(kind, desc, n, chunk):
    """Make a chunk's moments about its first place the sum and M2."""
    size, channels, count = item_size(kind), desc[CHANNELS], splat_f64(np.float64(places_of(desc, chunk)))
    sums = desc[PARTIALS] + 8 * partial_index(desc, n, chunk)
    squares, first = sums + 8 * desc[PITCH], address_of(desc, INPUT, size, n, 0, chunk * desc[CHUNK])
    for c in range(0, channels, 32):
        shift = _load_at(kind, first, c, channels)
        for half in range(2):
            at = c + 16 * half
            s, q = vload_f64(sums, at), vload_f64(squares, at)
            s, q = about_mean(s, q, count, widen(shift[0] if half == 0 else shift[1]))
            vstore_f64(sums, at, s)
            vstore_f64(squares, at, q)


@in_place
def _normalise_columns(kind, c, pitch, places, x, x_step, result, step, table, stream, whole, count):
    """The output of 32 channels at some places."""
    scale, scale_2 = vload(F32, table, c), vload(F32, table, c + 16)
    shift, shift_2 = vload(F32, table, pitch + c), vload(F32, table, pitch + c + 16)
    factor, factor_2 = vload(F32, table, 2 * pitch + c), vload(F32, table, 2 * pitch + c + 16)
    offset, offset_2 = vload(F32, table, 3 * pitch + c), vload(F32, table, 3 * pitch + c + 16)
    for _ in range(places):
        if item_size(kind) == 2:
            ask_for_channels(kind, x + _AHEAD * x_step)
        v = load_channels(kind, x, whole, count)
        a, b = output(v[0], scale, shift, factor, offset), output(v[1], scale_2, shift_2, factor_2, offset_2)
        _store(kind, result, a, b, whole, count, stream)
        x, result = x + x_step, result + step


@device
def normalise_places(kind, desc, n, chunk, first, last, table):
    """The output at some places of a chunk."""
    size, channels, start, pitch = item_size(kind), desc[CHANNELS], chunk * desc[CHUNK], desc[PITCH]
    x, result = address_of(desc, INPUT, size, n, 0, start + first), address_of(desc, RESULT, size, n, 0, start + first)
    x_step, step = size * desc[INPUT + 3], size * desc[RESULT + 3]
    stream = desc[STREAM] != 0 and (result | step) % 64 == 0
    whole, left, yes, no = channels & ~31, channels & 31, np.bool_(True), np.bool_(False)
    one_by_one = size == 4 and channels > _NARROW and desc[SAMPLES] * desc[PLACES] * channels > _KEPT
    while first < last:
        places = 1 if one_by_one else min(_AT_ONCE, last - first)
        for c in range(0, whole, 32):
            i, o = x + c * size, result + c * size
            if one_by_one:  # a constant, which makes coefficients operands in memory
                _normalise_columns(kind, c, pitch, np.int64(1), i, x_step, o, step, table, stream, yes, np.int64(32))
            else:
                _normalise_columns(kind, c, pitch, places, i, x_step, o, step, table, stream, yes, np.int64(32))
        if left > 0:
            i, o = x + whole * size, result + whole * size
            _normalise_columns(kind, whole, pitch, places, i, x_step, o, step, table, no, no, left)
        first, x, result = first + places, x + places * x_step, result + places * step
