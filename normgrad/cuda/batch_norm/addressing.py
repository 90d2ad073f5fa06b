"""Device functions on tiles of data with channels, for any strides of sample, channel and position.

TILE is a ``tiles.TileSpec``. The data is [N, columns, positions]: samples, channels and spatial positions. A tile is
[rows, positions, columns], shaped so that what is contiguous in memory is loaded contiguously. A row is a block of
TILE.positions positions of a sample; rows are numbered with the ``position_blocks`` of a sample fastest. A block has
TILE.segment columns.

Where channels have few positions, a segment tile spans several of them as they are contiguous in memory. The data is
then seen as [1, C·HxW, N]: columns are the elements of a sample, of which each ``channel_length`` = HxW consecutive
ones belong to a channel (otherwise ``channel_length`` is 1), and positions are the samples.

``work`` is (position_blocks, block, columns, positions): the blocks of a sample, the CTA's block of columns, and the
sizes.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.indexing import int64
from normgrad.cuda.device.pack16 import to_float32


@triton.jit
def tile_rows(first, TILE: tl.constexpr):
    """Return the indices of a tile's rows."""
    if TILE.offset64:
        first = int64(first)
    return first + tl.arange(0, TILE.rows)


@triton.jit
def count_position_blocks(positions, TILE: tl.constexpr):
    """Return how many rows a sample has; where it is one, the compiler sees that."""
    if TILE.one_position_block:
        count = tl.full((), 1, tl.int32)
    else:
        count = tl.cdiv(positions, TILE.positions)
    return count


@triton.jit
def first_position(rows, position_blocks, TILE: tl.constexpr):
    """Return the position of its sample with which each row begins."""
    if not TILE.one_sample:
        rows = rows % position_blocks
    return int64(rows) * TILE.positions


@triton.jit
def row_offset(rows, position, position_blocks, strides, TILE: tl.constexpr):
    """Return the offsets of one position of each row."""
    offset = position * strides[2]
    if not TILE.one_sample:
        offset += int64(rows // position_blocks) * strides[0]
    return offset


@triton.jit
def columns_left(block, columns, VECTOR: tl.constexpr, TILE: tl.constexpr):
    """Return how many columns a block has; VECTOR divides that."""
    left = tl.minimum(columns - block * TILE.segment, TILE.segment)
    if VECTOR > 1:
        left = tl.multiple_of(left, VECTOR)
    return left


@triton.jit
def element_mask(rows, end, work, MASK_POSITIONS: tl.constexpr, TILE: tl.constexpr):
    """Return which elements of a tile there are; without masks all of the rows before ``end``."""
    VECTOR: tl.constexpr = TILE.vector
    position_blocks, block, columns, positions = work
    mask = (rows < end)[:, None, None]
    if MASK_POSITIONS:
        left = tl.minimum(positions - first_position(rows, position_blocks, TILE), TILE.positions).to(tl.int32)
        if VECTOR > 1 and TILE.columns == 1:
            left = tl.multiple_of(left, VECTOR)
        inside = tl.arange(0, TILE.positions)[None, :] < left[:, None]
        mask = mask & inside[:, :, None]
    if TILE.mask_columns:
        inside = tl.arange(0, TILE.columns) < columns_left(block, columns, VECTOR, TILE)
        mask = mask & inside[None, None, :]
    return mask


@triton.jit
def tile_pointers(pointer, rows, work, strides, TILE: tl.constexpr):
    """Return the addresses of a tile's elements; offsets from a row's first have 64 bits only where they need them."""
    VECTOR: tl.constexpr = TILE.vector
    position_blocks, block, _, _ = work
    _, column_stride, position_stride = strides
    row_start = row_offset(rows, first_position(rows, position_blocks, TILE), position_blocks, strides, TILE)
    positions = tl.arange(0, TILE.positions)
    columns = tl.arange(0, TILE.columns)
    if TILE.offset64:
        positions = positions.to(tl.int64)
        columns = columns.to(tl.int64)
    position_offset = positions[:, None] * position_stride
    block_start = int64(block) * TILE.segment * column_stride
    if VECTOR > 1:  # a hint of 1 would hide what the compiler finds by itself
        row_start = tl.multiple_of(row_start, VECTOR)
        block_start = tl.multiple_of(block_start, VECTOR)
        if TILE.columns > 1:
            position_offset = tl.multiple_of(position_offset, (VECTOR, VECTOR))
    offset = position_offset + columns[None, :] * column_stride
    return (pointer + block_start + row_start)[:, None, None] + offset[None, :, :]


@triton.jit
def program_tile(N, columns, positions, TILE: tl.constexpr):
    """Return rows, ``work`` and mask of the tile of a program, of which the blocks of columns go fastest."""
    column_blocks = tl.cdiv(columns, TILE.segment)
    blocks_of_sample = count_position_blocks(positions, TILE)
    work = (blocks_of_sample, tl.program_id(0) % column_blocks, columns, positions)
    rows = tile_rows(tl.program_id(0) // column_blocks * TILE.rows, TILE)
    return rows, work, element_mask(rows, N * blocks_of_sample, work, TILE.mask_positions, TILE)


@triton.jit
def column_channels(block, channel_length, TILE: tl.constexpr):
    """Return the channel of each of a tile's columns."""
    return (block * TILE.segment + tl.arange(0, TILE.columns)) // channel_length


@triton.jit
def load_channels(pointer, channels, C):
    """Load a parameter of each of a tile's columns, float32 [columns].

    Load all parameters before the first is used in the tile's shape: that exchanges it between threads, with barriers
    that the following loads would wait for one after the other.
    """
    return to_float32(tl.load(pointer + channels, mask=channels < C, other=0.0))
