"""Mean and variance of LayerNorm's rows, in float64.

The sum goes to float64 at once, since results near 0 show every error of the mean. The squares are float32 trees about
a guess at the mean, float64 beyond; of short rows they are float64 throughout.
"""

import numpy as np

from normgrad.cpu.jit import device, in_place
from normgrad.cpu.memory import load, load_f64, stack_space, store_f64
from normgrad.cpu.pairs import load_pair, load_pair_or
from normgrad.cpu.row_sizes import TILE
from normgrad.cpu.vectors import fma, hsum, splat_f32, splat_f64, store_sums, vload_f64, vstore_f64, widen

SMALLEST, LARGEST = 2.0**-80, 2.0**100
_SHORT = 128  # columns of a row whose squares are made in float64
_GUESSED = 32  # columns whose mean is the guess at that of a longer row

_lanes = stack_space(TILE * 2 * 16 * 8)


@in_place
def _short_moments(kind, x, n, shift):
    """The lanes of sum(x - shift) and of sum((x - shift)^2)."""
    centre = splat_f64(np.float64(shift))
    s, q = splat_f64(0.0), splat_f64(0.0)
    for j in range(0, n, 32):
        v = load_pair_or(kind, x, j, n - j, shift)
        a, b = widen(v[0]) - centre, widen(v[1]) - centre
        s, q = s + (a + b), fma(b, b, fma(a, a, q))
    return s, q


@in_place
def _moments(v, shift, s):
    """The sum with 32 columns added, and their squares."""
    a, b = v[0] - shift, v[1] - shift
    return s + (widen(v[0]) + widen(v[1])), fma(b, b, a * a)


@in_place
def _moments_at(kind, x, j, shift, s):
    return _moments(load_pair(kind, x, j), shift, s)


@in_place
def _long_moments(kind, x, n, shift):
    """The same; the squares are trees of 16 terms a lane."""
    c = splat_f32(shift)
    s, q = splat_f64(0.0), splat_f64(0.0)
    j = 0
    while j + 256 <= n:
        s, b0 = _moments_at(kind, x, j, c, s)
        s, b1 = _moments_at(kind, x, j + 32, c, s)
        s, b2 = _moments_at(kind, x, j + 64, c, s)
        s, b3 = _moments_at(kind, x, j + 96, c, s)
        b = (b0 + b1) + (b2 + b3)
        s, b0 = _moments_at(kind, x, j + 128, c, s)
        s, b1 = _moments_at(kind, x, j + 160, c, s)
        s, b2 = _moments_at(kind, x, j + 192, c, s)
        s, b3 = _moments_at(kind, x, j + 224, c, s)
        q = q + widen(b + ((b0 + b1) + (b2 + b3)))
        j += 256
    while j < n:
        s, b0 = _moments(load_pair_or(kind, x, j, n - j, shift), c, s)
        q = q + widen(b0)
        j += 32
    # Every lane has as many columns as the others, where those beyond the last one count as the shift.
    return s - splat_f64(np.float64(shift) * (j // 16)), q


@in_place
def _shift(kind, x, n):
    """What a row's moments are about."""
    if n <= _SHORT:
        return load(kind, x, 0)
    v = load_pair(kind, x, 0)
    return hsum(v[0] + v[1]) * np.float32(1 / _GUESSED)


@device
def _row_moments(kind, x, n, shift, lanes):
    """A row's sum and squares about a shift, in lanes."""
    s, q = _short_moments(kind, x, n, shift) if n <= _SHORT else _long_moments(kind, x, n, shift)
    vstore_f64(lanes, 0, s)
    vstore_f64(lanes, 16, q)


@device
def sum_rows(kind, x, pitch, rows, n, sums):
    """Moments of up to TILE rows: the sums of all, their squares, and what they are about."""
    lanes = _lanes()
    for r in range(rows):
        shift = _shift(kind, x + r * pitch, n)
        store_f64(sums, 2 * TILE + r, np.float64(shift))
        _row_moments(kind, x + r * pitch, n, shift, lanes + 256 * r)
    for k in range(0, 32, 16):  # of rows that are not there nothing is read
        a, b, c, d = (
            vload_f64(lanes, k),
            vload_f64(lanes, k + 32),
            vload_f64(lanes, k + 64),
            vload_f64(lanes, k + 96),
        )
        store_sums(sums + 2 * k, a, b, c, d)


@device
def _exact_statistics(kind, x, n):
    total = 0.0
    for j in range(n):
        total += load(kind, x, j)
    mean = total / n
    squares = 0.0
    for j in range(n):
        d = load(kind, x, j) - mean
        squares += d * d
    return mean, squares / n


@device
def row_statistics(kind, x, n, sums, r):
    """(mean, variance) of a row of a tile; where the guess was poor, from a better one."""
    s, q, shift = load_f64(sums, r), load_f64(sums, TILE + r), load_f64(sums, 2 * TILE + r)
    per_column, worst = 1.0 / n, 2.0**24 if n <= _SHORT else 2.0
    for _ in range(3):
        s, q = s * per_column, q * per_column
        variance = q - s * s
        if not (SMALLEST <= q <= LARGEST):
            break
        if q <= worst * variance:
            return shift + s, variance
        shift = np.float64(np.float32(shift + s))
        lanes = _lanes()
        _row_moments(kind, x, n, np.float32(shift), lanes)
        s, q = hsum(vload_f64(lanes, 0)), hsum(vload_f64(lanes, 16))
    return _exact_statistics(kind, x, n)
