"""Tiles of data with channels, for any strides of sample, channel and place.

A tile is [ROWS, PLACES, CHANNELS], shaped so that what lies side by side in memory is read side by side. A row is a
block of PLACES places of a sample; rows are numbered with the blocks of a sample fastest (``place_blocks`` of them, or
None where there is but one sample). Of the channels a block has STRETCH: as many as the tile, or fewer.

Where the places of a channel are few, a tile goes over several channels as they lie in memory: its channels are then
numbers of a sample, of which ``run`` side by side are a channel's, and its places the samples.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.common import int64, wide


@triton.jit
def rows_from(first, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """The numbers of a tile's rows."""
    if WIDE:
        first = int64(first)
    return first + tl.arange(0, ROWS)


@triton.jit
def place_blocks_of(P, PLACES: tl.constexpr, WHOLE: tl.constexpr):
    """Of how many rows a sample is; WHOLE: of one, which the compiler then knows."""
    if WHOLE:
        count = tl.full((), 1, tl.int32)
    else:
        count = tl.cdiv(P, PLACES)
    return count


@triton.jit
def first_place(rows, place_blocks, PLACES: tl.constexpr):
    """The place in their sample with which rows begin."""
    if place_blocks is not None:
        rows = rows % place_blocks
    return int64(rows) * PLACES


@triton.jit
def offset_of(rows, places, place_blocks, strides):
    """How far the given places of rows are from the first element."""
    offset = places * strides[2]
    if place_blocks is not None:
        offset += int64(rows // place_blocks) * strides[0]
    return offset


@triton.jit
def tile_mask(
    rows,
    end,
    place_blocks,
    block,
    C,
    P,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    STRETCH: tl.constexpr,
    MASKED: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Which elements of a tile there are: where MASKED is off, all of the rows before ``end``."""
    mask = (rows < end)[:, None, None]
    if MASKED[0]:
        left = tl.minimum(P - first_place(rows, place_blocks, PLACES), PLACES).to(tl.int32)
        if VECTOR > 1 and CHANNELS == 1:
            left = tl.multiple_of(left, VECTOR)
        places = tl.arange(0, PLACES)[None, :] < left[:, None]
        mask = mask & places[:, :, None]
    if MASKED[1]:
        channels = tl.arange(0, CHANNELS) < channels_left(block, C, STRETCH, VECTOR)
        mask = mask & channels[None, None, :]
    return mask


@triton.jit
def channels_left(block, C, STRETCH: tl.constexpr, VECTOR: tl.constexpr):
    """How many channels a block has."""
    left = tl.minimum(C - block * STRETCH, STRETCH)
    if VECTOR > 1:
        left = tl.multiple_of(left, VECTOR)
    return left


@triton.jit
def tile_at(
    pointer,
    rows,
    place_blocks,
    block,
    strides,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    STRETCH: tl.constexpr,
    WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Pointers to a tile's elements, whose offsets from a row's first have 64 bits only where they need them."""
    _, channel_stride, place_stride = strides
    first = offset_of(rows, first_place(rows, place_blocks, PLACES), place_blocks, strides)
    places = tl.arange(0, PLACES)
    channels = tl.arange(0, CHANNELS)
    if WIDE:
        places = places.to(tl.int64)
        channels = channels.to(tl.int64)
    across = places[:, None] * place_stride
    corner = int64(block) * STRETCH * channel_stride
    if VECTOR > 1:  # a hint of 1 would hide what the compiler finds by itself
        first = tl.multiple_of(first, VECTOR)
        corner = tl.multiple_of(corner, VECTOR)
        if CHANNELS > 1:
            across = tl.multiple_of(across, (VECTOR, VECTOR))
    within = across + channels[None, :] * channel_stride
    return (pointer + corner + first)[:, None, None] + within[None, :, :]


@triton.jit
def channels_of(block, run, CHANNELS: tl.constexpr, STRETCH: tl.constexpr):
    """The channel of each number across a tile."""
    return (block * STRETCH + tl.arange(0, CHANNELS)) // run


@triton.jit
def load_vector(pointer, channels, C):
    """One number for each channel of a tile."""
    return wide(tl.load(pointer + channels, mask=channels < C, other=0.0))[None, None, :]
