"""Sums and M2 (squared distances from the mean) of BatchNorm's data.

One method for all data: float32 runs of 4 terms a lane about a shift, float64 beyond. float32 and float16 are read
twice while they are in a cache: first a quarter of the elements, whose mean is the shift, then all of them about it.
With the mean of k of n elements as the shift, the squares about it are at most n/k times M2, so that the
difference which makes M2 of them loses about two bits whatever the data. Equal elements have a shift of their own value
and an M2 of exactly 0.

bfloat16 needs no shift: its squares have 16 bits, and float32 sums 16 of them without a rounding unless the largest
element is more than 11 times the smallest; but then M2 of these 16 is not much less than their squares.
"""

import numpy as np

from normgrad.cpu.compile.jit import device, in_place
from normgrad.cpu.fields.channel import CHANNELS, CHUNK, INPUT, PARTIALS, PITCH, PLACES, SAMPLES, TABLES
from normgrad.cpu.intrinsics.memory import item_size, load, stack_space, store, store_f64
from normgrad.cpu.intrinsics.pairs import is_bfloat, load_pair, load_pair_or
from normgrad.cpu.intrinsics.vectors import fma, hsum, splat_f32, splat_f64, vload, vload_f64, vstore, vstore_f64, widen
from normgrad.cpu.kernels.channel.access import address_of, partial_index, places_of
from normgrad.cpu.kernels.channel.columns import (
    RUN,
    add_moments,
    add_pair,
    ask_for_channels,
    clear_sums,
    load_channels,
    settle_moments,
)
from normgrad.cpu.kernels.common.moments import about_mean, moments
from normgrad.cpu.tags import F32

_ROWS = 8  # whose sums over lanes are made together: one after another, each would wait for the one before
_KEPT = 4096  # elements of such rows, about, that stay in the first-level cache
FEW = 128  # up to so many terms, one float32 rounding would be a visible share of the error bound

_lanes, _shifts = stack_space(_ROWS * 2 * 16 * 8), stack_space(_ROWS * 4)


@in_place
def _beginning(kind, x, pairs):
    """x − x0 of a row's first 32·pairs elements, summed up in 16 lanes; x0 is the first element."""
    first, s, t = splat_f32(load(kind, x, 0)), splat_f32(np.float32(0)), splat_f32(np.float32(0))
    for i in range(0, 32 * pairs, 32):
        v = load_pair(kind, x, i)
        s, t = s + (v[0] - first), t + (v[1] - first)
    return s + t


@in_place
def _add_terms(v, shift, half, s):
    """Add x − shift and its square to s = (sum, sum/2, squares, squares).

    The second sum is halved, by FMA, since adders have more to do here than multipliers.
    """
    a, b = v[0] - shift, v[1] - shift
    return s[0] + a, fma(b, half, s[1]), fma(a, a, s[2]), fma(b, b, s[3])


@in_place
def _add_runs(s, q, a, b):
    """Add the sums of four runs to those in float64."""
    halved = a[1] + b[1]
    s = s + widen((a[0] + b[0]) + (halved + halved))
    return s, q + widen((a[2] + a[3]) + (b[2] + b[3]))


@in_place
def _row_moments(kind, x, count, shift):
    """sum(x − shift) and sum((x − shift)²) in 16 lanes: four runs of up to 4 terms in float32, float64 beyond."""
    centre, half, zero = splat_f32(shift), splat_f32(np.float32(0.5)), splat_f32(np.float32(0))
    s, q, nothing, i = splat_f64(0.0), splat_f64(0.0), (zero, zero, zero, zero), 0
    while i + 256 <= count:
        a, b = nothing, nothing
        for k in range(0, 256, 64):
            a = _add_terms(load_pair(kind, x, i + k), centre, half, a)
            b = _add_terms(load_pair(kind, x, i + k + 32), centre, half, b)
        s, q = _add_runs(s, q, a, b)
        i += 256
    if i == count:
        return s, q
    a, b = nothing, nothing
    while i + 64 <= count:
        a = _add_terms(load_pair(kind, x, i), centre, half, a)
        b = _add_terms(load_pair(kind, x, i + 32), centre, half, b)
        i += 64
    if i + 32 <= count:
        a = _add_terms(load_pair(kind, x, i), centre, half, a)
        i += 32
    if i < count:
        b = _add_terms(load_pair_or(kind, x, i, count - i, shift), centre, half, b)
    return _add_runs(s, q, a, b)


@in_place
def _long_rows(kind, rows, count, x, step, sums, squares):
    """Moments of up to _ROWS rows."""
    lanes, shifts, pairs = _lanes(), _shifts(), count // 128 + 1
    share = np.float32(1.0 / (32 * pairs))
    if not is_bfloat(kind):
        for r in range(rows):
            vstore(F32, lanes, 16 * r, _beginning(kind, x + r * step, pairs))
        for r in range(rows):
            store(F32, shifts, r, load(kind, x + r * step, 0) + share * hsum(vload(F32, lanes, 16 * r)))
    for r in range(rows):
        shift = np.float32(0) if is_bfloat(kind) else load(F32, shifts, r)
        s, q = _row_moments(kind, x + r * step, count, shift)
        vstore_f64(lanes, 32 * r, s)
        vstore_f64(lanes, 32 * r + 16, q)
    for r in range(rows):
        s, q = hsum(vload_f64(lanes, 32 * r)), hsum(vload_f64(lanes, 32 * r + 16))
        shift = np.float32(0) if is_bfloat(kind) else load(F32, shifts, r)
        total, about = about_mean(s, q, count, np.float64(shift))
        store_f64(sums, r, total)
        store_f64(squares, r, about)


@device
def batch_moments_rows(kind, desc, n, first, last, part):
    """Sums and M2 of the rows of a chunk, to the partials."""
    place, count, size = part * desc[CHUNK], places_of(desc, part), item_size(kind)
    x, step = address_of(desc, INPUT, size, n, first, place), size * desc[INPUT + 2]
    sums = desc[PARTIALS] + 8 * partial_index(desc, n, part)
    squares = sums + 8 * desc[PITCH]
    if count >= FEW:
        groups = max((last - first + _ROWS - 1) // _ROWS, (last - first) * count // _KEPT)
        at_once = (last - first + groups - 1) // groups
        for c in range(first, last, at_once):
            rows = min(at_once, last - c)
            _long_rows(kind, rows, count, x + (c - first) * step, step, sums + 8 * c, squares + 8 * c)
        return
    for c in range(first, last):
        total, about = moments(kind, x + (c - first) * step, count, size)
        store_f64(sums, c, total)
        store_f64(squares, c, about)


@in_place
def _shift_columns(kind, x, step, places, shifts, whole, count):
    """The mean of some places, for 32 channels."""
    first, zero = load_channels(kind, x, whole, count), splat_f32(np.float32(0))
    s0, s1 = zero, zero
    for r in range(1, places):
        v = load_channels(kind, x + r * step, whole, count)
        s0, s1 = s0 + (v[0] - first[0]), s1 + (v[1] - first[1])
    share = splat_f32(np.float32(1.0 / places))
    vstore(F32, shifts, 0, fma(s0, share, first[0]))
    vstore(F32, shifts, 16, fma(s1, share, first[1]))


@in_place
def _channel_shifts(kind, shifts):
    if is_bfloat(kind):
        return splat_f32(np.float32(0)), splat_f32(np.float32(0))
    return vload(F32, shifts, 0), vload(F32, shifts, 16)


@in_place
def _add_place(kind, x, ahead, whole, count, m, s):
    ask_for_channels(kind, x + ahead)
    v = load_channels(kind, x, whole, count)
    a, b = v[0] - m[0], v[1] - m[1]
    return s[0] + a, s[1] + b, fma(a, a, s[2]), fma(b, b, s[3])


@in_place
def _add_columns(kind, x, step, places, shifts, sums, squares, whole, count):
    """Add x − shift and its square at some places to the sums of 32 channels: four runs of terms in float32."""
    m, zero, ahead = _channel_shifts(kind, shifts), splat_f32(np.float32(0)), RUN * step
    a = b = c = d = (zero, zero, zero, zero)
    for _ in range(places // 4):
        a = _add_place(kind, x, ahead, whole, count, m, a)
        b = _add_place(kind, x + step, ahead, whole, count, m, b)
        c = _add_place(kind, x + 2 * step, ahead, whole, count, m, c)
        d = _add_place(kind, x + 3 * step, ahead, whole, count, m, d)
        x += 4 * step
    for _ in range(places % 4):
        a = _add_place(kind, x, ahead, whole, count, m, a)
        x += step
    add_pair(sums, 0, (a[0] + b[0]) + (c[0] + d[0]), (a[1] + b[1]) + (c[1] + d[1]))
    add_pair(squares, 0, (a[2] + b[2]) + (c[2] + d[2]), (a[3] + b[3]) + (c[3] + d[3]))


@in_place
def _settle_columns(kind, desc, count, shifts, sums, squares):
    """Make the moments of a chunk about the shifts the sums and M2."""
    for c in range(0, desc[PITCH], 32):
        m, terms = _channel_shifts(kind, shifts + 4 * c), splat_f64(np.float64(count))
        total, about = about_mean(vload_f64(sums, c), vload_f64(squares, c), terms, widen(m[0]))
        vstore_f64(sums, c, total)
        vstore_f64(squares, c, about)
        total, about = about_mean(vload_f64(sums, c + 16), vload_f64(squares, c + 16), terms, widen(m[1]))
        vstore_f64(sums, c + 16, total)
        vstore_f64(squares, c + 16, about)


@device
def batch_moments_columns(kind, desc, n, chunk):
    """Sums and M2 of a chunk of columns, to the partials."""
    clear_sums(desc, n, chunk)
    if desc[SAMPLES] * desc[PLACES] <= FEW:
        add_moments(kind, desc, n, chunk, 0, places_of(desc, chunk))
        settle_moments(kind, desc, n, chunk)
        return
    size, channels, count, at = item_size(kind), desc[CHANNELS], places_of(desc, chunk), partial_index(desc, n, chunk)
    pitch, step, yes, no = desc[PITCH], size * desc[INPUT + 3], np.bool_(True), np.bool_(False)
    sums, shifts, whole, left = desc[PARTIALS] + 8 * at, desc[TABLES] + 2 * at, channels & ~31, channels & 31
    squares, x = sums + 8 * pitch, address_of(desc, INPUT, size, n, 0, chunk * desc[CHUNK])
    if not is_bfloat(kind):
        for c in range(0, whole, 32):
            _shift_columns(kind, x + c * size, step, (count + 3) // 4, shifts + 4 * c, yes, np.int64(32))
        if left > 0:
            _shift_columns(kind, x + whole * size, step, (count + 3) // 4, shifts + 4 * whole, no, left)
    for first in range(0, count, RUN):
        places, row = min(RUN, count - first), x + first * step
        for c in range(0, whole, 32):
            m, s, q = shifts + 4 * c, sums + 8 * c, squares + 8 * c
            _add_columns(kind, row + c * size, step, places, m, s, q, yes, np.int64(32))
        if left > 0:
            m, s, q = shifts + 4 * whole, sums + 8 * whole, squares + 8 * whole
            _add_columns(kind, row + whole * size, step, places, m, s, q, no, left)
    _settle_columns(kind, desc, count, shifts, sums, squares)
