"""Tiles of data with channels, for any strides of sample, channel and place.

A tile is [ROWS, PLACES, CHANNELS], shaped so that what lies side by side in memory is read side by side. A row is a
block of PLACES places of a sample; rows are numbered with the blocks of a sample fastest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.common import int64, wide


@triton.jit
def rows_from(first, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """The numbers of a tile's rows."""
    if WIDE:
        first = int64(first)
    return first + tl.arange(0, ROWS)


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
    MASKED: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Which elements of a tile there are: where MASKED is off, all of the rows before ``end``."""
    mask = (rows < end)[:, None, None]
    if MASKED:
        left = tl.minimum(P - int64(rows % place_blocks) * PLACES, PLACES).to(tl.int32)
        if VECTOR > 1:
            left = tl.multiple_of(left, VECTOR)
        places = tl.arange(0, PLACES)[None, :] < left[:, None]
        channels = block * CHANNELS + tl.arange(0, CHANNELS) < C
        mask = mask & places[:, :, None] & channels[None, None, :]
    return mask


@triton.jit
def tile_at(
    pointer,
    rows,
    place_blocks,
    block,
    strides,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Pointers to a tile's elements, whose offsets from a row's first have 64 bits only where they need them."""
    sample_stride, channel_stride, place_stride = strides
    first = int64(rows // place_blocks) * sample_stride + int64(rows % place_blocks) * PLACES * place_stride
    places = tl.arange(0, PLACES)
    channels = tl.arange(0, CHANNELS)
    if WIDE:
        places = places.to(tl.int64)
        channels = channels.to(tl.int64)
    within = places[:, None] * place_stride + channels[None, :] * channel_stride
    corner = int64(block) * CHANNELS * channel_stride
    if VECTOR > 1:  # a hint of 1 would hide what the compiler finds by itself
        first = tl.multiple_of(first, VECTOR)
        corner = tl.multiple_of(corner, VECTOR)
    return (pointer + corner + first)[:, None, None] + within[None, :, :]


@triton.jit
def load_vector(pointer, channels, C):
    """One number for each channel of a tile."""
    return wide(tl.load(pointer + channels, mask=channels < C, other=0.0))[None, None, :]
