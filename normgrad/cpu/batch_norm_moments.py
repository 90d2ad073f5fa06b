"""Sums and squares of BatchNorm's data: float32 about a guess at the mean, float64 beyond and where that is too coarse.

They are wanted for themselves: results made of them, which may be near 0 and show every error, take more care. A sum is
good to some roundings of the numbers' mean size, and so the guess may not be much larger than that. How large they are
at least is known from the absolute values of short sums, whose cost is small.
"""

import numpy as np

from normgrad.cpu.channel_columns import add_moments, ask_for_channels, clear_sums, load_channels, settle_moments
from normgrad.cpu.channel_fields import CHANNELS, CHUNK, INPUT, PARTIALS, PITCH, PLACES, SAMPLES, TABLES
from normgrad.cpu.channel_rows import moments_of_row
from normgrad.cpu.channels import address_of, partial_index, places_of
from normgrad.cpu.exact import exact_moments
from normgrad.cpu.jit import device, in_place
from normgrad.cpu.kinds import F32
from normgrad.cpu.memory import item_size, load, load_f64, stack_space, store, store_f64
from normgrad.cpu.pairs import load_pair, load_pair_first, load_pair_or
from normgrad.cpu.rows import column_of_lane
from normgrad.cpu.trusted_sums import LARGEST, SMALLEST
from normgrad.cpu.vectors import (
    all_between_f64,
    coarse,
    fma,
    hsum,
    magnitude,
    splat_f32,
    splat_f64,
    vload,
    vload_f64,
    vstore,
    vstore_f64,
    widen,
)

_ROWS = 8  # whose sums over lanes are made together: one after another, each would wait for the one before
FEW = 128  # up to so many terms, a float32 rounding of one of them shows
_RUN = 16  # places that are worked on at once, and added up in float32
_BEGINNING = 32  # places whose mean is the guess at that of a row
_GUESSED = 8  # places whose mean is the guess at that of a chunk of columns
_WORST = 4.0  # by how much squares about a guess may be larger than those about the mean
_LARGE = 8.0  # by how much a guess may be larger than the numbers

_lane_sums = stack_space(_ROWS * 2 * 16 * 8)
_guesses = stack_space(_ROWS * 2 * 4)


@device
def _are_fine(count, guess, size, squares, about_mean):
    """Whether sums of so many numbers about a guess will do; `size` is not more than their absolute values' sum."""
    in_range = SMALLEST <= squares <= LARGEST and squares <= _WORST * about_mean
    return in_range and abs(guess) * count <= _LARGE * size


@in_place
def _add_terms(v, m0, m1, s0, s1, q0, q1):
    a, b = v[0] - m0, v[1] - m1
    return s0 + a, s1 + b, fma(a, a, q0), fma(b, b, q1)


@in_place
def _row_moments(kind, x, count, shift):
    """Sums over the lanes of x − shift and (x − shift)²: two runs of up to 8 terms in float32, float64 beyond.

    And the absolute values of the runs' sums of x.
    """
    centre, zero = splat_f32(shift), splat_f32(np.float32(0))
    s, q, size = splat_f64(0.0), splat_f64(0.0), zero
    i = 0
    while i + 256 <= count:
        s0, s1, q0, q1 = zero, zero, zero, zero
        for k in range(0, 256, 32):
            s0, s1, q0, q1 = _add_terms(load_pair(kind, x, i + k), centre, centre, s0, s1, q0, q1)
        s, q = s + widen(s0 + s1), q + widen(q0 + q1)
        size = size + magnitude(fma(centre, splat_f32(np.float32(16)), s0 + s1))
        i += 256
    if i < count:
        s0, s1, q0, q1 = zero, zero, zero, zero
        terms = np.float32(2 * ((count - i) // 32))
        while i + 32 <= count:
            s0, s1, q0, q1 = _add_terms(load_pair(kind, x, i), centre, centre, s0, s1, q0, q1)
            i += 32
        size = size + magnitude(fma(centre, splat_f32(terms), s0 + s1))
        if i < count:
            s0, s1, q0, q1 = _add_terms(load_pair_or(kind, x, i, count - i, shift), centre, centre, s0, s1, q0, q1)
        s, q = s + widen(s0 + s1), q + widen(q0 + q1)
    return s, q, hsum(size)


@in_place
def _add_numbers(v, s0, s1, q0, q1):
    return s0 + v[0], s1 + v[1], fma(v[0], v[0], q0), fma(v[1], v[1], q1)


@in_place
def _row_moments_about_zero(kind, x, count):
    """The same sums of x and x²."""
    zero = splat_f32(np.float32(0))
    s, q = splat_f64(0.0), splat_f64(0.0)
    i = 0
    while i + 256 <= count:
        s0, s1, q0, q1 = zero, zero, zero, zero
        for k in range(0, 256, 32):
            s0, s1, q0, q1 = _add_numbers(load_pair(kind, x, i + k), s0, s1, q0, q1)
        s, q = s + widen(s0 + s1), q + widen(q0 + q1)
        i += 256
    if i < count:
        s0, s1, q0, q1 = zero, zero, zero, zero
        while i + 32 <= count:
            s0, s1, q0, q1 = _add_numbers(load_pair(kind, x, i), s0, s1, q0, q1)
            i += 32
        if i < count:
            s0, s1, q0, q1 = _add_numbers(load_pair_first(kind, x, i, count - i), s0, s1, q0, q1)
        s, q = s + widen(s0 + s1), q + widen(q0 + q1)
    return s, q


@device
def _guess(kind, x):
    """What the moments of a row are about: the mean of its beginning, or 0 if that is smaller than the deviation."""
    v = load_pair(kind, x, 0)
    total, squares = hsum(v[0] + v[1]), hsum(fma(v[1], v[1], v[0] * v[0]))
    if total * total <= np.float32(_BEGINNING / 2) * squares:
        return np.float32(0)
    return coarse(total * np.float32(1 / _BEGINNING))


@in_place
def _long_rows(kind, desc, n, first, last, place, count, x, step, at):
    """Moments of up to _ROWS rows, each about a guess at its mean."""
    lanes, guesses = _lane_sums(), _guesses()
    for c in range(first, last):
        row = x + (c - first) * step
        guess, size = _guess(kind, row), np.float32(0)
        if guess == 0:
            s, q = _row_moments_about_zero(kind, row, count)
        else:
            s, q, size = _row_moments(kind, row, count, guess)
        vstore_f64(lanes, 32 * (c - first), s)
        vstore_f64(lanes, 32 * (c - first) + 16, q)
        store(F32, guesses, c - first, guess)
        store(F32, guesses, _ROWS + c - first, size)
    per_place = 1.0 / count
    for c in range(first, last):
        s, q = hsum(vload_f64(lanes, 32 * (c - first))), hsum(vload_f64(lanes, 32 * (c - first) + 16))
        guess, size = np.float64(load(F32, guesses, c - first)), load(F32, guesses, _ROWS + c - first)
        total, squares = s + count * guess, q - s * s * per_place
        if not _are_fine(count, guess, size, q, squares):
            total, squares = moments_of_row(kind, desc, n, c, place, count, x + (c - first) * step)
        store_f64(at, c, total)
        store_f64(at, c + desc[PITCH], squares)


@device
def batch_moments_rows(kind, desc, n, first, last, part):
    """Sums of the rows of a chunk, and of the squares about their means, to the partials."""
    place, count, size = part * desc[CHUNK], places_of(desc, part), item_size(kind)
    x, step = address_of(desc, INPUT, size, n, first, place), size * desc[INPUT + 2]
    at, pitch = desc[PARTIALS] + 8 * partial_index(desc, n, part), desc[PITCH]
    if count >= FEW:
        for c in range(first, last, _ROWS):
            stop = min(last, c + _ROWS)
            _long_rows(kind, desc, n, c, stop, place, count, x + (c - first) * step, step, at)
        return
    for c in range(first, last):
        total, squares = moments_of_row(kind, desc, n, c, place, count, x + (c - first) * step)
        store_f64(at, c, total)
        store_f64(at, c + pitch, squares)


@in_place
def _guess_columns(kind, x, step, places, guesses, whole, count):
    """The mean of some places, for 32 channels."""
    v = load_channels(kind, x, whole, count)
    a, b = v[0], v[1]
    for r in range(1, places):
        v = load_channels(kind, x + r * step, whole, count)
        a, b = a + v[0], b + v[1]
    share = splat_f32(np.float32(1.0 / places))
    vstore(F32, guesses, 0, coarse(a * share))
    vstore(F32, guesses, 16, coarse(b * share))


@in_place
def _add_columns(kind, x, step, places, guesses, sizes, sums, squares, whole, count):
    """Add x − guess and its square at some places to the sums of 32 channels: two runs of terms in float32."""
    zero, m0, m1 = splat_f32(np.float32(0)), vload(F32, guesses, 0), vload(F32, guesses, 16)
    s0, s1, q0, q1 = zero, zero, zero, zero
    t0, t1, r0, r1 = zero, zero, zero, zero
    ahead = _RUN * step
    for _ in range(places // 2):
        ask_for_channels(kind, x + ahead)
        ask_for_channels(kind, x + step + ahead)
        s0, s1, q0, q1 = _add_terms(load_channels(kind, x, whole, count), m0, m1, s0, s1, q0, q1)
        t0, t1, r0, r1 = _add_terms(load_channels(kind, x + step, whole, count), m0, m1, t0, t1, r0, r1)
        x += 2 * step
    if places % 2:
        s0, s1, q0, q1 = _add_terms(load_channels(kind, x, whole, count), m0, m1, s0, s1, q0, q1)
    terms = splat_f32(np.float32(places))
    vstore(F32, sizes, 0, vload(F32, sizes, 0) + magnitude(fma(m0, terms, s0 + t0)))
    vstore(F32, sizes, 16, vload(F32, sizes, 16) + magnitude(fma(m1, terms, s1 + t1)))
    vstore_f64(sums, 0, vload_f64(sums, 0) + widen(s0 + t0))
    vstore_f64(sums, 16, vload_f64(sums, 16) + widen(s1 + t1))
    vstore_f64(squares, 0, vload_f64(squares, 0) + widen(q0 + r0))
    vstore_f64(squares, 16, vload_f64(squares, 16) + widen(q1 + r1))


@device
def _settle_column(kind, desc, n, place, count, lane, guesses, sizes, sums, squares):
    """Make the moments of one channel in a chunk the sum and the squares about the mean."""
    channel, guess = column_of_lane(kind, lane), np.float64(load(F32, guesses, lane))
    s, q = load_f64(sums, lane), load_f64(squares, lane)
    total, about_mean = s + count * guess, q - s * s / count
    if channel < desc[CHANNELS] and not _are_fine(count, guess, load(F32, sizes, lane), q, about_mean):
        total, about_mean = exact_moments(desc, n, channel, place, place + count)
    store_f64(sums, lane, total)
    store_f64(squares, lane, about_mean)


@device
def _settle_columns(kind, desc, n, chunk, guesses, sizes, sums, squares):
    """The same of all channels."""
    place, count = chunk * desc[CHUNK], places_of(desc, chunk)
    factor, per_place = splat_f64(np.float64(count)), splat_f64(1.0 / count)
    for c in range(0, desc[PITCH], 16):
        s, q, guess = vload_f64(sums, c), vload_f64(squares, c), widen(vload(F32, guesses, c))
        about_mean, large = q - s * s * per_place, guess * factor / widen(vload(F32, sizes, c))
        fine = all_between_f64(q, SMALLEST, LARGEST) and all_between_f64(about_mean / q, 1 / _WORST, 2.0)
        if fine and all_between_f64(large, 0.0, _LARGE):
            vstore_f64(sums, c, fma(factor, guess, s))
            vstore_f64(squares, c, about_mean)
        else:
            for lane in range(c, c + 16):
                _settle_column(kind, desc, n, place, count, lane, guesses, sizes, sums, squares)


@device
def batch_moments_columns(kind, desc, n, chunk):
    """The same of a chunk of columns."""
    if desc[SAMPLES] * desc[PLACES] <= FEW:
        clear_sums(desc, n, chunk)
        add_moments(kind, desc, n, chunk, 0, places_of(desc, chunk))
        settle_moments(kind, desc, n, chunk)
        return
    size, channels, count, place = item_size(kind), desc[CHANNELS], places_of(desc, chunk), chunk * desc[CHUNK]
    at, pitch = partial_index(desc, n, chunk), desc[PITCH]
    sums, guesses = desc[PARTIALS] + 8 * at, desc[TABLES] + 4 * at
    squares, sizes, step = sums + 8 * pitch, guesses + 4 * pitch, size * desc[INPUT + 3]
    for c in range(0, 2 * pitch, 16):
        vstore_f64(sums, c, splat_f64(0.0))
    for c in range(0, pitch, 16):
        vstore(F32, sizes, c, splat_f32(np.float32(0)))
    x, whole = address_of(desc, INPUT, size, n, 0, place), channels & ~31
    for c in range(0, whole, 32):
        _guess_columns(kind, x + c * size, step, min(count, _GUESSED), guesses + 4 * c, True, 32)
    if whole < channels:
        left = channels - whole
        _guess_columns(kind, x + whole * size, step, min(count, _GUESSED), guesses + 4 * whole, False, left)
    for first in range(0, count, _RUN):
        places, row = min(_RUN, count - first), x + first * step
        for c in range(0, whole, 32):
            g, a, s, q = guesses + 4 * c, sizes + 4 * c, sums + 8 * c, squares + 8 * c
            _add_columns(kind, row + c * size, step, places, g, a, s, q, True, 32)
        if whole < channels:
            g, a, s, q = guesses + 4 * whole, sizes + 4 * whole, sums + 8 * whole, squares + 8 * whole
            _add_columns(kind, row + whole * size, step, places, g, a, s, q, False, channels - whole)
    _settle_columns(kind, desc, n, chunk, guesses, sizes, sums, squares)
