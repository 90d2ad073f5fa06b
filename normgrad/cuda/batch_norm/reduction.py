"""Device functions that reduce channels, for ``stats_kernels`` and ``reduce_backward_kernels``.

TILE is a ``tiles.TileSpec``, REDUCE a ``tiles.ReduceSpec``; tiles as in ``addressing``. A CTA reduces a part of the
rows of a block of columns. Every thread keeps float64 sums of its own, so that none waits for another before the end. A
few elements at a time are added up two and two first; in float32 where the data has 16 bits, and with few roundings.

Where there are several parts, the CTAs of a block of columns are a cluster whose first CTA combines them, or a second
launch does so. The columns of a segment tile are added up by channel at the end. A channel may then be in several
blocks: a part has an entry for each of them, [parts, blocks_per_channel, C].
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.batch_norm.addressing import (
    columns_left,
    count_position_blocks,
    element_mask,
    tile_pointers,
    tile_rows,
)
from normgrad.cuda.device.indexing import block_indices, int64
from normgrad.cuda.device.pack16 import to_float32
from normgrad.cuda.device.sums import sum_pair


@triton.jit
def cta_work(rows_per_part, N, columns, positions, TILE: tl.constexpr, REDUCE: tl.constexpr):
    """Return the CTA's block of columns, its part, how many parts there are, and its rows.

    The rows as (position blocks of a sample, first row, end).
    """
    column_blocks = tl.cdiv(columns, TILE.segment)
    position_blocks = count_position_blocks(positions, TILE)
    if REDUCE.cluster:
        block = tl.program_id(0) // REDUCE.cluster
        part = tl.program_id(0) % REDUCE.cluster
    else:
        block = tl.program_id(0) % column_blocks
        part = tl.program_id(0) // column_blocks
    begin, end = part_rows(part, rows_per_part, N, position_blocks, TILE)
    parts = tl.num_programs(0) // column_blocks
    return block, part, parts, position_blocks, begin, end


@triton.jit
def part_rows(part, rows_per_part, N, position_blocks, TILE: tl.constexpr):
    """Return the first row of a part and the one after its last."""
    begin = part * rows_per_part
    end = N * position_blocks
    if TILE.offset64:
        begin = int64(part) * rows_per_part
        end = int64(N) * position_blocks
    return begin, tl.minimum(begin + rows_per_part, end)


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
    pointers = tile_pointers(pointer, rows, work, strides, TILE)
    if MASK_POSITIONS or TILE.mask_columns:
        values = tl.load(pointers, mask=mask, other=0.0)
    else:
        values = tl.load(pointers)
    return values


@triton.jit
def _load_tile(row, end, data, MASK_POSITIONS: tl.constexpr, TILE: tl.constexpr):
    """Load the tiles of grad_out and input from a row on, and their mask; without a grad_out, the input twice."""
    grad_out, input, grad_out_strides, input_strides, work = data
    rows = tile_rows(row, TILE)
    mask = element_mask(rows, end, work, MASK_POSITIONS, TILE)
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
def _median(a, b, c):
    return tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))


@triton.jit
def shift_of(candidates):
    """Return the shift of the sums, [columns]: the candidate, or the median of three; 0 where that is not finite."""
    if len(candidates) == 1:
        shift = candidates[0]
    else:
        median = _median(candidates[0], candidates[1], candidates[2])
        shift = tl.where(median - median == 0.0, median, 0.0)
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
        length = tl.maximum(tl.minimum(channel_end, columns_left(block, columns, 1, TILE)) - begin, 0)
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
