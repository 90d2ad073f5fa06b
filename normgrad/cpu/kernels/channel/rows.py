"""GroupNorm and BatchNorm in rows: a chunk has positions of one channel of one sample, contiguous in memory.

A vector holds positions, and a channel's coefficients are the same in all its lanes. Chunks of short rows have several
channels. A chunk's sums go to its partials, one of each kind per channel.
"""

import numpy as np

from normgrad.cpu import limits
from normgrad.cpu.compile.jit import device, inline
from normgrad.cpu.intrinsics.memory import item_size, store
from normgrad.cpu.intrinsics.pairs import load_pair, load_pair_first, prefetch_pair
from normgrad.cpu.intrinsics.vectors import fma, hsum, splat_f32, splat_f64, store_sums, widen
from normgrad.cpu.kernels.channel.access import address_of, positions_of
from normgrad.cpu.kernels.channel.coefficients import deviation, four, six, splat, store_gradients, store_outputs
from normgrad.cpu.kernels.common.reduce import merged, moments
from normgrad.cpu.kernels.common.tensors import Cursor, for_pairs, is_streamed, moved
from normgrad.cpu.tags import F64

_TOGETHER = 4  # rows whose lanes are added up together


@inline
def cursor(desc, size, chunk):
    """Return where a chunk begins."""
    position = chunk.part * desc.chunk_positions
    return Cursor(
        address_of(desc.grad_out, size, chunk.n, chunk.first, position),
        size * desc.grad_out.channel_stride,
        address_of(desc.input, size, chunk.n, chunk.first, position),
        size * desc.input.channel_stride,
        address_of(desc.result, size, chunk.n, chunk.first, position),
        size * desc.result.channel_stride,
    )


@inline
def _compute_rows(dtype, desc, chunk, coefficients, store_some):
    at, count = cursor(desc, item_size(dtype), chunk), positions_of(desc, chunk.part)
    for c in range(chunk.first, chunk.last):
        k = coefficients(splat, chunk.coefficients, desc.padded_channels, c)
        stream = is_streamed(desc.is_large, at.result, count * item_size(dtype))
        for_pairs(count, store_some, dtype, at, (k, k), stream)
        at = moved(at, 1)


@device
def compute_gradients(dtype, desc, chunk):
    """Compute grad_input of a chunk."""
    _compute_rows(dtype, desc, chunk, six, store_gradients)


@device
def compute_outputs(dtype, desc, chunk):
    """Compute the output of a chunk."""
    _compute_rows(dtype, desc, chunk, four, store_outputs)


@device
def compute_moments(dtype, desc, chunk):
    """Compute the sum and M2 of all elements of each group in a chunk, to the partials of the group's first channel."""
    count, size, sums = positions_of(desc, chunk.part), item_size(dtype), chunk.partials
    at = cursor(desc, size, chunk)
    x, step = at.input, at.input_step
    first = chunk.first
    while first < chunk.last:
        rows = min(desc.group_channels, chunk.last - first)
        done = rows if step == size * count else 1  # contiguous rows are one
        total, squares = moments(dtype, x, done * count, size)
        for row in range(done, rows):
            other, others = moments(dtype, x + row * step, count, size)
            total, squares = merged(total, squares, np.float64(row * count), other, others, np.float64(count))
        store(F64, sums, first, total)
        store(F64, sums, first + desc.padded_channels, squares)
        x += rows * step
        first += rows


@inline
def _terms(dtype, at, i, scale, shift):
    """Return g and g*deviation of 32 elements, added to 16 lanes."""
    g, v = load_pair(dtype, at.grad_out, i), load_pair(dtype, at.input, i)
    return g[0] + g[1], fma(g[1], deviation(v[1], scale, shift), g[0] * deviation(v[0], scale, shift))


@inline
def _added(g0, g1, x0, x1, scale, shift, sums):
    """Add g and g*deviation of 32 elements to sums in 16 lanes, all in float32 or all in float64."""
    total, total_x = sums
    return total + (g0 + g1), fma(g1, deviation(x1, scale, shift), fma(g0, deviation(x0, scale, shift), total_x))


@inline
def _float64_sums(dtype, at, first, count, scale, shift, sums):
    """Add the terms of the elements from `first` on to sums, all in float64."""
    scale, shift = widen(scale), widen(shift)
    for i in range(first, count, 32):
        g, v = load_pair_first(dtype, at.grad_out, i, count - i), load_pair_first(dtype, at.input, i, count - i)
        sums = _added(widen(g[0]), widen(g[1]), widen(v[0]), widen(v[1]), scale, shift, sums)
    return sums


@inline
def _float32_sums(dtype, at, first, count, scale, shift):
    """Return sum(g) and sum(g*deviation) of the elements from `first` on, in 16 lanes of at most 8 terms each."""
    sums, whole, left = (splat_f32(np.float32(0)), splat_f32(np.float32(0))), count & ~31, count & 31
    for i in range(first, whole, 32):
        prefetch_pair(dtype, at.grad_out + limits.PREFETCH_BYTES, i)
        prefetch_pair(dtype, at.input + limits.PREFETCH_BYTES, i)
        g, v = load_pair(dtype, at.grad_out, i), load_pair(dtype, at.input, i)
        sums = _added(g[0], g[1], v[0], v[1], scale, shift, sums)
    if left > 0:
        prefetch_pair(dtype, at.grad_out + limits.PREFETCH_BYTES, whole)
        prefetch_pair(dtype, at.input + limits.PREFETCH_BYTES, whole)
        g, v = load_pair_first(dtype, at.grad_out, whole, left), load_pair_first(dtype, at.input, whole, left)
        sums = _added(g[0], g[1], v[0], v[1], scale, shift, sums)
    return widen(sums[0]), widen(sums[1])


@inline
def _lane_sums(dtype, at, count, scale, shift, in_float64):
    """Return sum(g) and sum(g*deviation) in 16 lanes: float32 trees of 8 terms a lane, float64 beyond."""
    total, total_x, i = splat_f64(0.0), splat_f64(0.0), 0
    while i + 128 <= count:
        a0, b0 = _terms(dtype, at, i, scale, shift)
        a1, b1 = _terms(dtype, at, i + 32, scale, shift)
        a2, b2 = _terms(dtype, at, i + 64, scale, shift)
        a3, b3 = _terms(dtype, at, i + 96, scale, shift)
        total = total + widen((a0 + a1) + (a2 + a3))
        total_x = total_x + widen((b0 + b1) + (b2 + b3))
        i += 128
    if i == count:
        return total, total_x
    if in_float64:
        return _float64_sums(dtype, at, i, count, scale, shift, (total, total_x))
    a0, b0 = _float32_sums(dtype, at, i, count, scale, shift)
    return total + a0, total_x + b0


@inline
def _four_short_rows(dtype, at, count, scales, shifts, sums, sums_x):
    """Sum four short rows, to memory; their lanes are added up together."""
    a0, b0 = _float32_sums(dtype, at, 0, count, splat(scales, 0), splat(shifts, 0))
    a1, b1 = _float32_sums(dtype, moved(at, 1), 0, count, splat(scales, 1), splat(shifts, 1))
    a2, b2 = _float32_sums(dtype, moved(at, 2), 0, count, splat(scales, 2), splat(shifts, 2))
    a3, b3 = _float32_sums(dtype, moved(at, 3), 0, count, splat(scales, 3), splat(shifts, 3))
    store_sums(sums, a0, a1, a2, a3)
    store_sums(sums_x, b0, b1, b2, b3)


@device
def compute_sums(dtype, desc, chunk, in_float64):
    """Sum grad_out, and grad_out*deviation, over the rows of a chunk, to its partials.

    The first two arrays of the chunk's coefficients are scales and shifts.
    """
    at, count = cursor(desc, item_size(dtype), chunk), positions_of(desc, chunk.part)
    scales, sums = chunk.coefficients, chunk.partials
    shifts, sums_x = scales + 4 * desc.padded_channels, sums + 8 * desc.padded_channels
    c = chunk.first
    while count <= limits.SHORT_ROW and not in_float64 and c + _TOGETHER <= chunk.last:
        _four_short_rows(dtype, at, count, scales + 4 * c, shifts + 4 * c, sums + 8 * c, sums_x + 8 * c)
        at = moved(at, _TOGETHER)
        c += _TOGETHER
    while c < chunk.last:
        total, total_x = _lane_sums(dtype, at, count, splat(scales, c), splat(shifts, c), in_float64)
        store(F64, sums, c, hsum(total))
        store(F64, sums_x, c, hsum(total_x))
        at = moved(at, 1)
        c += 1
