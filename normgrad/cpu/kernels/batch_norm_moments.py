"""BatchNorm: the sum and M2 (squared distances from the mean) of a chunk's channels.

One method for all data: float32 sequences of 4 terms a lane about a shift, float64 beyond. float32 and float16 are read
twice while they are in a cache: first a quarter of the elements, whose mean is the shift, then all of them about it.
With the mean of k of n elements as the shift, the squares about it are at most n/k times M2, so that the difference
that yields M2 loses about two bits whatever the data. Equal elements have a shift of their own value and an M2 of
exactly 0.

bfloat16 needs no shift: its squares have 16 bits, and float32 sums 16 of them without a rounding unless the largest
element is more than 11 times the smallest; but then M2 of these 16 is not much less than their squares.
"""

import numpy as np

from normgrad.cpu.compile.jit import device, inline
from normgrad.cpu.intrinsics.memory import item_size, load, stack_space, store, store_f64
from normgrad.cpu.intrinsics.pairs import is_bfloat16, load_pair, load_pair_or
from normgrad.cpu.intrinsics.vectors import fma, hsum, splat_f32, splat_f64, vload, vload_f64, vstore, vstore_f64, widen
from normgrad.cpu.kernels.channel.access import address_of, partials_of, positions_of
from normgrad.cpu.kernels.channel.columns import (
    add_pair,
    clear_sums,
    finish_moments,
    prefetch_channels,
    sum_moments,
)
from normgrad.cpu.kernels.common.reduce import about_mean, moments
from normgrad.cpu.kernels.common.results import load_some
from normgrad.cpu.limits import COLUMN_RUN, FLOAT64_COLUMN_TERMS, MOMENT_ELEMENTS, MOMENT_ROWS
from normgrad.cpu.tags import F32

_lanes, _shifts = stack_space(MOMENT_ROWS * 2 * 16 * 8), stack_space(MOMENT_ROWS * 4)


@inline
def _sum_beginning(dtype, x, pairs):
    """Sum x - x0 over a row's first 32*pairs elements, in 16 lanes; x0 is the first element."""
    first, s, t = splat_f32(load(dtype, x, 0)), splat_f32(np.float32(0)), splat_f32(np.float32(0))
    for i in range(0, 32 * pairs, 32):
        v = load_pair(dtype, x, i)
        s, t = s + (v[0] - first), t + (v[1] - first)
    return s + t


@inline
def _add_terms(v, shift, half, s):
    """Add x - shift and its square to s = (sum, sum/2, squares, squares).

    The second sum is halved, by FMA, since adders have more to do here than multipliers.
    """
    a, b = v[0] - shift, v[1] - shift
    return s[0] + a, fma(b, half, s[1]), fma(a, a, s[2]), fma(b, b, s[3])


@inline
def _add_sums(s, q, a, b):
    """Add the sums of four sequences to those in float64."""
    halved = a[1] + b[1]
    s = s + widen((a[0] + b[0]) + (halved + halved))
    return s, q + widen((a[2] + a[3]) + (b[2] + b[3]))


@inline
def _row_moments(dtype, x, count, shift):
    """Return sum(x - shift) and sum((x - shift)^2) in 16 lanes: up to 4 terms in float32, float64 beyond."""
    centre, half, zero = splat_f32(shift), splat_f32(np.float32(0.5)), splat_f32(np.float32(0))
    s, q, nothing, i = splat_f64(0.0), splat_f64(0.0), (zero, zero, zero, zero), 0
    while i + 256 <= count:
        a, b = nothing, nothing
        for k in range(0, 256, 64):
            a = _add_terms(load_pair(dtype, x, i + k), centre, half, a)
            b = _add_terms(load_pair(dtype, x, i + k + 32), centre, half, b)
        s, q = _add_sums(s, q, a, b)
        i += 256
    if i == count:
        return s, q
    a, b = nothing, nothing
    while i + 64 <= count:
        a = _add_terms(load_pair(dtype, x, i), centre, half, a)
        b = _add_terms(load_pair(dtype, x, i + 32), centre, half, b)
        i += 64
    if i + 32 <= count:
        a = _add_terms(load_pair(dtype, x, i), centre, half, a)
        i += 32
    if i < count:
        b = _add_terms(load_pair_or(dtype, x, i, count - i, shift), centre, half, b)
    return _add_sums(s, q, a, b)


@inline
def _long_rows(dtype, rows, count, x, step, sums, squares):
    """Compute the moments of up to MOMENT_ROWS rows; their lanes are added up together, so that none waits alone."""
    lanes, shifts, pairs = _lanes(), _shifts(), count // 128 + 1
    share = np.float32(1.0 / (32 * pairs))
    if not is_bfloat16(dtype):
        for r in range(rows):
            vstore(F32, lanes, 16 * r, _sum_beginning(dtype, x + r * step, pairs))
        for r in range(rows):
            store(F32, shifts, r, load(dtype, x + r * step, 0) + share * hsum(vload(F32, lanes, 16 * r)))
    for r in range(rows):
        shift = np.float32(0) if is_bfloat16(dtype) else load(F32, shifts, r)
        s, q = _row_moments(dtype, x + r * step, count, shift)
        vstore_f64(lanes, 32 * r, s)
        vstore_f64(lanes, 32 * r + 16, q)
    for r in range(rows):
        s, q = hsum(vload_f64(lanes, 32 * r)), hsum(vload_f64(lanes, 32 * r + 16))
        shift = np.float32(0) if is_bfloat16(dtype) else load(F32, shifts, r)
        total, about = about_mean(s, q, count, np.float64(shift))
        store_f64(sums, r, total)
        store_f64(squares, r, about)


@device
def moments_rows(dtype, desc, chunk):
    """Compute the sum and M2 of every row of a chunk, to its partials."""
    n, first, last, part = chunk
    position, count, size = part * desc.chunk_positions, positions_of(desc, part), item_size(dtype)
    x, step = address_of(desc.input, size, n, first, position), size * desc.input.channel_stride
    sums = partials_of(desc, n, part)
    squares = sums + 8 * desc.padded_channels
    if count >= FLOAT64_COLUMN_TERMS:
        groups = max((last - first + MOMENT_ROWS - 1) // MOMENT_ROWS, (last - first) * count // MOMENT_ELEMENTS)
        at_once = (last - first + groups - 1) // groups
        for c in range(first, last, at_once):
            rows = min(at_once, last - c)
            _long_rows(dtype, rows, count, x + (c - first) * step, step, sums + 8 * c, squares + 8 * c)
        return
    for c in range(first, last):
        total, about = moments(dtype, x + (c - first) * step, count, size)
        store_f64(sums, c, total)
        store_f64(squares, c, about)


@inline
def _shift_columns(dtype, x, step, positions, shifts, count):
    """Store the mean of some positions as the shifts of 32 channels."""
    first, zero = load_some(dtype, x, 0, count), splat_f32(np.float32(0))
    s0, s1 = zero, zero
    for r in range(1, positions):
        v = load_some(dtype, x + r * step, 0, count)
        s0, s1 = s0 + (v[0] - first[0]), s1 + (v[1] - first[1])
    share = splat_f32(np.float32(1.0 / positions))
    vstore(F32, shifts, 0, fma(s0, share, first[0]))
    vstore(F32, shifts, 16, fma(s1, share, first[1]))


@inline
def _channel_shifts(dtype, shifts):
    if is_bfloat16(dtype):
        return splat_f32(np.float32(0)), splat_f32(np.float32(0))
    return vload(F32, shifts, 0), vload(F32, shifts, 16)


@inline
def _add_place(dtype, x, ahead, count, m, s):
    prefetch_channels(dtype, x + ahead)
    v = load_some(dtype, x, 0, count)
    a, b = v[0] - m[0], v[1] - m[1]
    return s[0] + a, s[1] + b, fma(a, a, s[2]), fma(b, b, s[3])


@inline
def _add_columns(dtype, x, step, positions, shifts, sums, squares, count):
    """Add x - shift and its square at some positions to the sums of 32 channels: four sequences of terms in float32."""
    m, zero, ahead = _channel_shifts(dtype, shifts), splat_f32(np.float32(0)), COLUMN_RUN * step
    a = b = c = d = (zero, zero, zero, zero)
    for _ in range(positions // 4):
        a = _add_place(dtype, x, ahead, count, m, a)
        b = _add_place(dtype, x + step, ahead, count, m, b)
        c = _add_place(dtype, x + 2 * step, ahead, count, m, c)
        d = _add_place(dtype, x + 3 * step, ahead, count, m, d)
        x += 4 * step
    for _ in range(positions % 4):
        a = _add_place(dtype, x, ahead, count, m, a)
        x += step
    add_pair(sums, 0, (a[0] + b[0]) + (c[0] + d[0]), (a[1] + b[1]) + (c[1] + d[1]))
    add_pair(squares, 0, (a[2] + b[2]) + (c[2] + d[2]), (a[3] + b[3]) + (c[3] + d[3]))


@inline
def _finish_columns(dtype, desc, count, shifts, sums, squares):
    """Turn the moments of a chunk about the shifts into the sums and M2."""
    for c in range(0, desc.padded_channels, 32):
        m, terms = _channel_shifts(dtype, shifts + 4 * c), splat_f64(np.float64(count))
        total, about = about_mean(vload_f64(sums, c), vload_f64(squares, c), terms, widen(m[0]))
        vstore_f64(sums, c, total)
        vstore_f64(squares, c, about)
        total, about = about_mean(vload_f64(sums, c + 16), vload_f64(squares, c + 16), terms, widen(m[1]))
        vstore_f64(sums, c + 16, total)
        vstore_f64(squares, c + 16, about)


@device
def moments_columns(dtype, desc, n, chunk):
    """Compute the sum and M2 of every channel of a chunk of columns, to its partials."""
    clear_sums(desc, n, chunk)
    if desc.samples * desc.positions <= FLOAT64_COLUMN_TERMS:
        sum_moments(dtype, desc, n, chunk, 0, positions_of(desc, chunk))
        finish_moments(dtype, desc, n, chunk)
        return
    size, channels, count, pitch = item_size(dtype), desc.channels, positions_of(desc, chunk), desc.padded_channels
    step, sums, whole, left = (
        size * desc.input.position_stride,
        partials_of(desc, n, chunk),
        channels & ~31,
        channels & 31,
    )
    shifts = desc.coefficients + 4 * (n * desc.chunks + chunk) * pitch
    squares, x = sums + 8 * pitch, address_of(desc.input, size, n, 0, chunk * desc.chunk_positions)
    if not is_bfloat16(dtype):
        for c in range(0, whole, 32):
            _shift_columns(dtype, x + c * size, step, (count + 3) // 4, shifts + 4 * c, 32)
        if left > 0:
            _shift_columns(dtype, x + whole * size, step, (count + 3) // 4, shifts + 4 * whole, left)
    for first in range(0, count, COLUMN_RUN):
        positions, row = min(COLUMN_RUN, count - first), x + first * step
        for c in range(0, whole, 32):
            m, s, q = shifts + 4 * c, sums + 8 * c, squares + 8 * c
            _add_columns(dtype, row + c * size, step, positions, m, s, q, 32)
        if left > 0:
            m, s, q = shifts + 4 * whole, sums + 8 * whole, squares + 8 * whole
            _add_columns(dtype, row + whole * size, step, positions, m, s, q, left)
    _finish_columns(dtype, desc, count, shifts, sums, squares)
