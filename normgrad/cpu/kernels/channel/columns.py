"""GroupNorm and BatchNorm in columns: a chunk has some positions of one sample with all channels, which are contiguous.

A vector holds channels, in the lane order of pairs; so do the partials and the coefficients. 32 channels and a run of
positions are processed at a time, so that coefficients and sums stay in registers.
"""

import numpy as np

from normgrad.cpu import limits
from normgrad.cpu.compile.jit import device, inline
from normgrad.cpu.intrinsics.memory import item_size, prefetch_l2, stack_space, store
from normgrad.cpu.intrinsics.vectors import fma, splat_f32, splat_f64, vload, vstore, widen
from normgrad.cpu.kernels.channel.access import address_of, positions_of
from normgrad.cpu.kernels.channel.coefficients import deviation, four, lanes, six, store_gradients, store_outputs
from normgrad.cpu.kernels.common.reduce import about_mean, add_pair, moments
from normgrad.cpu.kernels.common.tensors import Cursor, for_pairs, load_some, moved
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
def cleared_partials(desc, chunk):
    """Return the address of a chunk's sums, all of them set to 0."""
    sums = chunk.partials
    for c in range(0, 2 * desc.padded_channels, 16):
        vstore(F64, sums, c, splat_f64(0.0))
    return sums


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
def compute_sums(dtype, desc, chunk, run):
    """Sum grad_out, and grad_out*deviation, over a chunk, to its partials; `run` positions at a time in float32."""
    size, position, positions = item_size(dtype), chunk.part * desc.chunk_positions, positions_of(desc, chunk.part)
    sums, pitch = cleared_partials(desc, chunk), desc.padded_channels
    for first in range(0, positions, run):
        some, at = min(run, positions - first), _cursor(desc, size, chunk.n, position + first)
        for_pairs(desc.channels, _sum_columns, dtype, at, some, sums, pitch, chunk.coefficients)


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
        for_pairs(channels, _sum_positions, at, some, run_sums, shifts)
        at, first = moved(at, some), first + some
        if first % limits.COLUMN_RUN == 0 or first == positions:
            _flush_sums(run_sums, sums, sums_x, channels)


@device
def sum_all_channels(desc, chunk):
    """Sum grad_out, and grad_out*(x - mean), over a chunk of float32, to its partials.

    It goes through memory in order, two positions at a time. COLUMN_RUN positions of 32 channels would be cache lines
    some kB apart, which share few sets of the L1 cache.
    """
    sums, channels, shifts = cleared_partials(desc, chunk), desc.channels, chunk.coefficients + 4 * desc.padded_channels
    sums_x, start = sums + 8 * desc.padded_channels, _cursor(desc, 4, chunk.n, chunk.part * desc.chunk_positions)
    for c in range(0, channels, limits.CHANNEL_BLOCK):
        at, some = _beside(start, 4, c), min(limits.CHANNEL_BLOCK, channels - c)
        _sum_block(at, positions_of(desc, chunk.part), sums + 8 * c, sums_x + 8 * c, shifts + 4 * c, some)


# Moments.


@inline
def _add_moments(v, m, s, q):
    a = widen(v) - widen(m)
    return s + a, fma(a, a, q)


@inline
def _add_positions(dtype, x, step, first, last, sums, squares, c, count):
    """Add x - m and its square at positions [first, last) to the sums of 32 channels; m is their position 0."""
    x += c * item_size(dtype)
    m = load_some(dtype, x, 0, count)
    s0, s1 = vload(F64, sums, c), vload(F64, sums, c + 16)
    q0, q1 = vload(F64, squares, c), vload(F64, squares, c + 16)
    for r in range(first, last):
        prefetch_channels(dtype, x + (r + limits.COLUMN_RUN) * step)
        v = load_some(dtype, x + r * step, 0, count)
        s0, q0 = _add_moments(v[0], m[0], s0, q0)
        s1, q1 = _add_moments(v[1], m[1], s1, q1)
    vstore(F64, sums, c, s0)
    vstore(F64, sums, c + 16, s1)
    vstore(F64, squares, c, q0)
    vstore(F64, squares, c + 16, q1)


@inline
def finish_moments(count, m, sums, squares, c):
    """Turn sums of x - m and of its square over `count` positions, of 32 channels, into the sums and M2."""
    for i in range(c, c + 32, 16):
        shift = widen(m[0] if i == c else m[1])
        total, about = about_mean(vload(F64, sums, i), vload(F64, squares, i), splat_f64(np.float64(count)), shift)
        vstore(F64, sums, i, total)
        vstore(F64, squares, i, about)


@inline
def _finish_about_first(dtype, x, positions, sums, squares, c, count):
    finish_moments(positions, load_some(dtype, x, c, count), sums, squares, c)


@device
def compute_moments(dtype, desc, chunk):
    """Compute the sum and M2 of every channel of a chunk, to its partials; of all elements, where it is contiguous."""
    size, positions, sums = item_size(dtype), positions_of(desc, chunk.part), cleared_partials(desc, chunk)
    x, squares = _cursor(desc, size, chunk.n, chunk.part * desc.chunk_positions).input, sums + 8 * desc.padded_channels
    if desc.is_contiguous:
        total, about = moments(dtype, x, positions * desc.channels, size)
        store(F64, sums, 0, total)
        store(F64, squares, 0, about)
        return
    step = size * desc.input.position_stride
    for first in range(0, positions, limits.COLUMN_RUN):
        last = min(first + limits.COLUMN_RUN, positions)
        for_pairs(desc.channels, _add_positions, dtype, x, step, first, last, sums, squares)
    for_pairs(desc.channels, _finish_about_first, dtype, x, positions, sums, squares)


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
    k = six(lanes, coefficients, pitch, c), six(lanes, coefficients, pitch, c + 16)  # of either half of the channels
    for _ in range(positions):
        prefetch_channels(dtype, at.grad_out + limits.COLUMN_RUN * at.grad_out_step)
        prefetch_channels(dtype, at.input + limits.COLUMN_RUN * at.input_step)
        _prefetch_result(dtype, desc, at, stream)
        store_gradients(dtype, at, k, stream, 0, count)
        at = moved(at, 1)


@device
def compute_gradients(dtype, desc, chunk):
    """Compute grad_input of a chunk."""
    size, position = item_size(dtype), chunk.part * desc.chunk_positions
    last = position + positions_of(desc, chunk.part)
    run = limits.OUTPUT_RUN if size * desc.input.position_stride % limits.CONFLICTING_STRIDE == 0 else limits.COLUMN_RUN
    for first in range(position, last, run):
        at, some = _cursor(desc, size, chunk.n, first), min(run, last - first)
        for_pairs(desc.channels, _gradient_columns, dtype, desc, at, some, chunk.coefficients, _streams(desc, at))


@inline
def _output_columns(dtype, desc, at, positions, coefficients, stream, c, count):
    """Compute the output of 32 channels at some positions."""
    at, pitch = _beside(at, item_size(dtype), c), desc.padded_channels
    k = four(lanes, coefficients, pitch, c), four(lanes, coefficients, pitch, c + 16)
    for _ in range(positions):
        if item_size(dtype) == 2:
            prefetch_channels(dtype, at.input + limits.PREFETCH_POSITIONS * at.input_step)
        _prefetch_result(dtype, desc, at, stream)
        store_outputs(dtype, at, k, stream, 0, count)
        at = moved(at, 1)


@device
def compute_outputs(dtype, desc, chunk):
    """Compute the output of a chunk."""
    size, channels, whole, left = item_size(dtype), desc.channels, desc.channels & ~31, positions_of(desc, chunk.part)
    at, coefficients = _cursor(desc, size, chunk.n, chunk.part * desc.chunk_positions), chunk.coefficients
    stream = _streams(desc, at)
    one_by_one = size == 4 and channels > limits.POSITIONWISE_CHANNELS
    while left > 0:
        positions = 1 if one_by_one else min(limits.OUTPUT_RUN, left)
        for c in range(0, whole, 32):
            if one_by_one:  # a constant, which makes coefficients operands in memory
                _output_columns(dtype, desc, at, 1, coefficients, stream, c, 32)
            else:
                _output_columns(dtype, desc, at, positions, coefficients, stream, c, 32)
        if whole < channels:
            _output_columns(dtype, desc, at, positions, coefficients, stream, whole, channels - whole)
        at, left = moved(at, positions), left - positions
