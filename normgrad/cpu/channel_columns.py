"""Chunks of columns: some places of one sample with all their channels, which are neighbours in memory.

Vectors hold channels, in the lane order of pairs; so do the partials and the tables.
"""

import numpy as np

from normgrad.cpu.channel_fields import (
    CHANNELS,
    CHUNK,
    GRAD_OUT,
    INPUT,
    PARTIALS,
    PITCH,
    RESULT,
    STREAM,
)
from normgrad.cpu.channel_rows import WORST
from normgrad.cpu.channels import address_of, partial_index, places_of
from normgrad.cpu.exact import exact_gradient, exact_moments, exact_normalised
from normgrad.cpu.jit import device, in_place
from normgrad.cpu.kinds import F32
from normgrad.cpu.memory import item_size, load, prefetch_l2, store_f64
from normgrad.cpu.moments import moments
from normgrad.cpu.pairs import (
    is_bfloat,
    load_pair,
    load_pair_first,
    store_normal_pair,
    store_normal_pair_first,
    stream_normal_pair,
)
from normgrad.cpu.rows import lane_of_column
from normgrad.cpu.trusted_sums import settle_lanes
from normgrad.cpu.vectors import (
    all_between_f64,
    any_subnormal,
    fma,
    splat_f32,
    splat_f64,
    unlikely,
    vload,
    vload_f64,
    vstore_f64,
    widen,
)

RUN = 16  # places that are worked on at once

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
        store_normal_pair_first(kind, address, 0, low, high, count)
    elif stream:
        stream_normal_pair(kind, address, 0, low, high)
    else:
        store_normal_pair(kind, address, 0, low, high)


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
def add_terms(kind, grad_out, ahead, x, x_ahead, whole, count, m0, m1, a0, a1, b0, b1):
    ask_for_channels(kind, grad_out + ahead)
    ask_for_channels(kind, x + x_ahead)
    g, v = load_channels(kind, grad_out, whole, count), load_channels(kind, x, whole, count)
    return a0 + g[0], a1 + g[1], fma(g[0], v[0] - m0, b0), fma(g[1], v[1] - m1, b1)


@in_place
def _add_columns(kind, grad_out, go_step, x, x_step, rows, sums, pitch, c, means, whole, count):
    """The sums of 32 channels over some places: two runs of up to 8 terms in float32, float64 beyond."""
    m0, m1, zero = vload(F32, means, c), vload(F32, means, c + 16), splat_f32(np.float32(0))
    a0, a1, b0, b1 = zero, zero, zero, zero
    e0, e1, f0, f1 = zero, zero, zero, zero
    ahead, x_ahead = RUN * go_step, RUN * x_step
    for _ in range(rows // 2):
        a0, a1, b0, b1 = add_terms(kind, grad_out, ahead, x, x_ahead, whole, count, m0, m1, a0, a1, b0, b1)
        e0, e1, f0, f1 = add_terms(
            kind, grad_out + go_step, ahead, x + x_step, x_ahead, whole, count, m0, m1, e0, e1, f0, f1
        )
        grad_out, x = grad_out + 2 * go_step, x + 2 * x_step
    if rows % 2:
        a0, a1, b0, b1 = add_terms(kind, grad_out, ahead, x, x_ahead, whole, count, m0, m1, a0, a1, b0, b1)
    add_pair(sums, c, a0 + e0, a1 + e1)
    add_pair(sums, pitch + c, b0 + f0, b1 + f1)


@device
def add_places(kind, desc, n, chunk, first, last, means):
    """Add the terms of some places of a chunk to its sums: grad_out, and grad_out·(x − mean)."""
    size, channels, place = item_size(kind), desc[CHANNELS], chunk * desc[CHUNK]
    sums, pitch = desc[PARTIALS] + 8 * partial_index(desc, n, chunk), desc[PITCH]
    go_step, x_step, whole = size * desc[GRAD_OUT + 3], size * desc[INPUT + 3], channels & ~31
    while first < last:
        rows = min(RUN, last - first)
        grad_out = address_of(desc, GRAD_OUT, size, n, 0, place + first)
        x = address_of(desc, INPUT, size, n, 0, place + first)
        for c in range(0, whole, 32):
            _add_columns(
                kind,
                grad_out + c * size,
                go_step,
                x + c * size,
                x_step,
                rows,
                sums,
                pitch,
                c,
                means,
                np.bool_(True),
                np.int64(32),
            )
        if whole < channels:
            grad_out, x = grad_out + whole * size, x + whole * size
            _add_columns(
                kind, grad_out, go_step, x, x_step, rows, sums, pitch, whole, means, np.bool_(False), channels - whole
            )
        first += rows


@device
def settle_sums(kind, desc, n, chunk):
    """Make a chunk's sums anew in float64 where float32 is not to be trusted."""
    sums, place = desc[PARTIALS] + 8 * partial_index(desc, n, chunk), chunk * desc[CHUNK]
    last, pitch = place + places_of(desc, chunk), desc[PITCH]
    settle_lanes(kind, True, desc, n, 0, pitch, place, last, sums, sums + 8 * pitch)


@device
def _exact_gradients(desc, n, c, count, place):
    for k in range(c, c + count):
        exact_gradient(desc, n, k, place, place + 1)


@in_place
def _gradient(g, x, mean, slope, factor, offset):
    return fma(factor, g, fma(slope, x - mean, offset))


@in_place
def _gradient_columns(kind, desc, n, c, place, rows, grad_out, x, result, table, stream, whole, count):
    """grad_input of 32 channels at some places."""
    size, pitch = item_size(kind), desc[PITCH]
    go_step, x_step, step = size * desc[GRAD_OUT + 3], size * desc[INPUT + 3], size * desc[RESULT + 3]
    m0, m1 = vload(F32, table, c), vload(F32, table, c + 16)
    s0, s1 = vload(F32, table, pitch + c), vload(F32, table, pitch + c + 16)
    f0, f1 = vload(F32, table, 2 * pitch + c), vload(F32, table, 2 * pitch + c + 16)
    o0, o1 = vload(F32, table, 3 * pitch + c), vload(F32, table, 3 * pitch + c + 16)
    ahead, x_ahead = RUN * go_step, RUN * x_step
    for r in range(rows):
        ask_for_channels(kind, grad_out + ahead)
        ask_for_channels(kind, x + x_ahead)
        g, v = load_channels(kind, grad_out, whole, count), load_channels(kind, x, whole, count)
        a, b = _gradient(g[0], v[0], m0, s0, f0, o0), _gradient(g[1], v[1], m1, s1, f1, o1)
        # Rounded to a subnormal float32 and then to bfloat16, a value would be rounded twice.
        if is_bfloat(kind) and unlikely(any_subnormal(a, b)):
            _exact_gradients(desc, n, c, count, place + r)
        else:
            _store(kind, result, a, b, whole, count, stream)
        grad_out, x, result = grad_out + go_step, x + x_step, result + step


@device
def gradient_places(kind, desc, n, chunk, first, last, table):
    """grad_input of some places of a chunk: factor·g + slope·(x − mean) + offset."""
    size, channels, place = item_size(kind), desc[CHANNELS], chunk * desc[CHUNK]
    if load(F32, table, 4 * desc[PITCH]) == 0:
        for c in range(channels):
            exact_gradient(desc, n, c, place + first, place + last)
        return
    whole = channels & ~31
    for start in range(place + first, place + last, RUN):
        grad_out, x = address_of(desc, GRAD_OUT, size, n, 0, start), address_of(desc, INPUT, size, n, 0, start)
        result, rows = address_of(desc, RESULT, size, n, 0, start), min(RUN, place + last - start)
        stream = desc[STREAM] != 0 and (result | size * desc[RESULT + 3]) % 64 == 0
        for c in range(0, whole, 32):
            at = c * size
            _gradient_columns(
                kind,
                desc,
                n,
                c,
                start,
                rows,
                grad_out + at,
                x + at,
                result + at,
                table,
                stream,
                np.bool_(True),
                np.int64(32),
            )
        if whole < channels:
            at, count = whole * size, channels - whole
            _gradient_columns(
                kind,
                desc,
                n,
                whole,
                start,
                rows,
                grad_out + at,
                x + at,
                result + at,
                table,
                np.bool_(False),
                np.bool_(False),
                count,
            )


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
    """The sum of all numbers of a chunk, and of the squares about their mean, to the partials of the first channel."""
    x = address_of(desc, INPUT, item_size(kind), n, 0, chunk * desc[CHUNK])
    count, at = places_of(desc, chunk) * desc[CHANNELS], partial_index(desc, n, chunk)
    total, squares = moments(kind, x, count)
    store_f64(desc[PARTIALS], at, total)
    store_f64(desc[PARTIALS], at + desc[PITCH], squares)


@in_place
def _settle_lanes(sums, squares, shift, count):
    """The moments of 16 channels about a shift become the sum and the squares about the mean; whether they are fine."""
    s, q = vload_f64(sums, 0), vload_f64(squares, 0)
    about_mean = q - s * s * splat_f64(1.0 / count)
    vstore_f64(sums, 0, fma(splat_f64(count), widen(shift), s))
    vstore_f64(squares, 0, about_mean)
    nothing = splat_f64(2.0**-400)  # of equal numbers there are no squares
    return all_between_f64((about_mean + nothing) / (q + nothing), 1 / WORST, 2.0)


@device
def settle_moments(kind, desc, n, chunk):
    """Make a chunk's moments the sum and the squares about the mean."""
    size, place, count, channels = item_size(kind), chunk * desc[CHUNK], places_of(desc, chunk), desc[CHANNELS]
    sums = desc[PARTIALS] + 8 * partial_index(desc, n, chunk)
    squares, shift = sums + 8 * desc[PITCH], address_of(desc, INPUT, size, n, 0, place)
    for c in range(0, channels, 32):
        m, at = _load_at(kind, shift, c, channels), 8 * c
        fine = _settle_lanes(sums + at, squares + at, m[0], np.float64(count))
        fine = _settle_lanes(sums + at + 128, squares + at + 128, m[1], np.float64(count)) and fine
        if unlikely(not fine):
            for k in range(c, min(c + 32, channels)):
                total, about_mean = exact_moments(desc, n, k, place, place + count)
                store_f64(sums, lane_of_column(kind, k), total)
                store_f64(squares, lane_of_column(kind, k), about_mean)


@device
def _exact_normals(desc, n, c, count, place):
    for k in range(c, c + count):
        exact_normalised(desc, n, k, place, place + 1)


@in_place
def _normalise_channels(kind, desc, n, c, place, x, result, table, stream, whole, count):
    """The output of 32 channels at a place."""
    factors, offsets = table + 8 * desc[PITCH], table + 12 * desc[PITCH]
    v = load_channels(kind, x, whole, count)
    a = fma(v[0] - vload(F32, table, c), vload(F32, factors, c), vload(F32, offsets, c))
    b = fma(v[1] - vload(F32, table, c + 16), vload(F32, factors, c + 16), vload(F32, offsets, c + 16))
    if is_bfloat(kind) and unlikely(any_subnormal(a, b)):
        _exact_normals(desc, n, c, count, place)
    else:
        _store(kind, result, a, b, whole, count, stream)


@device
def normalise_places(kind, desc, n, chunk, first, last, table):
    """The output at some places of a chunk: (x − mean)·factor + offset."""
    size, channels, start = item_size(kind), desc[CHANNELS], chunk * desc[CHUNK]
    if load(F32, table, 4 * desc[PITCH]) == 0:
        for c in range(channels):
            exact_normalised(desc, n, c, start + first, start + last)
        return
    whole, left = channels & ~31, channels & 31
    x, result = address_of(desc, INPUT, size, n, 0, start + first), address_of(desc, RESULT, size, n, 0, start + first)
    x_step, step = size * desc[INPUT + 3], size * desc[RESULT + 3]
    stream = desc[STREAM] != 0 and (result | step) % 64 == 0
    yes, no, all_32 = np.bool_(True), np.bool_(False), np.int64(32)
    for place in range(start + first, start + last):
        for c in range(0, whole, 32):
            at = c * size
            _normalise_channels(kind, desc, n, c, place, x + at, result + at, table, stream, yes, all_32)
        if left > 0:
            at = whole * size
            _normalise_channels(kind, desc, n, whole, place, x + at, result + at, table, no, no, left)
        x, result = x + x_step, result + step
