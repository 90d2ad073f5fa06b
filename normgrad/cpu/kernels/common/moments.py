"""Moments of consecutive elements in float64: their sum, and the sum of their squared distances from their mean (M2).

One method for all data. The squares of float32 are taken about the first element x0, and
M2 = sum((x - x0)^2) - n*(mean - x0)^2. Since x0 is one of the elements, n*(mean - x0)^2 is at most n*M2: the
subtraction loses at most log2(n + 1) of float64's 53 bits. The squares of 16-bit data are taken about 0. They have at
most 22 bits, so float64 sums 2^15 of them without a rounding unless the smallest element is less than 1/128 of the
largest; but then the mean's square is less than 3*n times the variance, and as little is lost. M2 of equal elements is
exactly 0 either way. Longer rows are taken in segments, whose moments are merged by Chan's formula.
"""

import numpy as np

from normgrad.cpu.compile.jit import device, in_place
from normgrad.cpu.fields.row_sizes import SEGMENT
from normgrad.cpu.intrinsics.memory import item_size, load
from normgrad.cpu.intrinsics.pairs import load_pair, load_pair_or
from normgrad.cpu.intrinsics.vectors import fma, hsum, splat_f64, widen


@in_place
def _added(v, shift, s, q, r):
    a, b = widen(v[0]) - shift, widen(v[1]) - shift
    return s + (a + b), fma(a, a, q), fma(b, b, r)


@in_place
def lane_moments(kind, x, n, shift):
    """sum(x - shift) and sum((x - shift)^2) of n elements, in 16 lanes."""
    centre, zero, whole = splat_f64(np.float64(shift)), splat_f64(0.0), n & ~31
    s, q, r = zero, zero, zero
    for j in range(0, whole, 32):
        s, q, r = _added(load_pair(kind, x, j), centre, s, q, r)
    if whole < n:
        s, q, r = _added(load_pair_or(kind, x, whole, n - whole, shift), centre, s, q, r)
    return s, q + r


@in_place
def about_mean(s, q, n, shift):
    """The sum and M2 of n elements, from sum(x - shift) and sum((x - shift)^2)."""
    return s + n * shift, q - s * s / n


@in_place
def shift_of(kind, x):
    """What the squares are taken about."""
    return load(kind, x, 0) if item_size(kind) == 4 else np.float32(0)


@device
def _segment_moments(kind, x, n):
    shift = shift_of(kind, x)
    s, q = lane_moments(kind, x, n, shift)
    return about_mean(hsum(s), hsum(q), n, np.float64(shift))


@device
def moments(kind, x, n, size):
    """The sum and M2 of n > 0 elements of so many bytes."""
    total, squares = _segment_moments(kind, x, min(n, SEGMENT))
    for first in range(SEGMENT, n, SEGMENT):
        count = min(n - first, SEGMENT)
        other, others = _segment_moments(kind, x + first * size, count)
        total, squares = merged(total, squares, np.float64(first), other, others, np.float64(count))
    return total, squares


@in_place
def between(part, part_count, total, count, share):
    """What a part of a set adds to the set's M2 beside its own: part_count*(its mean - the mean)^2.

    `share` is 1/(part_count*count^2). Without quotients, so that it is exactly 0 where all elements are equal.
    """
    distance = part * count - total * part_count
    return distance * distance * share


@device
def merged(total, squares, count, other, other_squares, other_count):
    """The sum and M2 of two sets of elements together (Chan, Golub and LeVeque)."""
    distance = other / other_count - total / count
    share = count * other_count / (count + other_count)
    return total + other, squares + other_squares + distance * distance * share
