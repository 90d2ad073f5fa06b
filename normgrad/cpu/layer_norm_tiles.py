"""LayerNorm backward on a tile: a few rows whose weight gradients are added up in registers."""

import numpy as np

from normgrad.cpu.jit import device, in_place
from normgrad.cpu.kinds import F32
from normgrad.cpu.memory import load, load_f64
from normgrad.cpu.pairs import (
    ask_for_pair,
    load_pair,
    load_pair_first,
    store_normal_pair,
    store_normal_pair_first,
    stream_normal_pair,
)
from normgrad.cpu.row_sizes import FINE, MEANS, OFFSETS, RSTDS, SLOPES, TILE
from normgrad.cpu.vectors import (
    all_between,
    bits_or,
    fma,
    select_zero,
    splat_f32,
    splat_f64,
    vload,
    vload_f64,
    vstore,
    vstore_f64,
    widen,
)

# Outside these a sum of float32 terms may have lost digits to subnormal numbers, or overflowed: float64.
SMALLEST, LARGEST = np.float32(2.0**-80), np.float32(2.0**100)


@in_place
def splat_of(scratch, parameter, r):
    return splat_f32(load(F32, scratch + parameter, r))


@in_place
def _gradient_pair(scratch, r, begins, d, x, w0, w1, s):
    """One row's 32 columns: grad_input, and its terms added to the weight gradients s = (dw, dw, db, db)."""
    mean, rstd = splat_of(scratch, MEANS, r), splat_of(scratch, RSTDS, r)
    offset, slope = splat_of(scratch, OFFSETS, r), splat_of(scratch, SLOPES, r)
    x0, x1 = x[0] - mean, x[1] - mean
    d0, d1 = d[0] * rstd, d[1] * rstd
    if begins:
        sums = (d0 * x0, d1 * x1, d[0], d[1])
    else:
        sums = (fma(d0, x0, s[0]), fma(d1, x1, s[1]), s[2] + d[0], s[3] + d[1])
    # The small terms first: their rounding hardly shows, and the large one is rounded once.
    return fma(d0, w0, fma(x0, slope, offset)), fma(d1, w1, fma(x1, slope, offset)), sums


@in_place
def keep_sums(sums, i, s, begins):
    """The sums of a tile's rows, added to those of the tiles before: of 32 columns the weight's, then the bias's."""
    if not begins:
        s = (
            s[0] + vload(F32, sums, 2 * i),
            s[1] + vload(F32, sums, 2 * i + 16),
            s[2] + vload(F32, sums, 2 * i + 32),
            s[3] + vload(F32, sums, 2 * i + 48),
        )
    vstore(F32, sums, 2 * i, s[0])
    vstore(F32, sums, 2 * i + 16, s[1])
    vstore(F32, sums, 2 * i + 32, s[2])
    vstore(F32, sums, 2 * i + 48, s[3])


@in_place
def _whole_pairs(kind, rows, first, last, tensors, weight, scratch, sums, r0, want_input, stream, ahead_go, ahead_x):
    grad_out, go_pitch, x, x_pitch, grad_input, gi_pitch = tensors
    zero, j = splat_f32(np.float32(0)), first
    while j + 32 <= last:
        w0, w1 = vload(F32, weight, j), vload(F32, weight, j + 16)
        s = (zero, zero, zero, zero)
        for r in range(rows):
            d, v = load_pair(kind, grad_out + r * go_pitch, j), load_pair(kind, x + r * x_pitch, j)
            ask_for_pair(kind, grad_out + ahead_go + r * go_pitch, j)
            if ahead_x:
                ask_for_pair(kind, x + ahead_x + r * x_pitch, j)
            o0, o1, s = _gradient_pair(scratch, r0 + r, r == 0, d, v, w0, w1, s)
            if stream:
                stream_normal_pair(kind, grad_input + r * gi_pitch, j, o0, o1)
            elif want_input:
                store_normal_pair(kind, grad_input + r * gi_pitch, j, o0, o1)
        keep_sums(sums, j - first, s, r0 == 0)
        j += 32
    return j


@in_place
def _last_pair(kind, rows, j, last, i, tensors, weight, scratch, sums, r0, want_input):
    grad_out, go_pitch, x, x_pitch, grad_input, gi_pitch = tensors
    zero = splat_f32(np.float32(0))
    w0, w1 = vload(F32, weight, j), vload(F32, weight, j + 16)
    s = (zero, zero, zero, zero)
    for r in range(rows):
        d = load_pair_first(kind, grad_out + r * go_pitch, j, last - j)
        v = load_pair_first(kind, x + r * x_pitch, j, last - j)
        o0, o1, s = _gradient_pair(scratch, r0 + r, r == 0, d, v, w0, w1, s)
        if want_input:
            store_normal_pair_first(kind, grad_input + r * gi_pitch, j, o0, o1, last - j)
    keep_sums(sums, i, s, r0 == 0)


@device
def tile_gradients(kind, rows, first, last, tensors, weight, scratch, sums, r, want_input, stream, ahead_go, ahead_x):
    """Columns [first, last) of up to TILE rows, r and following of their group, and their weight gradients' terms,
    in float32, to the group's sums. Asks for the data so many bytes ahead.
    """
    if rows == TILE and stream:
        j = _whole_pairs(kind, TILE, first, last, tensors, weight, scratch, sums, r, True, True, ahead_go, ahead_x)
    elif rows == TILE and want_input:
        j = _whole_pairs(kind, TILE, first, last, tensors, weight, scratch, sums, r, True, False, ahead_go, ahead_x)
    else:
        j = _whole_pairs(
            kind, rows, first, last, tensors, weight, scratch, sums, r, want_input, stream, ahead_go, ahead_x
        )
    if j < last:
        _last_pair(kind, rows, j, last, j - first, tensors, weight, scratch, sums, r, want_input)


@device
def _only_zeros_out_of_range(kind, tensors, rows, j, count, dw0, dw1):
    """Whether a pair's sums are out of range only where the whole gradient, and so the sum exactly, is zero."""
    zero, one = splat_f32(np.float32(0)), splat_f32(np.float32(1))
    some0, some1 = zero, zero
    for r in range(rows):
        d = load_pair_first(kind, tensors[0] + r * tensors[1], j, count)
        some0, some1 = bits_or(some0, d[0]), bits_or(some1, d[1])
    s0, s1 = select_zero(some0, one, dw0), select_zero(some1, one, dw1)
    return all_between(s0, SMALLEST, LARGEST) and all_between(s1, SMALLEST, LARGEST)


@device
def _exact_sums_pair(kind, tensors, scratch, rows, j, count, dw, db, lane):
    """The terms of both weight gradients of one pair of vectors, in float64, but of rows that are so throughout."""
    grad_out, go_pitch, x, x_pitch, _, _ = tensors
    w0, w1 = vload_f64(dw, lane), vload_f64(dw, lane + 16)
    b0, b1 = vload_f64(db, lane), vload_f64(db, lane + 16)
    for r in range(rows):
        if load_f64(scratch + FINE, r) != 0:
            d = load_pair_first(kind, grad_out + r * go_pitch, j, count)
            v = load_pair_first(kind, x + r * x_pitch, j, count)
            m = splat_f64(np.float64(load(F32, scratch + MEANS, r)))
            s = splat_f64(np.float64(load(F32, scratch + RSTDS, r)))
            d0, d1 = widen(d[0]), widen(d[1])
            w0, w1 = fma(d0, (widen(v[0]) - m) * s, w0), fma(d1, (widen(v[1]) - m) * s, w1)
            b0, b1 = b0 + d0, b1 + d1
    vstore_f64(dw, lane, w0)
    vstore_f64(dw, lane + 16, w1)
    vstore_f64(db, lane, b0)
    vstore_f64(db, lane + 16, b1)


@in_place
def _add_sums_pair(kind, exact, tensors, scratch, sums, rows, j, count, i, pad0, pad1, dw, db, lane):
    dw0, dw1 = vload(F32, sums, 2 * i), vload(F32, sums, 2 * i + 16)
    fine = all_between(dw0 + pad0, SMALLEST, LARGEST) and all_between(dw1 + pad1, SMALLEST, LARGEST)
    if exact or not (fine or _only_zeros_out_of_range(kind, tensors, rows, j, count, dw0, dw1)):
        _exact_sums_pair(kind, tensors, scratch, rows, j, count, dw, db, lane)
    else:
        db0, db1 = vload(F32, sums, 2 * i + 32), vload(F32, sums, 2 * i + 48)
        vstore_f64(dw, lane, vload_f64(dw, lane) + widen(dw0))
        vstore_f64(dw, lane + 16, vload_f64(dw, lane + 16) + widen(dw1))
        vstore_f64(db, lane, vload_f64(db, lane) + widen(db0))
        vstore_f64(db, lane + 16, vload_f64(db, lane + 16) + widen(db1))


@device
def add_sums(kind, exact, first, last, tensors, scratch, sums, rows, pad, dw, db, dw_first):
    """The sums of a group of rows over a stretch of columns, to the block's in float64."""
    zero, j = splat_f32(np.float32(0)), first
    while j + 32 <= last:
        _add_sums_pair(kind, exact, tensors, scratch, sums, rows, j, 32, j - first, zero, zero, dw, db, j - dw_first)
        j += 32
    if j < last:
        # the lanes beyond the last column hold 0*(0 - mean): the pad replaces them by a harmless 1
        p0, p1 = vload(F32, pad, 0), vload(F32, pad, 16)
        _add_sums_pair(kind, exact, tensors, scratch, sums, rows, j, last - j, j - first, p0, p1, dw, db, j - dw_first)
