"""Blocks of whole groups whose channels lie side by side: which elements a tile of them has, and sums by group."""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.common import int64, sum_pair


@triton.jit
def tile_offsets(channel_stride, place_stride, PLACES: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr):
    """The offsets of a tile's elements from its first, in 64 bits only where they need them."""
    places = tl.arange(0, PLACES)
    channels = tl.arange(0, CHANNELS)
    if WIDE:
        places = places.to(tl.int64)
        channels = channels.to(tl.int64)
    return places[:, None] * place_stride + channels[None, :] * channel_stride


@triton.jit
def known_channels(item, items, first, last, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Which of an item's channels, or of their pairs, there are."""
    within = tl.arange(0, SIZE)
    return (within < BLOCK) & (first + within < last) & (item >= 0) & (item < items)


@triton.jit
def tile_mask(first_place, HxW, known, PLACES: tl.constexpr, MASKED: tl.constexpr):
    """Which elements of a tile there are."""
    mask = known[None, :]
    if MASKED:
        left = tl.maximum(tl.minimum(HxW - first_place, PLACES), 0).to(tl.int32)
        mask = mask & (tl.arange(0, PLACES) < left)[:, None]
    return mask


@triton.jit
def of_groups(first, second, member):
    """Sums over the channels of each group of two values per channel."""
    return sum_pair(tl.where(member, first[None, :], 0.0), tl.where(member, second[None, :], 0.0), 1)


@triton.jit
def of_channels(values, D: tl.constexpr, CHANNELS: tl.constexpr, PADDED_GROUPS: tl.constexpr):
    """For each channel the value of its group."""
    return tl.gather(values, tl.minimum(tl.arange(0, CHANNELS) // D, PADDED_GROUPS - 1), 0)


@triton.jit
def slots_of(
    slots,
    sample,
    channel,
    known,
    group,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """All slots of a block's groups, and which of them there are."""
    groups = channel // D + tl.arange(0, PADDED_GROUPS)
    parts = tl.arange(0, PADDED_PARTS)
    given = (tl.arange(0, PADDED_GROUPS) < GROUPS) & (groups < group) & known
    places = slots + ((int64(sample) * group + groups)[:, None] * PARTS + parts[None, :]) * WORDS
    return places, given[:, None] & (parts < PARTS)[None, :]
