"""GroupNorm and BatchNorm in columns: a chunk has some positions of one sample with all channels, which are contiguous.

A vector holds channels, in the lane order of pairs; so do the partials and the coefficients. 32 channels and a run of
positions are processed at a time, so that coefficients and sums stay in registers.
"""

import numpy as np

from normgrad.cpu import limits
from normgrad.cpu.compile.jit import device, inline
from normgrad.cpu.intrinsics.memory import item_size, prefetch_l2, stack_space, store
from normgrad.cpu.intrinsics.vectors import fma, splat_f32, splat_f64, vload, vstore, widen
from normgrad.cpu.kernels.channel.access import address_of, partials_of, positions_of
from normgrad.cpu.kernels.channel.coefficients import deviation, gradient, load_four, load_six, output
from normgrad.cpu.kernels.common.reduce import about_mean, moments
from normgrad.cpu.kernels.common.tensors import Cursor, load_some, moved, store_result
from normgrad.cpu.tags import F32, F64

_SUM_RUN = 2  # positions of all channels that are summed at a time
_sums_of_run = stack_space(2 * limits.CHANNEL_BLOCK * 4)


@inline
def prefetch_channels(dtype, address):
    """Prefetch 32 channels into the L2 cache."""
    prefetch_l2(address)
    if item_size(dtype) == 4:
        prefetch_l2(address + 64)


@inline
def for_channels(channels, process, *args):
    """Call process(*args, c, count) for every 32 channels from c on. Only of the last ones are there fewer.

    For the others the count is a constant, so that loads and stores have no mask.
    """
    whole = channels & ~31
    for c in range(0, whole, 32):
        process(*args, c, 32)
    if whole < channels:
        process(*args, whole, channels - whole)


@inline
def add_pair(sums, c, low, high):
    """Add 32 float32 to sums in float64."""
    vstore(F64, sums, c, vload(F64, sums, c) + widen(low))
    vstore(F64, sums, c + 16, vload(F64, sums, c + 16) + widen(high))


@inline
def _cursor(desc, size, n, position):
    return Cursor(
        address_of(desc.grad_out, size, n, 0, position),
        size * desc.grad_out.position_stride,
        address_of(desc.input, size, n, 0, position),
        size * desc.input.position_stride,
        address_of(desc.result, size, n, 0, position),
        size * desc.result.position_stride,
    )


@inline
def _beside(at, size, channels):
    """Go so many channels on, at the same position."""
    d = size * channels
    return Cursor(at.grad_out + d, at.grad_out_step, at.input + d, at.input_step, at.result + d, at.result_step)


@device
def clear_sums(desc, n, chunk):
    sums = partials_of(desc, n, chunk)
    for c in range(0, 2 * desc.padded_channels, 16):
        vstore(F64, sums, c, splat_f64(0.0))


# Sums of gradients.


@inline
def _add_terms(dtype, at, ahead, count, scale, shift, s):
    """Add grad_out and grad_out*deviation of 32 channels at a position to s, both in pairs."""
    prefetch_channels(dtype, at.grad_out + ahead * at.grad_out_step)
    prefetch_channels(dtype, at.input + ahead * at.input_step)
    g, v = load_some(dtype, at.grad_out, 0, count), load_some(dtype, at.input, 0, count)
    x0, x1 = deviation(v[0], scale[0], shift[0]), deviation(v[1], scale[1], shift[1])
    return s[0] + g[0], s[1] + g[1], fma(g[0], x0, s[2]), fma(g[1], x1, s[3])


@inline
def _sum_columns(dtype, at, positions, sums, pitch, coefficients, c, count):
    """Sum 32 channels over up to 16 positions: two sequences of up to 8 terms in float32, float64 beyond."""
    at = _beside(at, item_size(dtype), c)
    scale, zero = (vload(F32, coefficients, c), vload(F32, coefficients, c + 16)), splat_f32(np.float32(0))
    shift = vload(F32, coefficients, pitch + c), vload(F32, coefficients, pitch + c + 16)
    s, t = (zero, zero, zero, zero), (zero, zero, zero, zero)
    for _ in range(positions // 2):
        s = _add_terms(dtype, at, limits.COLUMN_RUN, count, scale, shift, s)
        t = _add_terms(dtype, moved(at, 1), limits.COLUMN_RUN, count, scale, shift, t)
        at = moved(at, 2)
    if positions % 2:
        s = _add_terms(dtype, at, limits.COLUMN_RUN, count, scale, shift, s)
    add_pair(sums, c, s[0] + t[0], s[1] + t[1])
    add_pair(sums, pitch + c, s[2] + t[2], s[3] + t[3])


@device
def add_sums(dtype, desc, n, chunk, first, last, coefficients):
    """Add grad_out, and grad_out*deviation, at positions [first, last) of a chunk to its partials."""
    size, begin = item_size(dtype), chunk * desc.chunk_positions
    sums, pitch = partials_of(desc, n, chunk), desc.padded_channels
    for start in range(first, last, limits.COLUMN_RUN):
        positions, at = min(limits.COLUMN_RUN, last - start), _cursor(desc, size, n, begin + start)
        for_channels(desc.channels, _sum_columns, dtype, at, positions, sums, pitch, coefficients)


@inline
def _sum_positions(at, positions, run_sums, shifts, c, count):
    """Add the terms of up to _SUM_RUN positions to the float32 sums of 32 channels."""
    at, sums = _beside(at, 4, c), run_sums + 8 * c
    one, zero = splat_f32(np.float32(1)), splat_f32(np.float32(0))
    shift, s = (vload(F32, shifts, c), vload(F32, shifts, c + 16)), (zero, zero, zero, zero)
    for _ in range(positions):
        s = _add_terms(F32, at, limits.PREFETCH_POSITIONS, count, (one, one), shift, s)
        at = moved(at, 1)
    vstore(F32, sums, 0, vload(F32, sums, 0) + s[0])
    vstore(F32, sums, 16, vload(F32, sums, 16) + s[1])
    vstore(F32, sums, 32, vload(F32, sums, 32) + s[2])
    vstore(F32, sums, 48, vload(F32, sums, 48) + s[3])


@inline
def _flush_sums(run_sums, sums, sums_x, channels):
    """Add the float32 sums of some channels to those in float64, and clear them."""
    for c in range(0, channels, 32):
        at = run_sums + 8 * c
        add_pair(sums, c, vload(F32, at, 0), vload(F32, at, 16))
        add_pair(sums_x, c, vload(F32, at, 32), vload(F32, at, 48))
        for i in range(0, 64, 16):
            vstore(F32, at, i, splat_f32(np.float32(0)))


@device
def _sum_block(at, positions, sums, sums_x, shifts, channels):
    """Sum some channels over positions: COLUMN_RUN of them in float32, float64 beyond."""
    run_sums = _sums_of_run()
    for i in range(0, 2 * limits.CHANNEL_BLOCK, 16):
        vstore(F32, run_sums, i, splat_f32(np.float32(0)))
    first = 0
    while first < positions:
        some = min(_SUM_RUN, positions - first)
        for_channels(channels, _sum_positions, at, some, run_sums, shifts)
        at, first = moved(at, some), first + some
        if first % limits.COLUMN_RUN == 0 or first == positions:
            _flush_sums(run_sums, sums, sums_x, channels)


@device
def sum_all_channels(desc, n, chunk, shifts):
    """Add grad_out, and grad_out*(x - mean), of a chunk of float32 to its partials; the shifts are the negative means.

    It goes through memory in order, two positions at a time. COLUMN_RUN positions of 32 channels would be cache lines
    some kB apart, which share few sets of the L1 cache.
    """
    sums, position, channels = partials_of(desc, n, chunk), chunk * desc.chunk_positions, desc.channels
    sums_x, positions = sums + 8 * desc.padded_channels, positions_of(desc, chunk)
    for c in range(0, channels, limits.CHANNEL_BLOCK):
        at, some = _beside(_cursor(desc, 4, n, position), 4, c), min(limits.CHANNEL_BLOCK, channels - c)
        _sum_block(at, positions, sums + 8 * c, sums_x + 8 * c, shifts + 4 * c, some)


# Moments.


@inline
def _add_moments(v, m, s, q):
    a = widen(v) - widen(m)
    return s + a, fma(a, a, q)


@device
def add_moments(dtype, desc, n, chunk, first, last):
    """Add x - shift and its square at positions of a chunk to its partials; the shift is the chunk's first position."""
    size, channels, position = item_size(dtype), desc.channels, chunk * desc.chunk_positions
    sums = partials_of(desc, n, chunk)
    squares = sums + 8 * desc.padded_channels
    step, shift = size * desc.input.position_stride, address_of(desc.input, size, n, 0, position)
    x = address_of(desc.input, size, n, 0, position + first)
    for c in range(0, channels, 32):
        m = load_some(dtype, shift, c, min(32, channels - c))
        s0, s1 = vload(F64, sums, c), vload(F64, sums, c + 16)
        q0, q1 = vload(F64, squares, c), vload(F64, squares, c + 16)
        for r in range(last - first):
            prefetch_channels(dtype, x + (r + limits.COLUMN_RUN) * step + c * size)
            v = load_some(dtype, x + r * step, c, min(32, channels - c))
            s0, q0 = _add_moments(v[0], m[0], s0, q0)
            s1, q1 = _add_moments(v[1], m[1], s1, q1)
        vstore(F64, sums, c, s0)
        vstore(F64, sums, c + 16, s1)
        vstore(F64, squares, c, q0)
        vstore(F64, squares, c + 16, q1)


@device
def finish_moments(dtype, desc, n, chunk):
    """Turn the moments of a chunk about its first position into the sum and M2."""
    size, channels, count = item_size(dtype), desc.channels, splat_f64(np.float64(positions_of(desc, chunk)))
    sums = partials_of(desc, n, chunk)
    squares = sums + 8 * desc.padded_channels
    first = address_of(desc.input, size, n, 0, chunk * desc.chunk_positions)
    for c in range(0, channels, 32):
        shift = load_some(dtype, first, c, min(32, channels - c))
        for half in range(2):
            at = c + 16 * half
            s, q = vload(F64, sums, at), vload(F64, squares, at)
            s, q = about_mean(s, q, count, widen(shift[0] if half == 0 else shift[1]))
            vstore(F64, sums, at, s)
            vstore(F64, squares, at, q)


@device
def contiguous_moments(dtype, desc, n, chunk):
    """Compute the sum and M2 of all elements of a chunk, to the partials of the first channel."""
    size, partials = item_size(dtype), partials_of(desc, n, chunk)
    x = address_of(desc.input, size, n, 0, chunk * desc.chunk_positions)
    total, squares = moments(dtype, x, positions_of(desc, chunk) * desc.channels, size)
    store(F64, partials, 0, total)
    store(F64, partials, desc.padded_channels, squares)


# Results.


@inline
def _streams(desc, at):
    """Return whether results are stored past the caches."""
    return desc.is_large != 0 and (at.result | at.result_step) % 64 == 0


@inline
def _prefetch_result(dtype, desc, at, stream):
    """Prefetch the cache lines of a large result that are stored through the caches."""
    if desc.is_large != 0 and not stream:
        prefetch_channels(dtype, at.result + limits.COLUMN_RUN * at.result_step)


@inline
def _gradient_columns(dtype, desc, at, positions, coefficients, stream, c, count):
    """Compute grad_input of 32 channels at some positions."""
    at, pitch = _beside(at, item_size(dtype), c), desc.padded_channels
    k = load_six(coefficients, pitch, c), load_six(coefficients, pitch, c + 16)  # of either half of the channels
    for _ in range(positions):
        prefetch_channels(dtype, at.grad_out + limits.COLUMN_RUN * at.grad_out_step)
        prefetch_channels(dtype, at.input + limits.COLUMN_RUN * at.input_step)
        _prefetch_result(dtype, desc, at, stream)
        g, v = load_some(dtype, at.grad_out, 0, count), load_some(dtype, at.input, 0, count)
        store_result(dtype, at.result, 0, gradient(g[0], v[0], k[0]), gradient(g[1], v[1], k[1]), count, stream)
        at = moved(at, 1)


@device
def compute_gradients(dtype, desc, n, chunk, first, last, coefficients):
    """Compute grad_input at positions [first, last) of a chunk."""
    size, position = item_size(dtype), chunk * desc.chunk_positions
    run = limits.OUTPUT_RUN if size * desc.input.position_stride % limits.CONFLICTING_STRIDE == 0 else limits.COLUMN_RUN
    for start in range(position + first, position + last, run):
        at, positions = _cursor(desc, size, n, start), min(run, position + last - start)
        for_channels(desc.channels, _gradient_columns, dtype, desc, at, positions, coefficients, _streams(desc, at))


@inline
def _output_columns(dtype, desc, at, positions, coefficients, stream, c, count):
    """Compute the output of 32 channels at some positions."""
    at, pitch = _beside(at, item_size(dtype), c), desc.padded_channels
    k = load_four(coefficients, pitch, c), load_four(coefficients, pitch, c + 16)  # of either half of the channels
    for _ in range(positions):
        if item_size(dtype) == 2:
            prefetch_channels(dtype, at.input + limits.PREFETCH_POSITIONS * at.input_step)
        _prefetch_result(dtype, desc, at, stream)
        v = load_some(dtype, at.input, 0, count)
        store_result(dtype, at.result, 0, output(v[0], k[0]), output(v[1], k[1]), count, stream)
        at = moved(at, 1)


@device
def compute_outputs(dtype, desc, n, chunk, first, last, coefficients):
    """Compute the output at positions [first, last) of a chunk."""
    size, channels, whole = item_size(dtype), desc.channels, desc.channels & ~31
    at = _cursor(desc, size, n, chunk * desc.chunk_positions + first)
    stream = _streams(desc, at)
    one_by_one = size == 4 and channels > limits.POSITIONWISE_CHANNELS
    while first < last:
        positions = 1 if one_by_one else min(limits.OUTPUT_RUN, last - first)
        for c in range(0, whole, 32):
            if one_by_one:  # a constant, which makes coefficients operands in memory
                _output_columns(dtype, desc, at, 1, coefficients, stream, c, 32)
            else:
                _output_columns(dtype, desc, at, positions, coefficients, stream, c, 32)
        if whole < channels:
            _output_columns(dtype, desc, at, positions, coefficients, stream, whole, channels - whole)
        at, first = moved(at, positions), first + positions
