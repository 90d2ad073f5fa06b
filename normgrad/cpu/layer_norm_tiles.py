"""LayerNorm backward on a tile: a few rows whose weight gradients are added up in registers."""

import numpy as np

from normgrad.cpu.jit import device, in_place
from normgrad.cpu.kinds import F32
from normgrad.cpu.memory import item_size, load, load_f64, prefetch_l2, round_for, store, store_f64, store_i64
from normgrad.cpu.pairs import (
    is_bfloat,
    load_pair,
    load_pair_first,
    store_normal_pair,
    store_normal_pair_first,
    stream_normal_pair,
)
from normgrad.cpu.row_sizes import SEGMENT, TILE
from normgrad.cpu.rows import lane_of_column
from normgrad.cpu.vectors import (
    all_between,
    bits_or,
    fma,
    select_zero,
    splat_f32,
    splat_f64,
    vload,
    vload_f64,
    vstore_f64,
    widen,
)

AHEAD_BYTES = 1024  # prefetch distance where rows are too long to ask for the next ones
# Outside these a float32 intermediate may be rounded as a subnormal, or overflow where the formula does not: float64.
SMALLEST, LARGEST = np.float32(2.0**-80), np.float32(2.0**100)
SMALLEST_RSTD, LARGEST_RSTD = np.float32(2.0**-60), np.float32(2.0**27)
SMALLEST_FACTOR, LARGEST_FACTOR = np.float32(2.0**-110), np.float32(2.0**110)  # of x - mean
# Per-row parameters of a tile, float32: mean, rstd, -rstd*S1/N, -rstd^3*S2/N (S2 of x - mean); S1/N, S2/N in float64.
PARAMETERS, FLAG, EXACT = 4, 64, 128


@in_place
def _gradient_pair(kind, parameters, r, d, x, w0, w1, s):
    """One row's 32 columns: grad_input, and its terms added to the weight gradients s = (dw, dw, db, db)."""
    vm, vr = splat_f32(load(F32, parameters, r * PARAMETERS)), splat_f32(load(F32, parameters, r * PARAMETERS + 1))
    c1, c2 = splat_f32(load(F32, parameters, r * PARAMETERS + 2)), splat_f32(load(F32, parameters, r * PARAMETERS + 3))
    x0, x1 = x[0] - vm, x[1] - vm
    d0, d1 = d[0] * vr, d[1] * vr
    sums = (fma(d0, x0, s[0]), fma(d1, x1, s[1]), s[2] + d[0], s[3] + d[1])
    # The small terms first: their rounding hardly shows, and the large one is rounded once.
    return fma(d0, w0, fma(x0, c2, c1)), fma(d1, w1, fma(x1, c2, c1)), sums


@device
def _only_zeros_out_of_range(kind, grad_out, go_pitch, rows, j, count, s):
    """Whether a pair's sums are out of range only where the whole gradient, and so the sum exactly, is zero."""
    zero, one = splat_f32(np.float32(0)), splat_f32(np.float32(1))
    some0, some1 = zero, zero
    for r in range(rows):
        d = load_pair_first(kind, grad_out + r * go_pitch, j, count)
        some0, some1 = bits_or(some0, d[0]), bits_or(some1, d[1])
    s0, s1 = select_zero(some0, one, s[0]), select_zero(some1, one, s[1])
    return all_between(s0, SMALLEST, LARGEST) and all_between(s1, SMALLEST, LARGEST)


@device
def _exact_sums_pair(kind, grad_out, go_pitch, x, x_pitch, parameters, rows, j, count, dw, db, lane):
    """The terms of both weight gradients of one pair of vectors, in float64."""
    w0, w1 = vload_f64(dw, lane), vload_f64(dw, lane + 16)
    b0, b1 = vload_f64(db, lane), vload_f64(db, lane + 16)
    for r in range(rows):
        d = load_pair_first(kind, grad_out + r * go_pitch, j, count)
        v = load_pair_first(kind, x + r * x_pitch, j, count)
        m, s = (
            splat_f64(np.float64(load(F32, parameters, r * PARAMETERS))),
            splat_f64(np.float64(load(F32, parameters, r * PARAMETERS + 1))),
        )
        d0, d1 = widen(d[0]), widen(d[1])
        w0, w1 = fma(d0, (widen(v[0]) - m) * s, w0), fma(d1, (widen(v[1]) - m) * s, w1)
        b0, b1 = b0 + d0, b1 + d1
    vstore_f64(dw, lane, w0)
    vstore_f64(dw, lane + 16, w1)
    vstore_f64(db, lane, b0)
    vstore_f64(db, lane + 16, b1)


@in_place
def _add_sums_pair(
    kind, exact, grad_out, go_pitch, x, x_pitch, parameters, rows, j, count, s, pad0, pad1, dw, db, lane
):
    fine = all_between(s[0] + pad0, SMALLEST, LARGEST) and all_between(s[1] + pad1, SMALLEST, LARGEST)
    if exact or not (fine or _only_zeros_out_of_range(kind, grad_out, go_pitch, rows, j, count, s)):
        _exact_sums_pair(kind, grad_out, go_pitch, x, x_pitch, parameters, rows, j, count, dw, db, lane)
    else:
        vstore_f64(dw, lane, vload_f64(dw, lane) + widen(s[0]))
        vstore_f64(dw, lane + 16, vload_f64(dw, lane + 16) + widen(s[1]))
        vstore_f64(db, lane, vload_f64(db, lane) + widen(s[2]))
        vstore_f64(db, lane + 16, vload_f64(db, lane + 16) + widen(s[3]))


@device
def tile_gradients(
    kind,
    rows,
    first,
    last,
    grad_out,
    go_pitch,
    x,
    x_pitch,
    grad_input,
    gi_pitch,
    weight,
    pad,
    parameters,
    dw,
    db,
    dw_first,
    want_input,
    want_sums,
    exact_sums,
    stream,
    ahead_rows,
):
    """Columns [first, last) of up to TILE rows; dw, db start at column dw_first. Asks for the next tile's data too."""
    zero = splat_f32(np.float32(0))
    size = item_size(kind)
    ahead_go, ahead_input = ahead_rows * go_pitch, ahead_rows * x_pitch
    if ahead_rows == 0:
        ahead_go, ahead_input = AHEAD_BYTES, AHEAD_BYTES
    j = first
    while j + 32 <= last:
        w0, w1 = vload(F32, weight, j), vload(F32, weight, j + 16)
        s = (zero, zero, zero, zero)
        for r in range(TILE):
            if r < rows:
                d, v = load_pair(kind, grad_out + r * go_pitch, j), load_pair(kind, x + r * x_pitch, j)
                ahead_d, ahead_x = (
                    grad_out + r * go_pitch + j * size + ahead_go,
                    x + r * x_pitch + j * size + ahead_input,
                )
                prefetch_l2(ahead_d)
                prefetch_l2(ahead_x)
                if size == 4:
                    prefetch_l2(ahead_d + 64)
                    prefetch_l2(ahead_x + 64)
                o0, o1, s = _gradient_pair(kind, parameters, r, d, v, w0, w1, s)
                if stream:
                    stream_normal_pair(kind, grad_input + r * gi_pitch, j, o0, o1)
                elif want_input:
                    store_normal_pair(kind, grad_input + r * gi_pitch, j, o0, o1)
        if want_sums:
            _add_sums_pair(
                kind,
                exact_sums,
                grad_out,
                go_pitch,
                x,
                x_pitch,
                parameters,
                rows,
                j,
                32,
                s,
                zero,
                zero,
                dw,
                db,
                j - dw_first,
            )
        j += 32
    if j < last:
        s = (zero, zero, zero, zero)
        for r in range(rows):
            d = load_pair_first(kind, grad_out + r * go_pitch, j, last - j)
            v = load_pair_first(kind, x + r * x_pitch, j, last - j)
            o0, o1, s = _gradient_pair(kind, parameters, r, d, v, vload(F32, weight, j), vload(F32, weight, j + 16), s)
            if want_input:
                store_normal_pair_first(kind, grad_input + r * gi_pitch, j, o0, o1, last - j)
        if want_sums:
            # the lanes beyond the last column hold 0*(0 - mean): the pad replaces them by a harmless 1
            _add_sums_pair(
                kind,
                exact_sums,
                grad_out,
                go_pitch,
                x,
                x_pitch,
                parameters,
                rows,
                j,
                last - j,
                s,
                vload(F32, pad, 0),
                vload(F32, pad, 16),
                dw,
                db,
                j - dw_first,
            )


@device
def exact_row(
    kind, first, last, n, grad_out, x, grad_input, weight, mean, rstd, sums, dw, db, dw_first, want_input, want_sums
):
    """A row in float64, for data near the ends of float32's range, NaN and Inf."""
    m, s = np.float64(mean), np.float64(rstd)
    c1, c2 = load_f64(sums, 0), load_f64(sums, 1)
    for j in range(first, last):
        lane = lane_of_column(kind, j)
        d, h = np.float64(load(kind, grad_out, j)), (np.float64(load(kind, x, j)) - m) * s
        if want_input:
            store(kind, grad_input, j, round_for(kind, s * (d * load(F32, weight, lane) - c1 - h * c2)))
        if want_sums:
            store_f64(dw, lane - dw_first, load_f64(dw, lane - dw_first) + d * h)
            store_f64(db, lane - dw_first, load_f64(db, lane - dw_first) + d)


@device
def exact_segment_sums(kind, grad_out, x, weight, first, last, mean, rstd):
    s1, s2 = 0.0, 0.0
    for j in range(first, last):
        g = np.float64(load(kind, grad_out, j)) * load(F32, weight, lane_of_column(kind, j))
        s1 += g
        s2 += g * ((np.float64(load(kind, x, j)) - mean) * rstd)
    return s1, s2


@device
def is_zero(kind, address, n):
    """Whether a row holds zeros alone, as the gradient of a masked token does."""
    for j in range(n):
        if load(kind, address, j) != 0:
            return False
    return True


@device
def row_parameters(kind, parameters, r, n, s1, s2, grad_out, x, weight, mean, rstd, want_input):
    """Fill in the parameters of tile row r from its sums (s2 without rstd); whether float32 is enough for it."""
    per_column = 1.0 / n
    largest = max(abs(s1), abs(s2) * rstd) * per_column
    fine = SMALLEST_RSTD <= rstd <= LARGEST_RSTD
    if want_input:
        in_range = SMALLEST <= largest <= LARGEST and abs(s2) * per_column <= LARGEST
        # Results that are subnormal numbers are rounded to bfloat16 as zeros: no loss beside terms of this size.
        in_range = in_range and (not is_bfloat(kind) or largest * rstd >= SMALLEST)
        in_range = in_range and SMALLEST_FACTOR <= largest * rstd * rstd <= LARGEST_FACTOR
        fine = fine and (in_range or (largest == 0 and is_zero(kind, grad_out, n)))
    if want_input and not fine:
        s1, s2 = 0.0, 0.0
        for first in range(0, n, SEGMENT):
            a, b = exact_segment_sums(
                kind, grad_out, x, weight, first, min(n, first + SEGMENT), np.float64(mean), np.float64(rstd)
            )
            s1, s2 = s1 + a, s2 + b
        c1, c2 = s1 * per_column, s2 * per_column
    else:
        c1, c2 = s1 * per_column, s2 * rstd * per_column
    store(F32, parameters, r * PARAMETERS, mean)
    store(F32, parameters, r * PARAMETERS + 1, rstd)
    store(F32, parameters, r * PARAMETERS + 2, np.float32(-c1 * rstd))
    store(F32, parameters, r * PARAMETERS + 3, np.float32(-c2 * rstd * rstd))
    store_f64(parameters + EXACT, 2 * r, c1)
    store_f64(parameters + EXACT, 2 * r + 1, c2)
    store_i64(parameters + 256, r, np.int64(fine))
    return fine
