"""Device functions on blocks of contiguous channels: tiles, the groups that a block belongs to, and partial sums.

TILE is a ``tiles.ChannelsLastTileSpec``, ENTRIES a ``tiles.EntrySpec``. A block has TILE.channels channels, whatever
groups they belong to: several whole groups, a part of one, or an end of one and the beginning of the next. A tile is
[positions, words] of a block; a *word* is an element or a packed pair of 16-bit elements along the channels, and
pointers, offsets and strides count words. The positions of a sample are split into parts of several tiles.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.indexing import int64, tile_offsets
from normgrad.cuda.device.pack16 import to_float32
from normgrad.cuda.device.sums import sum_pair


@triton.jit
def cta_work(program, blocks, parts, TILE: tl.constexpr):
    """Return the sample, the part of its positions and the block of channels of a program; the blocks go fastest."""
    block = program % blocks
    if TILE.offset64:
        block = int64(block)
    return program // (parts * blocks), program // blocks % parts, block


@triton.jit
def channel_count(group, TILE: tl.constexpr):
    """Return the number of channels."""
    C = group * TILE.D
    if TILE.offset64:
        C = int64(group) * TILE.D
    return C


@triton.jit
def offsets_in_tile(strides, TILE: tl.constexpr):
    """Return the offsets [positions, words] of a tile's words; strides are of sample, channel and position."""
    _, channel_stride, position_stride = strides
    return tile_offsets((position_stride, channel_stride), TILE.positions, TILE.words, TILE.offset64)


@triton.jit
def tile_start(pointer, sample, position, word, strides):
    """Return the address of a tile's first word."""
    sample_stride, channel_stride, position_stride = strides
    return pointer + int64(sample) * sample_stride + int64(word) * channel_stride + int64(position) * position_stride


@triton.jit
def element_mask(positions_left, left, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Return which of [positions, SIZE] elements or words there are, ``left`` of which are in a block."""
    POSITIONS: tl.constexpr = TILE.positions
    mask = tl.full((POSITIONS, SIZE), True, tl.int1)
    if TILE.masked:
        positions = tl.arange(0, POSITIONS) < tl.minimum(positions_left, POSITIONS).to(tl.int32)
        mask = positions[:, None] & (tl.arange(0, SIZE) < left)[None, :]
    return mask


@triton.jit
def load_channels(pointer, index, inside):
    """Load a parameter or a statistic of each channel of a block, float32 [1, channels]."""
    return to_float32(tl.load(pointer + index, mask=inside, other=0.0))[None, :]


@triton.jit
def sum_within_threads(first, second, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Sum two tiles [positions, channels] to [ROWS, channels] each; different threads hold different ROWS."""
    SHAPE: tl.constexpr = (TILE.positions // ROWS, ROWS, TILE.channels)
    return sum_pair(tl.reshape(first, SHAPE), tl.reshape(second, SHAPE), 0)


@triton.jit
def block_groups(block, group, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """Return the GROUPS groups from a block's first channel on, and which of them have channels in the block."""
    begin = block * TILE.channels
    groups = begin // TILE.D + tl.arange(0, GROUPS)
    return groups, (groups < group) & (groups * TILE.D < begin + TILE.channels)


@triton.jit
def sum_by_group(first, second, block, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """Sum two values for each channel of a block, [channels], over the channels of each of its groups, [GROUPS]."""
    D: tl.constexpr = TILE.D
    if TILE.channels % D == 0:
        first = tl.reshape(first, (GROUPS, D))
        second = tl.reshape(second, (GROUPS, D))
    else:
        begin = block * TILE.channels
        member = ((begin + tl.arange(0, TILE.channels)) // D)[None, :] == (begin // D + tl.arange(0, GROUPS))[:, None]
        first = tl.where(member, first[None, :], 0.0)
        second = tl.where(member, second[None, :], 0.0)
    return sum_pair(first, second, 1)


@triton.jit
def expand_to_channels(values, block, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """Expand values of a block's groups, [GROUPS], to its channels, [channels]."""
    begin = block * TILE.channels
    return tl.gather(
        values, tl.minimum((begin + tl.arange(0, TILE.channels)) // TILE.D - begin // TILE.D, GROUPS - 1), 0
    )


@triton.jit
def entry_of_block(sample, groups, part, block, group, ENTRIES: tl.constexpr):
    """Return the indices of the entries of a block's groups for a part."""
    row = (int64(sample) * group + groups) * ENTRIES.parts + part
    return row * ENTRIES.blocks_per_group + block - groups * ENTRIES.D // ENTRIES.channels


@triton.jit
def entries_of_groups(begin, sample, groups, group_inside, group, COUNT: tl.constexpr, ENTRIES: tl.constexpr):
    """Return the indices [groups, COUNT] of the groups' entries from ``begin`` on, and which of them there are."""
    PER_GROUP: tl.constexpr = ENTRIES.parts * ENTRIES.blocks_per_group
    entry = (begin + tl.arange(0, COUNT))[None, :]
    blocks = (groups * ENTRIES.D + ENTRIES.D - 1) // ENTRIES.channels - groups * ENTRIES.D // ENTRIES.channels + 1
    inside = group_inside[:, None] & (entry < PER_GROUP) & (entry % ENTRIES.blocks_per_group < blocks[:, None])
    return (int64(sample) * group + groups)[:, None] * PER_GROUP + entry, inside
