"""Reductions: moments of consecutive elements, and partial sums of chunks and blocks added up.

Moments are the sum and M2, the sum of squared distances from the mean, in float64; one method for all data. The
squares of float32 are taken about the first element x0, and M2 = sum((x - x0)^2) - n*(mean - x0)^2. Since x0 is one of
the elements, n*(mean - x0)^2 is at most n*M2: the subtraction loses at most log2(n + 1) of float64's 53 bits. The
squares of 16-bit data are taken about 0. They have at most 22 bits, so float64 sums 2^15 of them without a rounding
unless the smallest element is less than 1/128 of the largest; but then the mean's square is less than 3*n times the
variance, and as little is lost. M2 of equal elements is exactly 0 either way. Longer rows are summed in segments, whose
moments are merged by the formula of Chan, Golub and LeVeque.

Partial sums have a location of their own for every chunk or block, and are added in the order of these locations: the
bits do not depend on the thread that computed one.
"""

import numpy as np

from normgrad.cpu import limits
from normgrad.cpu.compile.jit import device, inline
from normgrad.cpu.intrinsics.memory import item_size, load
from normgrad.cpu.intrinsics.pairs import load_pair, load_pair_or
from normgrad.cpu.intrinsics.vectors import fma, hsum, splat_f64, vload, vstore, widen
from normgrad.cpu.tags import F64


@inline
def _added(v, shift, s, q, r):
    a, b = widen(v[0]) - shift, widen(v[1]) - shift
    return s + (a + b), fma(a, a, q), fma(b, b, r)


@inline
def lane_moments(dtype, x, n, shift):
    """Return sum(x - shift) and sum((x - shift)^2) of n elements, in 16 lanes."""
    centre, zero, whole = splat_f64(np.float64(shift)), splat_f64(0.0), n & ~31
    s, q, r = zero, zero, zero
    for j in range(0, whole, 32):
        s, q, r = _added(load_pair(dtype, x, j), centre, s, q, r)
    if whole < n:
        s, q, r = _added(load_pair_or(dtype, x, whole, n - whole, shift), centre, s, q, r)
    return s, q + r


@inline
def about_mean(s, q, n, shift):
    """Return the sum and M2 of n elements, from sum(x - shift) and sum((x - shift)^2)."""
    return s + n * shift, q - s * s / n


@inline
def shift_of(dtype, x):
    """Return what the squares are taken about."""
    return load(dtype, x, 0) if item_size(dtype) == 4 else np.float32(0)


@device
def _segment_moments(dtype, x, n):
    shift = shift_of(dtype, x)
    s, q = lane_moments(dtype, x, n, shift)
    return about_mean(hsum(s), hsum(q), n, np.float64(shift))


@device
def moments(dtype, x, n, size):
    """Return the sum and M2 of n > 0 elements of `size` bytes."""
    total, squares = _segment_moments(dtype, x, min(n, limits.SEGMENT))
    for first in range(limits.SEGMENT, n, limits.SEGMENT):
        count = min(n - first, limits.SEGMENT)
        other, others = _segment_moments(dtype, x + first * size, count)
        total, squares = merged(total, squares, np.float64(first), other, others, np.float64(count))
    return total, squares


@inline
def between(part, part_count, total, count, share):
    """Return what a part of a set adds to the set's M2 beside its own: part_count*(its mean - the mean)^2.

    `share` is 1/(part_count*count^2). Without quotients, so that it is exactly 0 where all elements are equal.
    """
    distance = part * count - total * part_count
    return distance * distance * share


@device
def merged(total, squares, count, other, other_squares, other_count):
    """Return the sum and M2 of two sets of elements together (Chan, Golub and LeVeque)."""
    distance = other / other_count - total / count
    share = count * other_count / (count + other_count)
    return total + other, squares + other_squares + distance * distance * share


@inline
def add_pair(sums, c, low, high):
    """Add 32 float32 to sums in float64."""
    vstore(F64, sums, c, vload(F64, sums, c) + widen(low))
    vstore(F64, sums, c + 16, vload(F64, sums, c + 16) + widen(high))


@device
def sum_partials(first, count, step, pitch):
    """Add up the partial sums of 32 lanes, `count` of them `step` bytes apart, into the first ones.

    Two arrays, `pitch` lanes apart: sums of grad_out and of grad_out*x_hat, or the gradients of weight and bias.
    """
    zero, at = splat_f64(0.0), first
    a0, a1, b0, b1 = zero, zero, zero, zero
    for _ in range(count):
        a0, a1 = a0 + vload(F64, at, 0), a1 + vload(F64, at, 16)
        b0, b1 = b0 + vload(F64, at, pitch), b1 + vload(F64, at, pitch + 16)
        at += step
    vstore(F64, first, 0, a0)
    vstore(F64, first, 16, a1)
    vstore(F64, first, pitch, b0)
    vstore(F64, first, pitch + 16, b1)


@inline
def merge_partials(desc, partials, samples, lane):
    """Return the sum and M2 of 16 channels over all chunks of some samples, from the partials of each chunk."""
    pitch, size = desc.padded_channels, np.float64(samples * desc.positions)
    start, step = partials + 8 * lane, 16 * pitch
    total, squares = splat_f64(0.0), splat_f64(0.0)
    for i in range(samples * desc.chunks):
        total = total + vload(F64, start + i * step, 0)
    at = start
    for _ in range(samples):
        for chunk in range(desc.chunks):
            count = np.float64(min(desc.chunk_positions, desc.positions - chunk * desc.chunk_positions))
            share = splat_f64(1.0 / (count * size * size))
            apart = between(vload(F64, at, 0), splat_f64(count), total, splat_f64(size), share)
            squares = squares + (vload(F64, at, pitch) + apart)
            at += step
    return total, squares
