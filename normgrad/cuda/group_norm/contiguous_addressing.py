"""Tiles of GroupNorm for any strides of sample, channel and place.

A tile is [GROUPS, CHANNELS, PLACES]: several whole groups where they are small, part of one group where they are not.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.common import int64


@triton.jit
def strides_of(in_vectors, VECTOR: tl.constexpr, WIDE: tl.constexpr):
    """A tensor's strides: those of samples and channels come in vectors, so the compiler knows what divides them."""
    sample, channel, place = in_vectors
    if WIDE:
        channel = int64(channel)
    return int64(sample) * VECTOR, channel * VECTOR, place


@triton.jit
def part_of_team(
    HxW,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLACES: tl.constexpr,
    WORDS: tl.constexpr,
    PLACE_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """A program's team, its part of that, and what it has of a group.

    That is: its part of the places, its first word, its channels, and which elements and words of a tile there are.
    """
    PER_WORD: tl.constexpr = PLACES // WORDS
    program = tl.program_id(0)
    part = program % PARTS
    place_part = part % PLACE_PARTS
    within = (part // PLACE_PARTS) * CHANNELS + tl.arange(0, CHANNELS)
    place = int64(place_part) * PLACES
    in_tile = in_tile_of(place, within, HxW, D, GROUPS, CHANNELS, PLACES, VECTOR)
    word, word_in_tile = place, in_tile
    if PER_WORD > 1:
        word = int64(place_part) * WORDS
        word_in_tile = in_tile_of(word, within, HxW // PER_WORD, D, GROUPS, CHANNELS, WORDS, VECTOR)
    return program // PARTS, part, place_part, word, within, in_tile, word_in_tile


@triton.jit
def tile_offsets(
    strides,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLACES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The offsets of a tile's elements from its first, in 64 bits only where they need them."""
    _, channel_stride, place_stride = strides
    places = tl.arange(0, PLACES)
    channels = tl.arange(0, GROUPS)[:, None] * D + tl.arange(0, CHANNELS)[None, :]
    if WIDE:
        places = places.to(tl.int64)
        channels = channels.to(tl.int64)
    return channels[:, :, None] * channel_stride + places[None, None, :] * place_stride


@triton.jit
def tile_at(pointer, sample, channel, place, strides):
    """Where a tile begins."""
    sample_stride, channel_stride, place_stride = strides
    return pointer + int64(sample) * sample_stride + int64(channel) * channel_stride + int64(place) * place_stride


@triton.jit
def in_tile_of(
    place,
    within,
    HxW,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLACES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Which elements of a tile its groups have: all, but where the sizes do not divide."""
    places_left = tl.multiple_of(tl.minimum(HxW - place, PLACES).to(tl.int32), VECTOR)
    places = tl.arange(0, PLACES) < places_left
    return tl.broadcast_to((within < D)[None, :, None] & places[None, None, :], (GROUPS, CHANNELS, PLACES))


@triton.jit
def groups_of(item, items, group, group_blocks, GROUPS: tl.constexpr):
    """The sample and the first group of an item, and which of its groups there are."""
    groups = (item % group_blocks) * GROUPS + tl.arange(0, GROUPS)
    return item // group_blocks, groups, (groups < group) & (item >= 0) & (item < items)


@triton.jit
def tile_mask(known, in_tile, MASKED: tl.constexpr):
    """Which elements of a tile of known groups there are."""
    mask = known[:, None, None]
    if MASKED:
        mask = mask & in_tile
    return mask


@triton.jit
def loaded(
    pointer,
    offsets,  # of a tile's words
    strides,
    item,
    totals,  # items, groups of a sample, and blocks of these
    begin,  # what a program has of a group: the first channel and word, and which words there are
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """An item's tile of a tensor."""
    items, group, group_blocks = totals
    channel_in_group, word, word_in_tile = begin
    sample, _, known = groups_of(item, items, group, group_blocks, GROUPS)
    channel = (item % group_blocks) * GROUPS * D + channel_in_group
    at = tile_at(pointer, sample, channel, word, strides)
    return tl.load(at + offsets, mask=tile_mask(known, word_in_tile, MASKED), other=0)


@triton.jit
def slots_of(slots, sample, groups, known, group, PARTS: tl.constexpr, PADDED: tl.constexpr, WORDS: tl.constexpr):
    """All slots of the groups, and which of them there are."""
    parts = tl.arange(0, PADDED)
    first = int64(sample) * group
    return slots + ((first + groups)[:, None] * PARTS + parts[None, :]) * WORDS, known[:, None] & (parts < PARTS)[None]


@triton.jit
def of_channels(values):
    """Values of channels beside a folded tile, laid out over the threads as the sums over its last three axes are."""
    return values[:, :, None][:, :, None, :][:, :, :, :, None]


@triton.jit
def of_groups(values):
    """Values of groups beside a folded tile."""
    return of_channels(values[:, None])
