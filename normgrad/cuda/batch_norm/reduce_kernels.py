"""The kernels of batch_norm_reduce_backward, batch_norm_stats and batch_norm_gather_stats_with_counts.

The first two reduce channels, the last one combines the statistics of all ranks. ``launches`` launches them.

TILE is a ``tiles.TileSpec``, REDUCE a ``tiles.ReduceSpec``; tiles as in ``addressing``. A CTA reduces a part of the
rows of a block of columns. Every thread keeps float64 sums of its own, so that none waits for another before the end. A
few elements at a time are added up two and two first; in float32 where the data has 16 bits, and with few roundings.

Where there are several parts, a second launch combines them. The columns of a segment tile are added up by channel at
the end. A channel may then be in several blocks: a part has an entry for each of them, [parts, blocks_per_channel, C].
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.batch_norm import addressing
from normgrad.cuda.device.formulas import divide, nan_where_infinite
from normgrad.cuda.device.indexing import block_indices, float64_from_bits, int64
from normgrad.cuda.device.pack16 import store_rounded, to_float32
from normgrad.cuda.device.pdl import pdl_launch_dependents, pdl_wait
from normgrad.cuda.device.sums import finite_median, sum_pair


@triton.jit
def cta_work(rows_per_part, N, columns, positions, TILE: tl.constexpr, REDUCE: tl.constexpr):
    """Return the CTA's block of columns, its part, how many parts there are, and its rows.

    The rows as (position blocks of a sample, first row, end).
    """
    column_blocks = tl.cdiv(columns, TILE.segment)
    position_blocks = addressing.count_position_blocks(positions, TILE)
    if REDUCE.one_part:
        block = tl.program_id(0)
        part = tl.full((), 0, tl.int32)
    else:
        block = tl.program_id(0) % column_blocks
        part = tl.program_id(0) // column_blocks
    begin = part * rows_per_part
    end = N * position_blocks
    if TILE.offset64:
        begin = int64(part) * rows_per_part
        end = int64(N) * position_blocks
    end = tl.minimum(begin + rows_per_part, end)
    return block, part, tl.num_programs(0) // column_blocks, position_blocks, begin, end


@triton.jit
def _halve(values, AXIS: tl.constexpr, ADJACENT: tl.constexpr):
    """Add up a tile's elements two and two along an axis: adjacent ones, or those half the axis apart."""
    ROWS: tl.constexpr = values.shape[0]
    POSITIONS: tl.constexpr = values.shape[1]
    COLUMNS: tl.constexpr = values.shape[2]
    if AXIS == 0:
        result = tl.sum(tl.reshape(values, (2, ROWS // 2, POSITIONS, COLUMNS)), axis=0)
    elif ADJACENT:
        result = tl.sum(tl.reshape(values, (ROWS, POSITIONS // 2, 2, COLUMNS)), axis=2)
    else:
        result = tl.sum(tl.reshape(values, (ROWS, 2, POSITIONS // 2, COLUMNS)), axis=1)
    return result


@triton.jit
def _sum_pairwise(values, REDUCE: tl.constexpr):
    """Add up elements of a tile that the same thread holds, pairwise, and convert the sums to float64."""
    HALVE_ROWS: tl.constexpr = REDUCE.halvings[0]
    HALVE_POSITIONS: tl.constexpr = REDUCE.halvings[1]
    HALVE_ADJACENT: tl.constexpr = REDUCE.halvings[2]
    for _ in tl.static_range(HALVE_ADJACENT):
        values = _halve(values, 1, True)
    for _ in tl.static_range(HALVE_POSITIONS):
        values = _halve(values, 1, False)
    for _ in tl.static_range(HALVE_ROWS):
        values = _halve(values, 0, False)
    return values.to(tl.float64)


@triton.jit
def _load(pointer, rows, mask, work, strides, MASK_POSITIONS: tl.constexpr, TILE: tl.constexpr):
    """Load a tile of one tensor."""
    pointers = addressing.tile_pointers(pointer, rows, work, strides, TILE)
    if MASK_POSITIONS or TILE.mask_columns:
        values = tl.load(pointers, mask=mask, other=0.0)
    else:
        values = tl.load(pointers)
    return values


@triton.jit
def _load_tile(row, end, data, MASK_POSITIONS: tl.constexpr, TILE: tl.constexpr):
    """Load the tiles of grad_out and input from a row on, and their mask; without a grad_out, the input twice."""
    grad_out, input, grad_out_strides, input_strides, work = data
    rows = addressing.tile_rows(row, TILE)
    mask = addressing.element_mask(rows, end, work, MASK_POSITIONS, TILE)
    x = _load(input, rows, mask, work, input_strides, MASK_POSITIONS, TILE)
    dy = x
    if grad_out is not None:
        dy = _load(grad_out, rows, mask, work, grad_out_strides, MASK_POSITIONS, TILE)
    return dy, x, mask


@triton.jit
def _accumulate(sums, tile, shift, SQUARES: tl.constexpr, MASK_POSITIONS: tl.constexpr, REDUCE: tl.constexpr):
    """Add a tile to the sums of ``reduce_rows``. Columns that are not there have any value."""
    first, second = sums
    dy, x, mask = tile
    shifted = to_float32(x).to(shift.dtype) - shift
    if MASK_POSITIONS:
        shifted = tl.where(mask, shifted, 0.0)  # no 0·Inf in the sums
    factor = shifted
    if not SQUARES:
        factor = to_float32(dy).to(shift.dtype)
    first += _sum_pairwise(factor, REDUCE)
    second += _sum_pairwise(factor * shifted, REDUCE)
    return first, second


@triton.jit
def shift_of(candidates):
    """Return the shift of the sums, [columns]: the candidate, or the median of three; 0 where that is not finite."""
    if len(candidates) == 1:
        shift = candidates[0]
    else:
        shift = finite_median(candidates[0], candidates[1], candidates[2])
    return shift


@triton.jit
def reduce_rows(
    begin,  # first row
    end,  # row after the last
    candidates,  # for ``shift_of``
    data,  # (grad_out or None, input, grad_out_strides, input_strides, work of ``addressing``)
    ACC_DTYPE: tl.constexpr,  # of products
    TILE: tl.constexpr,
    REDUCE: tl.constexpr,
):
    """Return Σ dy and Σ dy·(x − shift) over the rows, float64 [columns] each.

    Without a grad_out, Σ(x − shift) and Σ(x − shift)². The shift depends on loads, and on other threads: it is computed
    in the first iteration, when the tiles of the next ones are already being loaded.
    """
    COLUMNS: tl.constexpr = TILE.columns
    SUM_ROWS: tl.constexpr = TILE.rows >> REDUCE.halvings[0]
    SUM_POSITIONS: tl.constexpr = TILE.positions >> (REDUCE.halvings[1] + REDUCE.halvings[2])
    SQUARES: tl.constexpr = data[0] is None
    first = tl.zeros((SUM_ROWS, SUM_POSITIONS, COLUMNS), tl.float64)
    second = tl.zeros((SUM_ROWS, SUM_POSITIONS, COLUMNS), tl.float64)
    shift = tl.zeros((1, 1, COLUMNS), ACC_DTYPE)
    if REDUCE.stages == 0:
        tile = _load_tile(begin, end, data, TILE.mask_positions, TILE)
        shift = shift_of(candidates).to(ACC_DTYPE)[None, None, :]
        first, second = _accumulate((first, second), tile, shift, SQUARES, TILE.mask_positions, REDUCE)
    else:
        tiles = (end - begin) // TILE.rows
        for index in tl.range(0, tiles, num_stages=REDUCE.stages):
            tile = _load_tile(begin + index * TILE.rows, end, data, TILE.mask_positions, TILE)
            if index == 0:
                shift = shift_of(candidates).to(ACC_DTYPE)[None, None, :]
            first, second = _accumulate((first, second), tile, shift, SQUARES, TILE.mask_positions, REDUCE)
        if TILE.rows > 1:  # noqa: SIM102 - Triton evaluates both sides of an "and"
            if begin + tiles * TILE.rows < end:  # a last tile with fewer rows
                tile = _load_tile(begin + tiles * TILE.rows, end, data, True, TILE)
                shift = shift_of(candidates).to(ACC_DTYPE)[None, None, :]
                first, second = _accumulate((first, second), tile, shift, SQUARES, True, REDUCE)
    first, second = sum_pair(first, second, 1)
    return sum_pair(first, second, 0)


@triton.jit
def block_channels(block, channel_length, columns, blocks_per_channel, TILE: tl.constexpr, REDUCE: tl.constexpr):
    """Return for each channel of a block, [REDUCE.channels]:

    its index (C if it is none), the column with which it begins, its columns in the block, the ordinal of the block
    among those of the channel, and the number of unused entries if it is the channel's last block.
    """
    if REDUCE.channel_elements == 1:
        COLUMNS: tl.constexpr = TILE.columns
        channels = block_indices(block, COLUMNS)
        begin = tl.arange(0, COLUMNS)
        length = tl.full((COLUMNS,), 1, tl.int32)
        entry, unused = 0, 0
    else:
        first = block * TILE.segment
        channels = first // channel_length + tl.arange(0, REDUCE.channels)
        channel_end = (channels + 1) * channel_length - first
        begin = tl.maximum(channel_end - channel_length, 0)
        length = tl.maximum(tl.minimum(channel_end, addressing.columns_left(block, columns, 1, TILE)) - begin, 0)
        entry = block - channels * channel_length // TILE.segment
        unused = tl.where(channel_end <= TILE.segment, blocks_per_channel - 1 - entry, 0)
        channels = tl.where(length > 0, channels, columns // channel_length).to(tl.int64)
    return channels, begin, length, entry, unused


@triton.jit
def gather_by_channel(values, begin, length, REDUCE: tl.constexpr):
    """Gather a block's columns to [channels, columns of each], and 0 where a channel has no more."""
    CHANNELS: tl.constexpr = REDUCE.channels
    ELEMENTS: tl.constexpr = REDUCE.channel_elements
    element = tl.arange(0, ELEMENTS)[None, :]
    inside = element < length[:, None]
    source = tl.reshape(tl.where(inside, begin[:, None] + element, 0), (CHANNELS * ELEMENTS,))
    return tl.where(inside, tl.reshape(tl.gather(values, source, 0), (CHANNELS, ELEMENTS)), 0.0)


@triton.jit
def store_entries(target, values, channels, C, entries, blocks_per_channel):
    """Store a part's values for the channels of a block, [parts, blocks_per_channel, C] each; 0 in unused entries.

    ``entries`` is (part, parts, entry and unused of ``block_channels``). ``blocks_per_channel`` is not in it: Triton
    knows at compile time where it is 1, but not in a tuple.
    """
    part, parts, entry, unused = entries
    inside = channels < C
    pointers = target + (int64(part) * blocks_per_channel + entry) * C + channels
    for item in tl.static_range(len(values)):
        item_pointers = pointers + item * int64(parts) * blocks_per_channel * C
        tl.store(item_pointers, values[item], mask=inside)
        if blocks_per_channel > 1:
            for further in range(1, tl.max(unused, axis=0) + 1):
                zeros = tl.zeros_like(values[item])
                tl.store(item_pointers + int64(further) * C, zeros, mask=inside & (further <= unused))


@triton.jit
def _load_invstd(invstd, channels, C, grad_weight):
    """Load invstd for grad_weight, float64, before the sums are complete; 0 where grad_weight is not wanted."""
    if grad_weight is not None:
        result = to_float32(tl.load(invstd + channels, mask=channels < C, other=0.0)).to(tl.float64)
    else:
        result = 0.0
    return result


@triton.jit
def _store_results(dy, dy_xmu, channel_invstd, channels, C, outputs, strides):
    """Store the sums of a block of channels, and the gradients computed from them, where they are wanted.

    ``outputs`` are (sum_dy, sum_dy_xmu, grad_weight, grad_bias).
    """
    sum_dy, sum_dy_xmu, grad_weight, grad_bias = outputs
    inside = channels < C
    if sum_dy is not None:
        store_rounded(sum_dy + channels * strides[0], dy.to(tl.float32), inside)
    if sum_dy_xmu is not None:
        store_rounded(sum_dy_xmu + channels * strides[1], dy_xmu.to(tl.float32), inside)
    if grad_weight is not None:
        store_rounded(grad_weight + channels * strides[2], (dy_xmu * channel_invstd).to(tl.float32), inside)
    if grad_bias is not None:
        store_rounded(grad_bias + channels * strides[3], dy.to(tl.float32), inside)


@triton.jit
def batch_norm_reduce_backward(
    grad_out,  # [N, columns, positions]
    input,  # [N, columns, positions]
    mean,  # [C]
    partial,  # float64 [2, parts, blocks_per_channel, C], or None where a CTA has whole channels
    invstd,  # [C]; this and the outputs are None where there is a ``partial``
    sum_dy,  # [C], or None
    sum_dy_xmu,  # [C], or None
    grad_weight,  # [C], or None
    grad_bias,  # [C], or None
    output_strides,  # of these four
    N,
    columns,
    positions,
    rows_per_part,
    channel_length,  # columns of a channel: 1, or HxW for segment tiles
    blocks_per_channel,
    grad_out_strides,  # of sample, column and position
    input_strides,
    TILE: tl.constexpr,  # tiles.TileSpec
    REDUCE: tl.constexpr,  # tiles.ReduceSpec
):
    """Compute Σ dy and Σ dy·(x − mean) over a part of the rows of a block of columns a program.

    Where a CTA has whole channels, the results follow at once. Otherwise ``partial`` takes the sums, and the combine
    kernel adds them up.
    """
    pdl_launch_dependents()
    COLUMNS: tl.constexpr = TILE.columns
    block, part, parts, position_blocks, begin, end = cta_work(rows_per_part, N, columns, positions, TILE, REDUCE)
    work = (position_blocks, block, columns, positions)
    ACC_DTYPE: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float32 else tl.float32
    column_channels = addressing.column_channels(block, channel_length, TILE)
    C = columns // channel_length
    column_mean = addressing.load_channels(mean, column_channels, C)
    candidates = (tl.reshape(column_mean, (COLUMNS,)),)
    channels, first_column, length, entry, unused = block_channels(
        block, channel_length, columns, blocks_per_channel, TILE, REDUCE
    )
    channel_invstd = _load_invstd(invstd, channels, C, grad_weight)
    data = (grad_out, input, grad_out_strides, input_strides, work)
    dy, dy_xmu = reduce_rows(begin, end, candidates, data, ACC_DTYPE, TILE, REDUCE)
    if REDUCE.channel_elements > 1:
        dy = gather_by_channel(dy, first_column, length, REDUCE)
        dy, dy_xmu = sum_pair(dy, gather_by_channel(dy_xmu, first_column, length, REDUCE), 1)
    if partial is None:
        outputs = (sum_dy, sum_dy_xmu, grad_weight, grad_bias)
        _store_results(dy, dy_xmu, channel_invstd, channels, C, outputs, output_strides)
    else:
        store_entries(partial, (dy, dy_xmu), channels, C, (part, parts, entry, unused), blocks_per_channel)


@triton.jit
def batch_norm_reduce_backward_combine(
    partial,  # float64 [2, parts, C]
    invstd,  # [C]
    sum_dy,  # [C], or None
    sum_dy_xmu,  # [C], or None
    grad_weight,  # [C], or None
    grad_bias,  # [C], or None
    output_strides,  # of these four
    parts,  # and entries of each
    C,
    ROWS: tl.constexpr,  # parts of a tile
    CHANNELS: tl.constexpr,  # of a tile
    ONE_TILE: tl.constexpr,  # there are no more parts than ROWS
):
    """Second-stage reduction: add up the parts of a block of channels a program, in a fixed order."""
    channels = block_indices(tl.program_id(0), CHANNELS)
    inside = channels < C
    channel_invstd = _load_invstd(invstd, channels, C, grad_weight)  # which the launch before does not write
    pdl_wait()
    partial_dy_xmu = partial + int64(parts) * C
    offsets = tl.arange(0, ROWS).to(tl.int64)[:, None] * C + channels[None, :]
    mask = (tl.arange(0, ROWS) < parts)[:, None] & inside[None, :]
    dy = tl.load(partial + offsets, mask=mask, other=0.0)
    dy_xmu = tl.load(partial_dy_xmu + offsets, mask=mask, other=0.0)
    if not ONE_TILE:
        for start in range(ROWS, parts, ROWS):
            rows = start + tl.arange(0, ROWS)
            mask = (rows < parts)[:, None] & inside[None, :]
            offsets = rows.to(tl.int64)[:, None] * C + channels[None, :]
            dy += tl.load(partial + offsets, mask=mask, other=0.0)
            dy_xmu += tl.load(partial_dy_xmu + offsets, mask=mask, other=0.0)
    outputs = (sum_dy, sum_dy_xmu, grad_weight, grad_bias)
    total_dy, total_dy_xmu = tl.sum(dy, axis=0), tl.sum(dy_xmu, axis=0)
    _store_results(total_dy, total_dy_xmu, channel_invstd, channels, C, outputs, output_strides)


@triton.jit
def _load_candidate(pointer, row, position, work, column, strides, TILE: tl.constexpr):
    """Load the element at a position of a row, or at its last, of each column."""
    position_blocks, _, columns, positions = work
    row_position = tl.minimum(addressing.first_position(row, position_blocks, TILE) + position, positions - 1)
    offset = addressing.row_offset(row, row_position, position_blocks, strides, TILE)
    return to_float32(tl.load(pointer + offset + column * strides[1], mask=column < columns, other=0.0))


@triton.jit
def _count_positions(begin, end, position_blocks, positions, TILE: tl.constexpr):
    """Return how many positions rows have in all; the last row of a sample may have fewer than the others."""
    if TILE.one_sample:
        count = tl.minimum(int64(end) * TILE.positions, positions) - int64(begin) * TILE.positions
    else:
        samples = int64(end // position_blocks - begin // position_blocks)
        missing = samples * (int64(position_blocks) * TILE.positions - positions)
        count = int64(end - begin) * TILE.positions - missing
    return count


@triton.jit
def _store_statistics(channel_mean, variance, channels, C, outputs, eps_bits):
    """Store mean and invstd of a block of channels; ``outputs`` are (mean, invstd, their strides)."""
    mean, invstd, strides = outputs
    channel_invstd = 1.0 / tl.sqrt(nan_where_infinite(variance) + float64_from_bits(eps_bits))
    store_rounded(mean + channels * strides[0], channel_mean.to(tl.float32), channels < C)
    store_rounded(invstd + channels * strides[1], channel_invstd.to(tl.float32), channels < C)


@triton.jit
def batch_norm_stats(
    input,  # [N, columns, positions]
    # float64 [3, parts, blocks_per_channel, C]: count, mean and Σ(x − mean)²; None where a CTA has whole channels
    moments,
    mean,  # [C], or None where there are ``moments``
    invstd,  # [C], or None
    output_strides,  # of these two
    eps_bits,  # of a float64
    N,
    columns,
    positions,
    rows_per_part,
    channel_length,  # columns of a channel: 1, or HxW for segment tiles
    blocks_per_channel,
    strides,  # of sample, column and position
    TILE: tl.constexpr,  # tiles.TileSpec
    REDUCE: tl.constexpr,  # tiles.ReduceSpec
):
    """Compute the moments of a part of the rows of a block of columns a program.

    Shifted moments, about the median of three elements of the column: so a constant channel has a variance of exactly
    0, and an outlier does not become the shift. At the end they are converted to the mean and the squares about it, and
    those of a channel's columns are combined by Chan's formula.

    Where a CTA has whole channels, the statistics follow at once. Otherwise ``moments`` takes them, and the combine
    kernel does the rest.
    """
    pdl_launch_dependents()
    block, part, parts, position_blocks, begin, end = cta_work(rows_per_part, N, columns, positions, TILE, REDUCE)
    work = (position_blocks, block, columns, positions)
    column = int64(block) * TILE.segment + tl.arange(0, TILE.columns)
    candidates = (
        _load_candidate(input, begin, 0, work, column, strides, TILE),
        _load_candidate(input, (begin + end) // 2, TILE.positions // 2, work, column, strides, TILE),
        _load_candidate(input, end - 1, TILE.positions - 1, work, column, strides, TILE),
    )
    # The square of an odd integer is 1 more than a multiple of 8: float32 squares of float16 mantissas round down.
    ACC_DTYPE: tl.constexpr = tl.float32 if input.dtype.element_ty == tl.bfloat16 else tl.float64
    data = (None, input, strides, strides, work)
    sums, squares = reduce_rows(begin, end, candidates, data, ACC_DTYPE, TILE, REDUCE)
    column_count = _count_positions(begin, end, position_blocks, positions, TILE).to(tl.float64)
    mean_shifted = divide(sums, column_count, 1.0 / column_count)
    squares = squares - mean_shifted * sums
    squares = tl.where(squares < 0.0, 0.0, squares)
    part_mean = shift_of(candidates) + mean_shifted
    channels, first_column, length, entry, unused = block_channels(
        block, channel_length, columns, blocks_per_channel, TILE, REDUCE
    )
    if REDUCE.channel_elements > 1:
        means = gather_by_channel(part_mean, first_column, length, REDUCE)
        column_squares = gather_by_channel(squares, first_column, length, REDUCE)
        part_mean = tl.sum(means, axis=1) / length.to(tl.float64)
        inside = tl.arange(0, REDUCE.channel_elements)[None, :] < length[:, None]
        deviation = tl.where(inside, means - part_mean[:, None], 0.0)
        squares = tl.sum(column_squares + column_count * deviation * deviation, axis=1)
    count = column_count * length.to(tl.float64)
    C = columns // channel_length
    if moments is None:
        _store_statistics(part_mean, squares / count, channels, C, (mean, invstd, output_strides), eps_bits)
    else:
        entries = (part, parts, entry, unused)
        store_entries(moments, (count, part_mean, squares), channels, C, entries, blocks_per_channel)


@triton.jit
def _load_moments(moments, start, parts, stride, channels, C, ROWS: tl.constexpr):
    """Load count, mean and squares of ROWS parts of a block of channels, and their mask.

    ``stride``: elements between the three.
    """
    rows = start + tl.arange(0, ROWS).to(tl.int64)
    mask = (rows < parts)[:, None] & (channels < C)[None, :]
    pointers = moments + rows[:, None] * C + channels[None, :]
    count = tl.load(pointers, mask=mask, other=0.0)
    means = tl.load(pointers + stride, mask=mask, other=0.0)
    return count, means, tl.load(pointers + 2 * stride, mask=mask, other=0.0), mask


@triton.jit
def _squares_about(channel_mean, count, means, squares, mask):
    """Return the parts' sums of squares about the mean of all of them."""
    deviation = means - channel_mean[None, :]
    return tl.where(mask, squares + count * deviation * deviation, 0.0)


@triton.jit
def batch_norm_stats_combine(
    moments,  # float64 [3, parts, C]
    mean,  # [C]
    invstd,  # [C]
    output_strides,  # of these two
    eps_bits,  # of a float64
    parts,  # and entries of each
    C,
    ROWS: tl.constexpr,  # parts of a tile
    CHANNELS: tl.constexpr,  # of a tile
    ONE_TILE: tl.constexpr,  # there are no more parts than ROWS
):
    """Second-stage reduction: combine the moments of a block of channels a program, by Chan's formula.

    First the means, weighted by their counts, give the mean of all; then, in a second pass over the parts, to each
    part's squares comes its count times the squared distance of the means. Both in a fixed order.
    """
    pdl_wait()
    channels = block_indices(tl.program_id(0), CHANNELS)
    stride = int64(parts) * C
    count, means, part_squares, mask = _load_moments(moments, 0, parts, stride, channels, C, ROWS)
    total_count = count
    total = count * means
    if not ONE_TILE:
        for start in range(ROWS, parts, ROWS):
            part_count, means, _, _ = _load_moments(moments, start, parts, stride, channels, C, ROWS)
            total_count += part_count
            total += part_count * means
    n = tl.sum(total_count, axis=0)
    channel_mean = tl.sum(total, axis=0) / n
    if not ONE_TILE:
        count, means, part_squares, mask = _load_moments(moments, 0, parts, stride, channels, C, ROWS)
    squares = _squares_about(channel_mean, count, means, part_squares, mask)
    if not ONE_TILE:
        for start in range(ROWS, parts, ROWS):
            count, means, part_squares, mask = _load_moments(moments, start, parts, stride, channels, C, ROWS)
            squares += _squares_about(channel_mean, count, means, part_squares, mask)
    variance = tl.sum(squares, axis=0) / n
    _store_statistics(channel_mean, variance, channels, C, (mean, invstd, output_strides), eps_bits)


@triton.jit
def batch_norm_gather_stats(
    mean,  # [ranks, C]
    invstd,  # [ranks, C]
    running_mean,  # [C], or None
    running_var,  # [C], or None
    counts,  # [ranks]
    mean_all,  # [C]
    invstd_all,  # [C]
    ranks,
    C,
    momentum_bits,  # of a float64
    eps_bits,  # of a float64
    running_mean_stride,
    running_var_stride,
    mean_all_stride,
    invstd_all_stride,
    ROWS: tl.constexpr,  # ranks of a tile
    CHANNELS: tl.constexpr,  # of a tile
):
    """Combine the ranks' statistics of a block of channels a program, by Chan's formula in float64.

    First the means, weighted by their counts, give the mean of all; then, in a second pass over the ranks, to each
    rank's variance comes the squared distance of the means. A rank with a count of 0 adds nothing, whatever its
    statistics are. The running statistics are updated with momentum, the variance with Bessel's correction.
    """
    channels = block_indices(tl.program_id(0), CHANNELS)
    inside = channels < C
    eps = float64_from_bits(eps_bits)
    momentum = float64_from_bits(momentum_bits)
    weighted_means = tl.zeros((ROWS, CHANNELS), tl.float64)
    total_counts = tl.zeros((ROWS,), tl.float64)
    for start in range(0, ranks, ROWS):
        rank = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (rank < ranks)[:, None] & inside[None, :]
        count = tl.load(counts + rank, mask=rank < ranks, other=0).to(tl.float64)
        total_counts += count
        pointers = mean + rank[:, None] * C + channels[None, :]
        rank_mean = to_float32(tl.load(pointers, mask=mask, other=0.0)).to(tl.float64)
        weighted_means += tl.where(count[:, None] == 0.0, 0.0, rank_mean * count[:, None])
    n = tl.sum(total_counts)
    total_mean = tl.sum(weighted_means, axis=0) / n
    squares = tl.zeros((ROWS, CHANNELS), tl.float64)
    for start in range(0, ranks, ROWS):
        rank = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (rank < ranks)[:, None] & inside[None, :]
        count = tl.load(counts + rank, mask=rank < ranks, other=0).to(tl.float64)
        offsets = rank[:, None] * C + channels[None, :]
        deviation = to_float32(tl.load(mean + offsets, mask=mask, other=0.0)).to(tl.float64) - total_mean[None, :]
        rank_invstd = to_float32(tl.load(invstd + offsets, mask=mask, other=1.0)).to(tl.float64)
        rank_squares = (1.0 / (rank_invstd * rank_invstd) - eps + deviation * deviation) * count[:, None]
        squares += tl.where(count[:, None] == 0.0, 0.0, rank_squares)
    total_squares = tl.sum(squares, axis=0)
    if running_mean is not None:
        pointers = running_mean + channels * running_mean_stride
        decayed = (1.0 - momentum) * to_float32(tl.load(pointers, mask=inside, other=0.0)).to(tl.float64)
        store_rounded(pointers, (decayed + momentum * total_mean).to(tl.float32), inside)
    if running_var is not None:
        pointers = running_var + channels * running_var_stride
        decayed = (1.0 - momentum) * to_float32(tl.load(pointers, mask=inside, other=0.0)).to(tl.float64)
        store_rounded(pointers, (decayed + momentum * (total_squares / (n - 1.0))).to(tl.float32), inside)
    store_rounded(mean_all + channels * mean_all_stride, total_mean.to(tl.float32), inside)
    pointers = invstd_all + channels * invstd_all_stride
    store_rounded(pointers, (1.0 / tl.sqrt(total_squares / n + eps)).to(tl.float32), inside)
