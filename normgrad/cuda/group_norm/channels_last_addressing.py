"""Blocks of channels that lie side by side in memory: which elements a tile of them has, and sums by group.

A block has CHANNELS channels, whatever groups they belong to; a group has channels in up to OVER blocks. The places of
a sample are cut into PARTS parts, and what a group's channels in a block come to over a part is an entry of a list [N,
group, PARTS, OVER].
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.common import int64, offsets_in, sum_pair


@triton.jit
def work_at(work, blocks, parts, WIDE: tl.constexpr):
    """The sample, the part of its places and the block of its channels that a number stands for, the blocks fastest."""
    block = work % blocks
    if WIDE:
        block = int64(block)
    return work // (parts * blocks), work // blocks % parts, block


@triton.jit
def channels_of(group, D: tl.constexpr, WIDE: tl.constexpr):
    """How many channels there are."""
    C = group * D
    if WIDE:
        C = int64(group) * D
    return C


@triton.jit
def tile_offsets(strides, PLACES: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr):
    """The offsets of a tile's elements from its first."""
    _, channel_stride, place_stride = strides
    return offsets_in((place_stride, channel_stride), PLACES, CHANNELS, WIDE)


@triton.jit
def tile_at(pointer, sample, place, word, strides):
    """Where a tile begins."""
    sample_stride, channel_stride, place_stride = strides
    return pointer + int64(sample) * sample_stride + int64(word) * channel_stride + int64(place) * place_stride


@triton.jit
def tile_mask(places_left, channels_left, PLACES: tl.constexpr, CHANNELS: tl.constexpr, MASKED: tl.constexpr):
    """Which elements of a tile there are: all where MASKED is off."""
    mask = tl.full((PLACES, CHANNELS), True, tl.int1)
    if MASKED:
        places = tl.arange(0, PLACES) < tl.minimum(places_left, PLACES).to(tl.int32)
        mask = places[:, None] & (tl.arange(0, CHANNELS) < channels_left)[None, :]
    return mask


@triton.jit
def presummed(first, second, PLACES: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """The sums of two tiles over the places that a thread has, where ROWS of them are those of different threads."""
    shape: tl.constexpr = (PLACES // ROWS, ROWS, CHANNELS)
    return sum_pair(tl.reshape(first, shape), tl.reshape(second, shape), 0)


@triton.jit
def block_groups(block, group, D: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr):
    """The groups that have channels in a block, and which of them there are."""
    begin = block * CHANNELS
    groups = begin // D + tl.arange(0, GROUPS)
    return groups, (groups < group) & (groups * D < begin + CHANNELS)


@triton.jit
def of_groups(first, second, block, D: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr):
    """Sums of two values per channel of a block over the channels of each of its groups."""
    if CHANNELS % D == 0:
        first = tl.reshape(first, (GROUPS, D))
        second = tl.reshape(second, (GROUPS, D))
    else:
        begin = block * CHANNELS
        member = ((begin + tl.arange(0, CHANNELS)) // D)[None, :] == (begin // D + tl.arange(0, GROUPS))[:, None]
        first = tl.where(member, first[None, :], 0.0)
        second = tl.where(member, second[None, :], 0.0)
    return sum_pair(first, second, 1)


@triton.jit
def of_channels(values, block, D: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr):
    """For each channel of a block the value of its group."""
    begin = block * CHANNELS
    return tl.gather(values, tl.minimum((begin + tl.arange(0, CHANNELS)) // D - begin // D, GROUPS - 1), 0)


@triton.jit
def entry_of(
    sample, groups, part, block, group, D: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr, OVER: tl.constexpr
):
    """The places in the list of a block's entries for a part."""
    return ((int64(sample) * group + groups) * PARTS + part) * OVER + block - groups * D // CHANNELS


@triton.jit
def entries_of(
    begin,
    sample,
    groups,
    known,
    group,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
    OVER: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """ENTRIES of each group's entries, from a first one on: their places in the list, and which of them there are."""
    entry = (begin + tl.arange(0, ENTRIES))[None, :]
    blocks = (groups * D + D - 1) // CHANNELS - groups * D // CHANNELS + 1
    there = known[:, None] & (entry < PARTS * OVER) & (entry % OVER < blocks[:, None])
    return (int64(sample) * group + groups)[:, None] * (PARTS * OVER) + entry, there
