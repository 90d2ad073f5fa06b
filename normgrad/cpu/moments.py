"""Sums and squares of numbers that follow each other, in float64: what outputs are made of.

The sum goes to float64 at once, since results near 0 show every error of the mean. The squares of LayerNorm are float32
trees about a guess at the mean, float64 beyond; of few numbers, where the guess was poor, and for GroupNorm they are
float64 throughout.
"""

import numpy as np

from normgrad.cpu.jit import device, in_place
from normgrad.cpu.memory import load, stack_space
from normgrad.cpu.pairs import load_pair, load_pair_first, load_pair_or
from normgrad.cpu.vectors import fma, hsum, splat_f32, splat_f64, vload_f64, vstore_f64, widen

SMALLEST, LARGEST = 2.0**-80, 2.0**100
_FEW = 128  # numbers whose squares are made in float64
_GUESSED = 32  # numbers whose mean is the guess at that of more
_WORST, _WORST_IN_FLOAT64 = 2.0, 2.0**24  # by how much squares about a shift may be larger than those about the mean

_lanes = stack_space(2 * 16 * 8)


@in_place
def _added_in_float64(v, centre, s, q, r):
    a, b = widen(v[0]) - centre, widen(v[1]) - centre
    return s + (a + b), fma(a, a, q), fma(b, b, r)


@in_place
def _moments_in_float64(kind, x, n, shift):
    """The lanes of sum(x - shift) and of sum((x - shift)^2)."""
    centre, zero, whole = splat_f64(np.float64(shift)), splat_f64(0.0), n & ~31
    s, q, r = zero, zero, zero
    for j in range(0, whole, 32):
        s, q, r = _added_in_float64(load_pair(kind, x, j), centre, s, q, r)
    if whole < n:
        s, q, r = _added_in_float64(load_pair_or(kind, x, whole, n - whole, shift), centre, s, q, r)
    return s, q + r


@in_place
def _added_about_zero(v, s, q, r):
    a, b = widen(v[0]), widen(v[1])
    return s + (a + b), fma(a, a, q), fma(b, b, r)


@in_place
def _moments_about_zero(kind, x, n):
    """The lanes of sum(x) and of sum(x^2)."""
    zero, whole = splat_f64(0.0), n & ~31
    s, q, r = zero, zero, zero
    for j in range(0, whole, 32):
        s, q, r = _added_about_zero(load_pair(kind, x, j), s, q, r)
    if whole < n:
        s, q, r = _added_about_zero(load_pair_first(kind, x, whole, n - whole), s, q, r)
    return s, q + r


@in_place
def _added(v, shift, s):
    """The sum with 32 numbers added, and their squares."""
    a, b = v[0] - shift, v[1] - shift
    return s + (widen(v[0]) + widen(v[1])), fma(b, b, a * a)


@in_place
def _added_at(kind, x, j, shift, s):
    return _added(load_pair(kind, x, j), shift, s)


@in_place
def _moments_of_many(kind, x, n, shift):
    """The same; the squares are trees of 16 terms a lane."""
    c = splat_f32(shift)
    s, q = splat_f64(0.0), splat_f64(0.0)
    j = 0
    while j + 256 <= n:
        s, b0 = _added_at(kind, x, j, c, s)
        s, b1 = _added_at(kind, x, j + 32, c, s)
        s, b2 = _added_at(kind, x, j + 64, c, s)
        s, b3 = _added_at(kind, x, j + 96, c, s)
        b = (b0 + b1) + (b2 + b3)
        s, b0 = _added_at(kind, x, j + 128, c, s)
        s, b1 = _added_at(kind, x, j + 160, c, s)
        s, b2 = _added_at(kind, x, j + 192, c, s)
        s, b3 = _added_at(kind, x, j + 224, c, s)
        q = q + widen(b + ((b0 + b1) + (b2 + b3)))
        j += 256
    while j < n:
        s, b0 = _added(load_pair_or(kind, x, j, n - j, shift), c, s)
        q = q + widen(b0)
        j += 32
    # Every lane has as many numbers as the others, where those beyond the last one count as the shift.
    return s - splat_f64(np.float64(shift) * (j // 16)), q


@in_place
def shift_of(kind, x, n):
    """What the moments of n numbers are about."""
    if n == 0:
        return np.float32(0.0)
    if n <= _FEW:
        return load(kind, x, 0)
    v = load_pair(kind, x, 0)
    return hsum(v[0] + v[1]) * np.float32(1 / _GUESSED)


@device
def _put_in_float64(kind, x, n, shift, lanes):
    s, q = _moments_in_float64(kind, x, n, shift)
    vstore_f64(lanes, 0, s)
    vstore_f64(lanes, 16, q)


@device
def put_moments(kind, x, n, shift, lanes):
    """The lanes of sum(x - shift) and of sum((x - shift)^2), to memory."""
    if n <= _FEW:
        _put_in_float64(kind, x, n, shift, lanes)
    else:
        s, q = _moments_of_many(kind, x, n, shift)
        vstore_f64(lanes, 0, s)
        vstore_f64(lanes, 16, q)


@device
def settled_moments(kind, x, n, shift, precise, s, q):
    """The sum and the squares about the mean, from those about a shift; where that was poor, a better one, in float64.

    The sum, and not the mean: of whole numbers it is exact, and a number that equals their mean is found to.
    """
    lanes, about_mean = _lanes(), q - s * s / n
    fine = q <= _WORST_IN_FLOAT64 * about_mean
    if not precise and n > _FEW:
        fine = SMALLEST * n <= q <= LARGEST * n and q <= _WORST * about_mean
    tries = 0
    while tries < 3 and not fine:
        shift = np.float64(np.float32(shift + s / n))
        shift = shift if abs(shift) < np.inf else 0.0
        _put_in_float64(kind, x, n, np.float32(shift), lanes)
        s, q = hsum(vload_f64(lanes, 0)), hsum(vload_f64(lanes, 16))
        about_mean = q - s * s / n
        fine, tries = q <= _WORST_IN_FLOAT64 * about_mean, tries + 1
    return s + n * shift, about_mean


@device
def moments(kind, x, n):
    """The sum of n numbers and the squares about their mean, of many sets that make one: the squares too in float64."""
    s, q = _moments_about_zero(kind, x, n)
    return settled_moments(kind, x, n, 0.0, True, hsum(s), hsum(q))


@device
def merged(total, squares, count, other, other_squares, other_count):
    """The sum and the squares about the mean of two sets of numbers together."""
    distance = other / other_count - total / count
    share = count * other_count / (count + other_count)
    return total + other, squares + other_squares + distance * distance * share, count + other_count
