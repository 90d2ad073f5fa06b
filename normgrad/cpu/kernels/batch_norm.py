"""BatchNorm: the kernels `batch_norm_stats`, `batch_norm_reduce_backward`, `batch_norm_elemt`,
`batch_norm_elemt_backward` and `batch_norm_gather_stats_with_counts`.

The first two sum every chunk, then add up the partial sums of 32 channels at a time. The element-wise ones compute the
coefficients of all channels, then process every chunk. The last one is for a few small arrays, and uses one thread.
Statistics are float64, coefficients float32, both in lane order; lanes without a channel hold zeros.

The moments of a chunk's channels are their sums and M2, the sum of squared distances from the mean. One method serves
all data: terms about a shift are added in float32 sequences of 4 a lane, four sequences join to 16 terms, and float64
adds these. float32 and float16 data is read twice while it is in a cache: the mean of the first quarter of the elements
is the shift for all of them. With the mean of k of n elements as the shift, the squares about it sum to at most n/k
times M2, so that the difference that yields M2 loses about two bits whatever the data. Equal elements have a shift of
their own value and an M2 of exactly 0. bfloat16 needs no shift: its squares have 16 bits, and float32 sums 16 of them
without a rounding unless the largest element is more than 11 times the smallest; but then M2 of these 16 is not much
less than their squares.
"""

from collections import namedtuple

import numpy as np

from normgrad.cpu import limits
from normgrad.cpu.compile.jit import device, inline, kernel
from normgrad.cpu.descriptors import Channel, GatherStats
from normgrad.cpu.intrinsics.memory import fetch_add, item_size, load, stack_space, store
from normgrad.cpu.intrinsics.pairs import is_bfloat16, load_pair, load_pair_or
from normgrad.cpu.intrinsics.vectors import (
    fma,
    hsum,
    narrow,
    power_of_two,
    replace_negative,
    saturated,
    splat_f32,
    splat_f64,
    square_roots,
    vload,
    vstore,
    widen,
)
from normgrad.cpu.kernels.channel import columns, rows
from normgrad.cpu.kernels.channel.access import (
    address_of,
    choose,
    chunk_of,
    in_columns,
    positions_of,
    quotient,
)
from normgrad.cpu.kernels.channel.results import compute_results
from normgrad.cpu.kernels.common.lanes import from_lanes, load_element, store_element, to_lanes
from normgrad.cpu.kernels.common.reduce import about_mean, add_pair, merge_partials, moments, sum_partials
from normgrad.cpu.kernels.common.tensors import for_pairs, load_some
from normgrad.cpu.kernels.common.work import items_in_order, items_of
from normgrad.cpu.tags import BACKWARD, F32, F64, FORWARD

#: The statistics of one rank, with the fields of a `descriptors.Vector`.
_RankRow = namedtuple("_RankRow", "address stride dtype")

_lanes, _shifts = stack_space(limits.MOMENT_ROWS * 2 * 16 * 8), stack_space(limits.MOMENT_ROWS * 4)
_means, _invstds = stack_space(limits.CHANNEL_BLOCK * 4), stack_space(limits.CHANNEL_BLOCK * 4)

# Moments of a chunk.


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
    """Add x - shift and its square, of a pair v, to s = (sum, sum/2, squares, squares): a sequence for either vector.

    The second vector's sum is kept halved, because b*0.5 + sum is an FMA and keeps an adder free: adders have more to
    do here than multipliers.
    """
    a, b = v[0] - shift, v[1] - shift
    return s[0] + a, fma(b, half, s[1]), fma(a, a, s[2]), fma(b, b, s[3])


@inline
def _add_sums(s, q, a, b):
    """Add the sums of a and b, two sequences each, to s and q in float64; the second sum of either is halved."""
    halved = a[1] + b[1]
    s = s + widen((a[0] + b[0]) + (halved + halved))
    return s, q + widen((a[2] + a[3]) + (b[2] + b[3]))


@inline
def _row_moments(dtype, x, count, shift):
    """Return sum(x - shift) and sum((x - shift)^2) in 16 lanes: float32 sequences of up to 4 terms, float64 beyond."""
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
def _long_rows(dtype, row_count, count, x, step, sums, squares):
    """Compute the sums and M2 of up to MOMENT_ROWS rows of `count` elements, `step` bytes apart, to memory.

    The lanes of all rows are added up after the last row is read: each such sum is a chain of dependent additions, and
    those of several rows overlap. A row's first 32*`pairs` elements, about a quarter, give its shift.
    """
    lanes, shifts, pairs = _lanes(), _shifts(), count // 128 + 1
    share = np.float32(1.0 / (32 * pairs))
    if not is_bfloat16(dtype):
        for r in range(row_count):
            vstore(F32, lanes, 16 * r, _sum_beginning(dtype, x + r * step, pairs))
        for r in range(row_count):
            store(F32, shifts, r, load(dtype, x + r * step, 0) + share * hsum(vload(F32, lanes, 16 * r)))
    for r in range(row_count):
        shift = np.float32(0) if is_bfloat16(dtype) else load(F32, shifts, r)
        s, q = _row_moments(dtype, x + r * step, count, shift)
        vstore(F64, lanes, 32 * r, s)
        vstore(F64, lanes, 32 * r + 16, q)
    for r in range(row_count):
        s, q = hsum(vload(F64, lanes, 32 * r)), hsum(vload(F64, lanes, 32 * r + 16))
        shift = np.float32(0) if is_bfloat16(dtype) else load(F32, shifts, r)
        total, about = about_mean(s, q, count, np.float64(shift))
        store(F64, sums, r, total)
        store(F64, squares, r, about)


@device
def moments_rows(dtype, desc, chunk):
    """Compute the sum and M2 of every row of a chunk, to its partials."""
    first, last, count, size = chunk.first, chunk.last, positions_of(desc, chunk.part), item_size(dtype)
    at = rows.cursor(desc, size, chunk)
    x, step, sums = at.input, at.input_step, chunk.partials
    squares = sums + 8 * desc.padded_channels
    if count >= limits.FLOAT64_COLUMN_TERMS:
        for c in range(first, last, limits.MOMENT_ROWS):
            here, some = x + (c - first) * step, min(limits.MOMENT_ROWS, last - c)
            _long_rows(dtype, some, count, here, step, sums + 8 * c, squares + 8 * c)
        return
    for c in range(first, last):
        total, about = moments(dtype, x + (c - first) * step, count, size)
        store(F64, sums, c, total)
        store(F64, squares, c, about)


@inline
def _shift_columns(dtype, x, step, positions, shifts, channel, count):
    """Store the means of the first positions as the shifts of 32 channels, or of the first `count` of them."""
    x += channel * item_size(dtype)
    first, zero = load_some(dtype, x, 0, count), splat_f32(np.float32(0))
    s0, s1 = zero, zero
    for r in range(1, positions):
        v = load_some(dtype, x + r * step, 0, count)
        s0, s1 = s0 + (v[0] - first[0]), s1 + (v[1] - first[1])
    share = splat_f32(np.float32(1.0 / positions))
    vstore(F32, shifts, channel, fma(s0, share, first[0]))
    vstore(F32, shifts, channel + 16, fma(s1, share, first[1]))


@inline
def _channel_shifts(dtype, shifts):
    """Return the shifts of 32 channels: zeros for bfloat16."""
    if is_bfloat16(dtype):
        return splat_f32(np.float32(0)), splat_f32(np.float32(0))
    return vload(F32, shifts, 0), vload(F32, shifts, 16)


@inline
def _add_position(dtype, x, ahead, count, m, s):
    """Add x - shift and its square of 32 channels at one position to s, both in pairs; `ahead` bytes on, prefetch."""
    columns.prefetch_channels(dtype, x + ahead)
    v = load_some(dtype, x, 0, count)
    a, b = v[0] - m[0], v[1] - m[1]
    return s[0] + a, s[1] + b, fma(a, a, s[2]), fma(b, b, s[3])


@inline
def _add_columns(dtype, x, step, positions, shifts, sums, squares, channel, count):
    """Add x - shift and its square at some positions to the sums of 32 channels: four sequences of terms in float32."""
    x, m = x + channel * item_size(dtype), _channel_shifts(dtype, shifts + 4 * channel)
    zero, ahead = splat_f32(np.float32(0)), limits.COLUMN_RUN * step
    a = b = c = d = (zero, zero, zero, zero)
    for _ in range(positions // 4):
        a = _add_position(dtype, x, ahead, count, m, a)
        b = _add_position(dtype, x + step, ahead, count, m, b)
        c = _add_position(dtype, x + 2 * step, ahead, count, m, c)
        d = _add_position(dtype, x + 3 * step, ahead, count, m, d)
        x += 4 * step
    for _ in range(positions % 4):
        a = _add_position(dtype, x, ahead, count, m, a)
        x += step
    add_pair(sums, channel, (a[0] + b[0]) + (c[0] + d[0]), (a[1] + b[1]) + (c[1] + d[1]))
    add_pair(squares, channel, (a[2] + b[2]) + (c[2] + d[2]), (a[3] + b[3]) + (c[3] + d[3]))


@device
def moments_columns(dtype, desc, chunk):
    """Compute the sum and M2 of every channel of a chunk of columns, to its partials."""
    if desc.samples * desc.positions <= limits.FLOAT64_COLUMN_TERMS:
        columns.compute_moments(dtype, desc, chunk)
        return
    size, channels, count, pitch = item_size(dtype), desc.channels, positions_of(desc, chunk.part), desc.padded_channels
    step, sums = size * desc.input.position_stride, columns.cleared_partials(desc, chunk)
    shifts = chunk.coefficients + 4 * (chunk.n * desc.chunks + chunk.part) * pitch
    squares, x = sums + 8 * pitch, address_of(desc.input, size, chunk.n, 0, chunk.part * desc.chunk_positions)
    if not is_bfloat16(dtype):
        for_pairs(channels, _shift_columns, dtype, x, step, (count + 3) // 4, shifts)
    for first in range(0, count, limits.COLUMN_RUN):
        positions, row = min(limits.COLUMN_RUN, count - first), x + first * step
        for c in range(0, channels & ~31, 32):  # for_pairs takes 1.15 times as long on 64 channels of bfloat16
            _add_columns(dtype, row, step, positions, shifts, sums, squares, c, 32)
        if channels & 31:
            _add_columns(dtype, row, step, positions, shifts, sums, squares, channels & ~31, channels & 31)
    for c in range(0, pitch, 32):
        columns.finish_moments(count, _channel_shifts(dtype, shifts + 4 * c), sums, squares, c)


# Partial sums of chunks to statistics, and parameters and statistics to coefficients.


@device
def reduce_moments(desc, block):
    """Reduce the partial moments of 32 channels to their mean and invstd: all means come first, then all invstds."""
    size, smallest = splat_f64(np.float64(desc.samples * desc.positions)), splat_f64(limits.SMALLEST_M2)
    for lane in range(32 * block, 32 * block + 32, 16):
        total, squares = merge_partials(desc, desc.partials, desc.samples, lane)
        # Where float32 squares underflow, M2 may be negative, and invstd must be finite: with eps 0 it is Inf for equal
        # elements alone, whose M2 is 0. Where squares overflow, Inf - Inf makes the variance NaN: invstd must not be 0.
        variance = replace_negative(squares, smallest) / size
        variance = variance + (variance - variance)
        vstore(F64, desc.statistics, lane, total / size)
        invstd = splat_f64(1.0) / square_roots(variance + splat_f64(desc.eps))
        vstore(F64, desc.statistics, desc.padded_channels + lane, invstd)


@device
def _ordered(dtype, paired, desc, vector, absent, target):
    """Store a vector of all channels in lane order, or one value where it is absent."""
    to_lanes(dtype, paired, vector, absent, target, 0, desc.padded_channels, desc.channels)


@device
def sum_coefficients(dtype, paired, desc):
    """Store the coefficients of sums of grad_out*(x - mean): scales of 1, the negative means, and last the invstds."""
    target, pitch = desc.coefficients, desc.padded_channels
    _ordered(dtype, paired, desc, desc.mean, 0.0, target + 4 * pitch)
    _ordered(dtype, paired, desc, desc.rstd, 0.0, target + 8 * pitch)
    for lane in range(0, pitch, 16):
        vstore(F32, target, lane, splat_f32(np.float32(1)))
        vstore(F32, target, pitch + lane, -vload(F32, target, pitch + lane))


@device
def gradient_coefficients(dtype, paired, desc):
    """Store the coefficients of gradients (`coefficients.gradient`), from the statistics and sums given.

    Each array first gets a parameter of the call in lane order, which its coefficients then replace.
    """
    target, plane, total = desc.coefficients, 4 * desc.padded_channels, 0.0
    for i in range(desc.counts):
        total += load_element(desc.counter, i)
    count = splat_f64(total)
    shifts, factors, means = target + plane, target + 2 * plane, target + 3 * plane
    scales, posts = target + 4 * plane, target + 5 * plane
    _ordered(dtype, paired, desc, desc.mean, 0.0, shifts)
    _ordered(dtype, paired, desc, desc.sum_dy_xmu, 0.0, factors)
    _ordered(dtype, paired, desc, desc.sum_dy, 0.0, means)
    _ordered(dtype, paired, desc, desc.rstd, 0.0, scales)
    _ordered(dtype, paired, desc, desc.weight, 1.0, posts)
    for lane in range(0, desc.padded_channels, 16):
        mean, invstd = widen(vload(F32, shifts, lane)), widen(vload(F32, scales, lane))
        last = widen(vload(F32, posts, lane)) * invstd
        pre = power_of_two(last, splat_f64(0.0))
        coefficient = invstd * invstd * (widen(vload(F32, factors, lane)) / count) * pre
        scale = power_of_two(coefficient, mean)
        vstore(F32, target, lane, narrow(scale))
        vstore(F32, shifts, lane, narrow(-(mean * scale)))
        vstore(F32, factors, lane, narrow(saturated(coefficient / scale)))
        vstore(F32, means, lane, narrow(widen(vload(F32, means, lane)) / count * pre))
        vstore(F32, scales, lane, narrow(pre))
        vstore(F32, posts, lane, narrow(saturated(last / pre)))


@device
def output_coefficients(dtype, paired, desc):
    """Store the coefficients of outputs (`coefficients.output`), from the statistics given, in the same way."""
    target, plane = desc.coefficients, 4 * desc.padded_channels
    shifts, factors = target + plane, target + 2 * plane
    _ordered(dtype, paired, desc, desc.rstd, 0.0, target)
    _ordered(dtype, paired, desc, desc.mean, 0.0, shifts)
    _ordered(dtype, paired, desc, desc.weight, 1.0, factors)
    _ordered(dtype, paired, desc, desc.bias, 0.0, target + 3 * plane)
    for lane in range(0, desc.padded_channels, 16):
        mean, coefficient = widen(vload(F32, shifts, lane)), widen(vload(F32, target, lane))
        coefficient = coefficient * widen(vload(F32, factors, lane))
        scale = power_of_two(coefficient, mean)
        vstore(F32, target, lane, narrow(scale))
        vstore(F32, shifts, lane, narrow(-(mean * scale)))
        vstore(F32, factors, lane, narrow(saturated(coefficient / scale)))


# The sums of a chunk, and the kernels that go through all chunks.


def _sum(dtype, layout, direction, desc, chunk):
    """Sum a chunk, to its partials."""


@inline
def _sum_rows(dtype, desc, chunk):
    # A row's sums are results themselves: of few terms, each joins float64.
    rows.compute_sums(dtype, desc, chunk, desc.samples * desc.positions <= limits.FLOAT64_TERMS)


@inline
def _sum_columns(dtype, desc, chunk):
    # Positions that are added in float32 first: one, of few terms.
    run = 1 if desc.samples * desc.positions <= limits.FLOAT64_COLUMN_TERMS else limits.COLUMN_RUN
    if item_size(dtype) == 4 and desc.channels > limits.ALL_CHANNELS_FROM and run > 1:
        columns.sum_all_channels(desc, chunk)
    else:
        columns.compute_sums(dtype, desc, chunk, run)


choose(
    _sum,
    rows_backward=_sum_rows,
    rows_forward=moments_rows,
    columns_backward=_sum_columns,
    columns_forward=moments_columns,
)


@device
def _chunk(layout, desc, i):
    """Return chunk i of all samples."""
    n = quotient(i, desc.unit_chunks)
    partials = desc.partials + 16 * n * desc.chunks * desc.padded_channels
    return chunk_of(layout, desc, n, 0, i - n * desc.unit_chunks, partials, desc.coefficients)


@inline
def _sum_chunks(dtype, layout, direction, desc, slot):
    for i in items_of(desc.sum_phase, desc.units * desc.unit_chunks, desc.chunks_per_take, slot):
        _sum(dtype, layout, direction, desc, _chunk(layout, desc, i))


@inline
def _compute_elements(dtype, layout, direction, desc, store_coefficients):
    """Compute the coefficients of all channels, then the results of all chunks."""
    slot = fetch_add(desc.slot, 1)
    if slot >= desc.slots:
        return
    for _ in items_in_order(desc.parameter_phase, 1):
        store_coefficients(dtype, in_columns(layout), desc)
    for i in items_of(desc.result_phase, desc.units * desc.unit_chunks, desc.chunks_per_take, slot):
        compute_results(dtype, layout, direction, desc, _chunk(layout, desc, i))


@device
def _write_statistics(dtype, paired, desc):
    """Write mean and invstd of every channel, 32 at a time."""
    for block in items_in_order(desc.output_phase, desc.padded_channels // 32):
        reduce_moments(desc, block)
        first, last, means = 32 * block, min(desc.channels, 32 * (block + 1)), desc.statistics + 256 * block
        from_lanes(dtype, paired, desc.mean, first, last, means)
        from_lanes(dtype, paired, desc.rstd, first, last, means + 8 * desc.padded_channels)


@device
def _write_sums(dtype, paired, desc):
    """Write the four outputs. They may alias the inputs, which are all read by now."""
    pitch = desc.padded_channels
    sums_x, invstds, grad_weights = desc.partials + 8 * pitch, desc.coefficients + 8 * pitch, desc.statistics
    for block in items_in_order(desc.output_phase, pitch // 32):
        first, last, sums = 32 * block, min(desc.channels, 32 * (block + 1)), desc.partials + 256 * block
        sum_partials(sums, desc.samples * desc.chunks, 16 * pitch, pitch)
        for lane in range(first, first + 32, 16):
            vstore(F64, grad_weights, lane, vload(F64, sums_x, lane) * widen(vload(F32, invstds, lane)))
        from_lanes(dtype, paired, desc.sum_dy, first, last, sums)
        from_lanes(dtype, paired, desc.sum_dy_xmu, first, last, sums + 8 * pitch)
        from_lanes(dtype, paired, desc.grad_weight, first, last, grad_weights + 256 * block)
        from_lanes(dtype, paired, desc.grad_bias, first, last, sums)


@kernel
def batch_norm_stats(desc: Channel, dtype, layout):
    slot = fetch_add(desc.slot, 1)
    if slot >= desc.slots:
        return
    _sum_chunks(dtype, layout, FORWARD, desc, slot)
    _write_statistics(dtype, in_columns(layout), desc)


@kernel
def batch_norm_reduce_backward(desc: Channel, dtype, layout):
    slot = fetch_add(desc.slot, 1)
    if slot >= desc.slots:
        return
    for _ in items_in_order(desc.parameter_phase, 1):
        sum_coefficients(dtype, in_columns(layout), desc)
    _sum_chunks(dtype, layout, BACKWARD, desc, slot)
    _write_sums(dtype, in_columns(layout), desc)


@kernel
def batch_norm_elemt_backward(desc: Channel, dtype, layout):
    _compute_elements(dtype, layout, BACKWARD, desc, gradient_coefficients)


@kernel
def batch_norm_elemt(desc: Channel, dtype, layout):
    _compute_elements(dtype, layout, FORWARD, desc, output_coefficients)


# `batch_norm_gather_stats_with_counts`: the statistics of the whole batch from those of its ranks, on one thread.


@device
def _updated(vector, c, momentum, new):
    """Return a running statistic after its update."""
    if vector.address == 0:
        return 0.0
    return (1.0 - momentum) * load_element(vector, c) + momentum * new


@device
def _load_rank(first_rank, offset, first, last, channels, target):
    """Store a rank's means or invstds of channels [first, last) as float32, with zeros beyond the last channel."""
    row = _RankRow(first_rank.address + offset, first_rank.stride, first_rank.dtype)
    to_lanes(F32, False, row, 0.0, target - 4 * first, first, last, channels)


@device
def _rank_moments(desc, first, last, n):
    """Store the mean of channels [first, last) over the n elements of all ranks, and the sum of squares about it.

    A rank adds count*(its variance + (its mean - the mean)^2) to the squares; one without elements adds nothing.
    Every rank's row is read along its channels: rows that are a power of two apart share the sets of the cache, and to
    read all of them at one channel would evict them before the next.
    """
    means, invstds, zero, one, eps = _means(), _invstds(), splat_f64(0.0), splat_f64(1.0), splat_f64(desc.eps)
    totals, squares = desc.results + 8 * first, desc.results + 8 * (desc.padded_channels + first)
    for c in range(0, last - first, 16):
        vstore(F64, totals, c, zero)
        vstore(F64, squares, c, zero)
    for rank in range(desc.ranks):
        count = load_element(desc.counts, rank)
        if count != 0.0:
            _load_rank(desc.mean, rank * desc.mean_pitch, first, last, desc.channels, means)
            for c in range(0, last - first, 16):
                total = fma(widen(vload(F32, means, c)), splat_f64(count), vload(F64, totals, c))
                vstore(F64, totals, c, total)
    for c in range(0, last - first, 16):
        vstore(F64, totals, c, vload(F64, totals, c) / splat_f64(n))
    for rank in range(desc.ranks):
        count = load_element(desc.counts, rank)
        if count != 0.0:
            _load_rank(desc.mean, rank * desc.mean_pitch, first, last, desc.channels, means)
            _load_rank(desc.invstd, rank * desc.invstd_pitch, first, last, desc.channels, invstds)
            for c in range(0, last - first, 16):
                invstd, distance = widen(vload(F32, invstds, c)), widen(vload(F32, means, c)) - vload(F64, totals, c)
                square = fma(distance, distance, one / (invstd * invstd) - eps)
                vstore(F64, squares, c, fma(square, splat_f64(count), vload(F64, squares, c)))


@kernel
def batch_norm_gather_stats_with_counts(desc: GatherStats):
    """Compute all results, then write them: outputs may alias inputs."""
    channels, pitch, results, momentum = desc.channels, desc.padded_channels, desc.results, desc.momentum
    n = 0.0
    for rank in range(desc.ranks):
        n += load_element(desc.counts, rank)
    for first in range(0, pitch, limits.CHANNEL_BLOCK):
        _rank_moments(desc, first, min(first + limits.CHANNEL_BLOCK, pitch), n)
    for c in range(channels):
        mean, squares = load(F64, results, c), load(F64, results, pitch + c)
        store(F64, results, pitch + c, 1.0 / np.sqrt(squares / n + desc.eps))
        store(F64, results, 2 * pitch + c, _updated(desc.running_mean, c, momentum, mean))
        store(F64, results, 3 * pitch + c, _updated(desc.running_var, c, momentum, squares / (n - 1.0)))
    for c in range(channels):
        store_element(desc.mean_all, c, load(F64, results, c))
        store_element(desc.invstd_all, c, load(F64, results, pitch + c))
        store_element(desc.running_mean, c, load(F64, results, 2 * pitch + c))
        store_element(desc.running_var, c, load(F64, results, 3 * pitch + c))
