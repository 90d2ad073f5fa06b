"""Device functions on tiles of groups, for any strides of sample, channel and position.

TILE is a ``tiles.GroupTileSpec``. A tile is [groups, channels, words]: several whole groups of a sample where they are
small, or the part of one group that a CTA of a CTA group holds. A *work item* is what a CTA group does at a time: the
tile's groups of a sample; a sample has ``group_blocks`` of them. A *word* is an element or a packed pair of 16-bit
elements; pointers, offsets and strides count words.

``work`` is (items, group, group_blocks): the number of work items, the groups of a sample, and blocks of these.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.indexing import int64


@triton.jit
def in_words(strides, TILE: tl.constexpr):
    """Return (sample, channel, position) strides in words; the host passes the first two in vectors.

    The multiplication shows the compiler that vectors divide them.
    """
    sample, channel, position = strides
    if TILE.offset64:
        channel = int64(channel)
    return int64(sample) * TILE.vector, channel * TILE.vector, position


@triton.jit
def cta_position(HxW, TILE: tl.constexpr):
    """Return the CTA's group and part, its position part, first word, channels in the group, and two masks.

    The masks say which elements and which words of a tile the groups have: all, but where the sizes do not divide.
    """
    PER_WORD: tl.constexpr = TILE.positions // TILE.words
    program = tl.program_id(0)
    part = program % TILE.parts
    position_part = part % TILE.position_parts
    channels = (part // TILE.position_parts) * TILE.channels + tl.arange(0, TILE.channels)
    position = int64(position_part) * TILE.positions
    in_group = _mask_in_group(position, channels, HxW, TILE.positions, TILE)
    word, word_in_group = position, in_group
    if PER_WORD > 1:
        word = int64(position_part) * TILE.words
        word_in_group = _mask_in_group(word, channels, HxW // PER_WORD, TILE.words, TILE)
    return program // TILE.parts, part, position_part, word, channels, in_group, word_in_group


@triton.jit
def _mask_in_group(first, channels, size, LENGTH: tl.constexpr, TILE: tl.constexpr):
    """Return which of [groups, channels, LENGTH] are below D channels and ``size`` elements or words of a channel."""
    GROUPS: tl.constexpr = TILE.groups
    CHANNELS: tl.constexpr = TILE.channels
    VECTOR: tl.constexpr = TILE.vector
    left = tl.multiple_of(tl.minimum(size - first, LENGTH).to(tl.int32), VECTOR)
    inside = tl.arange(0, LENGTH) < left
    return tl.broadcast_to((channels < TILE.D)[None, :, None] & inside[None, None, :], (GROUPS, CHANNELS, LENGTH))


@triton.jit
def offsets_in_tile(strides, TILE: tl.constexpr):
    """Return the offsets [groups, channels, words] of a tile's words, in 64 bits only where they need them."""
    _, channel_stride, position_stride = strides
    words = tl.arange(0, TILE.words)
    channels = tl.arange(0, TILE.groups)[:, None] * TILE.D + tl.arange(0, TILE.channels)[None, :]
    if TILE.offset64:
        words = words.to(tl.int64)
        channels = channels.to(tl.int64)
    return channels[:, :, None] * channel_stride + words[None, None, :] * position_stride


@triton.jit
def tile_start(pointer, sample, channel, word, strides):
    """Return the address of a tile's first word."""
    sample_stride, channel_stride, position_stride = strides
    return pointer + int64(sample) * sample_stride + int64(channel) * channel_stride + int64(word) * position_stride


@triton.jit
def item_groups(item, work, TILE: tl.constexpr):
    """Return the sample and the groups of a work item, and which of the groups there are."""
    items, group, group_blocks = work
    groups = (item % group_blocks) * TILE.groups + tl.arange(0, TILE.groups)
    return item // group_blocks, groups, (groups < group) & (item >= 0) & (item < items)


@triton.jit
def first_channel(item, work, channel_in_group, TILE: tl.constexpr):
    """Return the channel of the sample with which the CTA's tile of a work item begins."""
    _, _, group_blocks = work
    return (item % group_blocks) * TILE.groups * TILE.D + channel_in_group


@triton.jit
def element_mask(group_inside, word_in_group, TILE: tl.constexpr):
    """Return the mask [groups, channels, words], or [groups, 1, 1] where tiles divide the groups."""
    mask = group_inside[:, None, None]
    if TILE.masked:
        mask = mask & word_in_group
    return mask


@triton.jit
def load_tile(tensor, item, work, cta, TILE: tl.constexpr):
    """Load the CTA's tile of a work item, [groups, channels, words].

    ``tensor`` is (pointer, offsets of ``offsets_in_tile``, strides in words); ``cta`` is what the CTA holds of a group:
    (first channel, first word, mask of words).
    """
    pointer, offsets, strides = tensor
    channel_in_group, word, word_in_group = cta
    sample, _, group_inside = item_groups(item, work, TILE)
    channel = first_channel(item, work, channel_in_group, TILE)
    start = tile_start(pointer, sample, channel, word, strides)
    return tl.load(start + offsets, mask=element_mask(group_inside, word_in_group, TILE), other=0)


# The backward kernel sums a tile folded to five dimensions: groups, channels, segments, positions, adjacent positions.
# Values beside it get their trailing dimensions one at a time: so Triton lays them out over the threads as it does the
# sums over the tile's last three dimensions, and needs no layout conversion.


@triton.jit
def expand_channels(values):
    """Expand values of channels [groups, channels] to five dimensions."""
    return values[:, :, None][:, :, None, :][:, :, :, :, None]


@triton.jit
def expand_groups(values):
    """Expand values of groups [groups] to five dimensions."""
    return expand_channels(values[:, None])
