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
    RowChunk,
    address_of,
    choose,
    in_columns,
    partials_of,
    positions_of,
    quotient,
)
from normgrad.cpu.kernels.common.lanes import from_lanes, load_element, store_element, to_lanes
from normgrad.cpu.kernels.common.reduce import about_mean, merge_partials, moments, sum_partials
from normgrad.cpu.kernels.common.tensors import load_some
from normgrad.cpu.kernels.common.work import items_in_order, items_of
from normgrad.cpu.tags import BACKWARD, BACKWARD_SUMS, F32, F64, FORWARD, FORWARD_SUMS

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
    n, first, last, part = chunk
    position, count, size = part * desc.chunk_positions, positions_of(desc, part), item_size(dtype)
    x, step = address_of(desc.input, size, n, first, position), size * desc.input.channel_stride
    sums = partials_of(desc, n, part)
    squares = sums + 8 * desc.padded_channels
    if count >= limits.FLOAT64_COLUMN_TERMS:
        # As few groups of rows as MOMENT_ROWS and MOMENT_ELEMENTS allow, with the same number of rows but in the last.
        number = last - first
        groups = max((number + limits.MOMENT_ROWS - 1) // limits.MOMENT_ROWS, number * count // limits.MOMENT_ELEMENTS)
        at_once = (number + groups - 1) // groups
        for c in range(first, last, at_once):
            here = x + (c - first) * step
            _long_rows(dtype, min(at_once, last - c), count, here, step, sums + 8 * c, squares + 8 * c)
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
    columns.add_pair(sums, channel, (a[0] + b[0]) + (c[0] + d[0]), (a[1] + b[1]) + (c[1] + d[1]))
    columns.add_pair(squares, channel, (a[2] + b[2]) + (c[2] + d[2]), (a[3] + b[3]) + (c[3] + d[3]))


@inline
def _finish_columns(dtype, desc, count, shifts, sums, squares):
    """Turn the sums about the shifts, in the partials of a chunk, into the sums and M2 of its channels."""
    for c in range(0, desc.padded_channels, 32):
        m, terms = _channel_shifts(dtype, shifts + 4 * c), splat_f64(np.float64(count))
        total, about = about_mean(vload(F64, sums, c), vload(F64, squares, c), terms, widen(m[0]))
        vstore(F64, sums, c, total)
        vstore(F64, squares, c, about)
        total, about = about_mean(vload(F64, sums, c + 16), vload(F64, squares, c + 16), terms, widen(m[1]))
        vstore(F64, sums, c + 16, total)
        vstore(F64, squares, c + 16, about)


@device
def moments_columns(dtype, desc, n, chunk):
    """Compute the sum and M2 of every channel of a chunk of columns, to its partials."""
    columns.clear_sums(desc, n, chunk)
    if desc.samples * desc.positions <= limits.FLOAT64_COLUMN_TERMS:
        columns.add_moments(dtype, desc, n, chunk, 0, positions_of(desc, chunk))
        columns.finish_moments(dtype, desc, n, chunk)
        return
    size, channels, count, pitch = item_size(dtype), desc.channels, positions_of(desc, chunk), desc.padded_channels
    step, sums = size * desc.input.position_stride, partials_of(desc, n, chunk)
    shifts = desc.coefficients + 4 * (n * desc.chunks + chunk) * pitch
    squares, x = sums + 8 * pitch, address_of(desc.input, size, n, 0, chunk * desc.chunk_positions)
    if not is_bfloat16(dtype):
        columns.for_channels(channels, _shift_columns, dtype, x, step, (count + 3) // 4, shifts)
    for first in range(0, count, limits.COLUMN_RUN):
        positions, row = min(limits.COLUMN_RUN, count - first), x + first * step
        for c in range(0, channels & ~31, 32):  # for_channels takes 1.15 times as long on 64 channels of bfloat16
            _add_columns(dtype, row, step, positions, shifts, sums, squares, c, 32)
        if channels & 31:
            _add_columns(dtype, row, step, positions, shifts, sums, squares, channels & ~31, channels & 31)
    _finish_columns(dtype, desc, count, shifts, sums, squares)


# Partial sums of chunks to statistics, and parameters and statistics to coefficients.


@device
def _statistics(desc, lane):
    """Store mean and invstd of 16 channels."""
    size = splat_f64(np.float64(desc.samples * desc.positions))
    total, squares = merge_partials(desc, 0, desc.samples, lane)
    # Where float32 squares underflow, M2 may be negative, and invstd must be finite: with eps 0 it is Inf for equal
    # elements alone, whose M2 is 0. Where squares overflow, Inf - Inf makes the variance NaN: invstd must not be 0.
    variance = replace_negative(squares, splat_f64(limits.SMALLEST_M2)) / size
    variance = variance + (variance - variance)
    vstore(F64, desc.statistics, lane, total / size)
    invstd = splat_f64(1.0) / square_roots(variance + splat_f64(desc.eps))
    vstore(F64, desc.statistics, desc.padded_channels + lane, invstd)


@device
def reduce_moments(desc, block):
    """Reduce the partial moments of 32 channels to their mean and invstd: all means come first, then all invstds."""
    _statistics(desc, 32 * block)
    _statistics(desc, 32 * block + 16)


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


# The sums or results of a chunk, and the kernels that go through all chunks.


def _process(dtype, layout, direction, desc, i):
    """Compute the sums or the results of chunk i: by the function for its layout and direction, see `choose` below."""


@device
def _row_blocks(desc):
    """Return how many chunks the channels of a sample make in rows."""
    return (desc.channels + desc.chunk_channels - 1) // desc.chunk_channels


@device
def _rows_of(desc, i):
    """Return chunk i of rows."""
    row, blocks = quotient(i, desc.chunks), _row_blocks(desc)
    n = quotient(row, blocks)
    first = (row - n * blocks) * desc.chunk_channels
    return RowChunk(n, first, min(first + desc.chunk_channels, desc.channels), i - row * desc.chunks)


def _rows_backward_sums(dtype, layout, direction, desc, i):
    negative_means = desc.coefficients + 4 * desc.padded_channels
    rows.compute_sums(dtype, desc, _rows_of(desc, i), np.float32(1), np.float32(0), negative_means)


def _rows_forward_sums(dtype, layout, direction, desc, i):
    moments_rows(dtype, desc, _rows_of(desc, i))


def _columns_backward_sums(dtype, layout, direction, desc, i):
    n, chunk = i // desc.chunks, i % desc.chunks
    positions = positions_of(desc, chunk)
    # Positions that are added in float32 first. The sums are results themselves: of few terms, each joins float64.
    run = 1 if desc.samples * desc.positions <= limits.FLOAT64_COLUMN_TERMS else positions
    columns.clear_sums(desc, n, chunk)
    if item_size(dtype) == 4 and desc.channels > limits.ALL_CHANNELS_FROM and run > 1:
        columns.sum_all_channels(desc, n, chunk, desc.coefficients + 4 * desc.padded_channels)
    else:
        for first in range(0, positions, run):
            columns.add_sums(dtype, desc, n, chunk, first, first + run, desc.coefficients)


def _columns_forward_sums(dtype, layout, direction, desc, i):
    moments_columns(dtype, desc, i // desc.chunks, i % desc.chunks)


def _rows_backward(dtype, layout, direction, desc, i):
    rows.compute_gradients(dtype, desc, _rows_of(desc, i), desc.coefficients)


def _rows_forward(dtype, layout, direction, desc, i):
    rows.compute_outputs(dtype, desc, _rows_of(desc, i), desc.coefficients)


def _columns_backward(dtype, layout, direction, desc, i):
    chunk = i % desc.chunks
    columns.compute_gradients(dtype, desc, i // desc.chunks, chunk, 0, positions_of(desc, chunk), desc.coefficients)


def _columns_forward(dtype, layout, direction, desc, i):
    chunk = i % desc.chunks
    columns.compute_outputs(dtype, desc, i // desc.chunks, chunk, 0, positions_of(desc, chunk), desc.coefficients)


choose(
    _process,
    rows_backward_sums=_rows_backward_sums,
    rows_forward_sums=_rows_forward_sums,
    columns_backward_sums=_columns_backward_sums,
    columns_forward_sums=_columns_forward_sums,
    rows_backward=_rows_backward,
    rows_forward=_rows_forward,
    columns_backward=_columns_backward,
    columns_forward=_columns_forward,
)


@inline
def _process_all(dtype, layout, direction, desc, slot):
    """Compute the sums or the results of all chunks."""
    blocks = 1 if in_columns(layout) else _row_blocks(desc)
    for i in items_of(desc.sum_phase, desc.samples * desc.chunks * blocks, desc.chunks_per_take, slot):
        _process(dtype, layout, direction, desc, i)


@device
def _write_statistics(dtype, paired, desc):
    """Write mean and invstd of every channel, 32 at a time."""
    for block in items_in_order(desc.output_phase, desc.padded_channels // 32):
        reduce_moments(desc, block)
        first, last, means = 32 * block, min(desc.channels, 32 * (block + 1)), desc.statistics + 256 * block
        from_lanes(dtype, paired, desc.mean, first, last, means)
        from_lanes(dtype, paired, desc.rstd, first, last, means + 8 * desc.padded_channels)


@device
def _weight_gradients(desc, lane):
    """Compute grad_weight of 16 channels: sum_dy_xmu times invstd."""
    sums_x, invstd = desc.partials + 8 * desc.padded_channels, desc.coefficients + 8 * desc.padded_channels
    vstore(F64, desc.statistics, lane, vload(F64, sums_x, lane) * widen(vload(F32, invstd, lane)))


@device
def _write_sums(dtype, paired, desc):
    """Write the four outputs. They may alias the inputs, which are all read by now."""
    pitch = desc.padded_channels
    for block in items_in_order(desc.output_phase, pitch // 32):
        first, last, sums = 32 * block, min(desc.channels, 32 * (block + 1)), desc.partials + 256 * block
        sum_partials(sums, desc.samples * desc.chunks, 16 * pitch, pitch)
        _weight_gradients(desc, first)
        _weight_gradients(desc, first + 16)
        from_lanes(dtype, paired, desc.sum_dy, first, last, sums)
        from_lanes(dtype, paired, desc.sum_dy_xmu, first, last, sums + 8 * pitch)
        from_lanes(dtype, paired, desc.grad_weight, first, last, desc.statistics + 256 * block)
        from_lanes(dtype, paired, desc.grad_bias, first, last, sums)


@kernel
def batch_norm_stats(desc: Channel, dtype, layout):
    slot = fetch_add(desc.slot, 1)
    if slot >= desc.slots:
        return
    _process_all(dtype, layout, FORWARD_SUMS, desc, slot)
    _write_statistics(dtype, in_columns(layout), desc)


@kernel
def batch_norm_reduce_backward(desc: Channel, dtype, layout):
    slot = fetch_add(desc.slot, 1)
    if slot >= desc.slots:
        return
    for _ in items_in_order(desc.parameter_phase, 1):
        sum_coefficients(dtype, in_columns(layout), desc)
    _process_all(dtype, layout, BACKWARD_SUMS, desc, slot)
    _write_sums(dtype, in_columns(layout), desc)


@kernel
def batch_norm_elemt_backward(desc: Channel, dtype, layout):
    slot = fetch_add(desc.slot, 1)
    if slot >= desc.slots:
        return
    for _ in items_in_order(desc.parameter_phase, 1):
        gradient_coefficients(dtype, in_columns(layout), desc)
    _process_all(dtype, layout, BACKWARD, desc, slot)


@kernel
def batch_norm_elemt(desc: Channel, dtype, layout):
    slot = fetch_add(desc.slot, 1)
    if slot >= desc.slots:
        return
    for _ in items_in_order(desc.parameter_phase, 1):
        output_coefficients(dtype, in_columns(layout), desc)
    _process_all(dtype, layout, FORWARD, desc, slot)


# `batch_norm_gather_stats_with_counts`: the statistics of the whole batch from those of its ranks, on one thread.


@device
def _updated(vector, c, momentum, new):
    """Return a running statistic after its update."""
    if vector.address == 0:
        return 0.0
    return (1.0 - momentum) * load_element(vector, c) + momentum * new


@device
def _load_rank(tensor, rank, first, last, channels, target):
    """Store a rank's means or invstds of channels [first, last) as float32, with zeros beyond the last channel."""
    row = _RankRow(tensor.address + rank * tensor.rank_stride, tensor.channel_stride, tensor.dtype)
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
            _load_rank(desc.mean, rank, first, last, desc.channels, means)
            for c in range(0, last - first, 16):
                total = fma(widen(vload(F32, means, c)), splat_f64(count), vload(F64, totals, c))
                vstore(F64, totals, c, total)
    for c in range(0, last - first, 16):
        vstore(F64, totals, c, vload(F64, totals, c) / splat_f64(n))
    for rank in range(desc.ranks):
        count = load_element(desc.counts, rank)
        if count != 0.0:
            _load_rank(desc.mean, rank, first, last, desc.channels, means)
            _load_rank(desc.invstd, rank, first, last, desc.channels, invstds)
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
