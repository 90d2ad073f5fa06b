"""The kernels of batch_norm_stats; ``launches`` launches them. See ``reduction`` for the algorithm."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.batch_norm.addressing import first_position, row_offset
from normgrad.cuda.batch_norm.reduction import (
    block_channels,
    cta_work,
    gather_by_channel,
    part_rows,
    reduce_rows,
    shift_of,
    store_entries,
)
from normgrad.cuda.device.cluster_exchange import init_gather, received_from, send_to_first_cta, wait_for_ctas
from normgrad.cuda.device.formulas import divide
from normgrad.cuda.device.indexing import block_indices, float64_from_bits, int64
from normgrad.cuda.device.pack16 import store_rounded, to_float32
from normgrad.cuda.device.pdl import pdl_launch_dependents, pdl_wait


@triton.jit
def _load_candidate(pointer, row, position, work, column, strides, TILE: tl.constexpr):
    """Load the element at a position of a row, or at its last, of each column."""
    position_blocks, _, columns, positions = work
    row_position = tl.minimum(first_position(row, position_blocks, TILE) + position, positions - 1)
    offset = row_offset(row, row_position, position_blocks, strides, TILE)
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
    channel_invstd = 1.0 / tl.sqrt(variance + float64_from_bits(eps_bits))
    store_rounded(mean + channels * strides[0], channel_mean.to(tl.float32), channels < C)
    store_rounded(invstd + channels * strides[1], channel_invstd.to(tl.float32), channels < C)


@triton.jit
def _part_count(part, split, TILE: tl.constexpr):
    """Return how many elements of a column a part has, as float64.

    ``split`` is (rows of a part, N, blocks of a sample, positions).
    """
    rows_per_part, N, position_blocks, positions = split
    begin, end = part_rows(part, rows_per_part, N, position_blocks, TILE)
    return _count_positions(begin, end, position_blocks, positions, TILE).to(tl.float64)


@triton.jit
def _combine_cluster(received, length, split, TILE: tl.constexpr, CLUSTER: tl.constexpr):
    """Return mean and variance of channels from the parts' means and squares, by Chan's formula.

    ``length``: columns of each channel in the block.
    """
    count = tl.zeros((), tl.float64)
    total = tl.zeros(received.shape, tl.float64)
    for part in tl.static_range(CLUSTER):
        part_count = _part_count(part, split, TILE)
        part_mean, _ = received_from(part, received)
        count += part_count
        total += part_count * part_mean
    channel_mean = total / count
    squares = tl.zeros(received.shape, tl.float64)
    for part in tl.static_range(CLUSTER):
        part_count = _part_count(part, split, TILE)
        part_mean, part_squares = received_from(part, received)
        squares += part_squares + length * part_count * (part_mean - channel_mean) * (part_mean - channel_mean)
    return channel_mean, squares / (length * count)


@triton.jit
def batch_norm_stats(
    input,  # [N, columns, positions]
    moments,  # float64 [3, parts, blocks_per_channel, C]: count, mean, Σ(x − mean)²; or None where a CTA or a cluster
    # has whole channels
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

    With one part, the statistics follow at once. With a cluster, each CTA sends its moments to the first, which
    combines them in the order of the CTAs. Otherwise ``moments`` takes them, and the combine kernel does so.
    """
    pdl_launch_dependents()
    if REDUCE.cluster > 1:
        exchange = init_gather(REDUCE.channels, REDUCE.cluster)
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
    outputs = (mean, invstd, output_strides)
    if REDUCE.cluster > 1:
        send_to_first_cta(part_mean, squares, exchange, part, REDUCE.channels, REDUCE.cluster)
        if part == 0:
            received = wait_for_ctas(exchange, 0, REDUCE.channels, REDUCE.cluster)
            split = (rows_per_part, N, position_blocks, positions)
            channel_mean, variance = _combine_cluster(received, length.to(tl.float64), split, TILE, REDUCE.cluster)
            _store_statistics(channel_mean, variance, channels, columns // channel_length, outputs, eps_bits)
    elif moments is None:
        _store_statistics(part_mean, squares / count, channels, columns // channel_length, outputs, eps_bits)
    else:
        C = columns // channel_length
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
