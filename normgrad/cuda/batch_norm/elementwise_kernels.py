"""Synchronised BatchNorm, element by element, and the statistics of all ranks; tiles as in ``batch_norm_tiles``.

Programs are numbered with the blocks of channels fastest.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.batch_norm.addressing import (
    channels_of,
    load_vector,
    place_blocks_of,
    rows_from,
    tile_at,
    tile_mask,
)
from normgrad.cuda.device.common import float64_of_bits, indices, put, wide


@triton.jit
def _total(counter, count, BLOCK: tl.constexpr):
    """The sum of the counter, as float64."""
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(counter + place, mask=place < count, other=0).to(tl.float64)
    return tl.sum(total)


@triton.jit
def _gradient(dy, xmu, inverse, mean_dy, mean_dy_xmu, scale):
    """``(dy − mean_dy − xmu·inverse²·mean_dy_xmu)·inverse·scale`` from statistics in float64.

    Of float32 data in the order of the formula: a coefficient like inverse² may overflow where none of the terms does.
    """
    if dy.dtype == tl.float64:
        factor = inverse
        if scale is not None:
            factor = factor * scale
        result = (dy - mean_dy - xmu * (inverse * inverse * mean_dy_xmu)) * factor
    else:
        inverse = inverse.to(tl.float32)
        result = (dy - mean_dy.to(tl.float32) - xmu * inverse * inverse * mean_dy_xmu.to(tl.float32)) * inverse
        if scale is not None:
            result = result * scale
    return result


@triton.jit
def batch_norm_elemt_backward(
    grad_out,  # [N, C, P]
    input,  # [N, C, P]
    mean,  # [C]
    invstd,  # [C]
    weight,  # [C], or None
    sum_dy,  # [C]
    sum_dy_xmu,  # [C]
    counter,  # [ranks]
    grad_input,  # [N, C, P]
    ranks,
    N,
    C,
    P,
    run,
    grad_out_strides,  # of sample, channel and place
    input_strides,
    grad_input_strides,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    STRETCH: tl.constexpr,
    ALONE: tl.constexpr,  # there is one sample
    WHOLE: tl.constexpr,
    MASKED: tl.constexpr,  # whether the tiles are more than the places, and than the channels
    WIDE: tl.constexpr,  # offsets in a tile, or the number of rows, need 64 bits
    VECTOR: tl.constexpr,  # what divides places and strides of samples and channels, where the compiler cannot know
    RANKS: tl.constexpr,
):
    """The gradient of a tile."""
    channel_blocks = tl.cdiv(C, STRETCH)
    several = place_blocks_of(P, PLACES, WHOLE)
    block = tl.program_id(0) % channel_blocks
    rows = rows_from(tl.program_id(0) // channel_blocks * ROWS, ROWS, WIDE)
    end = N * several
    if ALONE:
        place_blocks: tl.constexpr = None
    else:
        place_blocks = several
    mask = tile_mask(rows, end, place_blocks, block, C, P, PLACES, CHANNELS, STRETCH, MASKED, VECTOR)
    dy_at = tile_at(grad_out, rows, place_blocks, block, grad_out_strides, PLACES, CHANNELS, STRETCH, WIDE, VECTOR)
    x_at = tile_at(input, rows, place_blocks, block, input_strides, PLACES, CHANNELS, STRETCH, WIDE, VECTOR)
    dy = tl.load(dy_at, mask=mask)
    x = tl.load(x_at, mask=mask)
    channels = channels_of(block, run, CHANNELS, STRETCH)
    # In float64 where float32 is written, so that it is rounded once.
    PRECISION: tl.constexpr = tl.float64 if grad_input.dtype.element_ty == tl.float32 else tl.float32
    per_element = 1.0 / _total(counter, ranks, RANKS)
    inverse = load_vector(invstd, channels, C // run).to(tl.float64)
    mean_dy = load_vector(sum_dy, channels, C // run) * per_element
    mean_dy_xmu = load_vector(sum_dy_xmu, channels, C // run) * per_element
    scale = None
    if weight is not None:
        scale = load_vector(weight, channels, C // run)
    xmu = wide(x).to(PRECISION) - load_vector(mean, channels, C // run)
    result = _gradient(wide(dy).to(PRECISION), xmu, inverse, mean_dy, mean_dy_xmu, scale)
    put(
        tile_at(grad_input, rows, place_blocks, block, grad_input_strides, PLACES, CHANNELS, STRETCH, WIDE, VECTOR),
        result,
        mask,
    )


@triton.jit
def batch_norm_elemt(
    input,  # [N, C, P]
    weight,  # [C], or None
    bias,  # [C], or None
    mean,  # [C]
    invstd,  # [C]
    output,  # [N, C, P]
    N,
    C,
    P,
    run,
    input_strides,  # of sample, channel and place
    output_strides,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    STRETCH: tl.constexpr,
    ALONE: tl.constexpr,  # there is one sample
    WHOLE: tl.constexpr,
    MASKED: tl.constexpr,  # whether the tiles are more than the places, and than the channels
    WIDE: tl.constexpr,  # offsets in a tile, or the number of rows, need 64 bits
    VECTOR: tl.constexpr,  # what divides places and strides of samples and channels, where the compiler cannot know
):
    """The normalised tile."""
    channel_blocks = tl.cdiv(C, STRETCH)
    several = place_blocks_of(P, PLACES, WHOLE)
    block = tl.program_id(0) % channel_blocks
    rows = rows_from(tl.program_id(0) // channel_blocks * ROWS, ROWS, WIDE)
    end = N * several
    if ALONE:
        place_blocks: tl.constexpr = None
    else:
        place_blocks = several
    mask = tile_mask(rows, end, place_blocks, block, C, P, PLACES, CHANNELS, STRETCH, MASKED, VECTOR)
    x_at = tile_at(input, rows, place_blocks, block, input_strides, PLACES, CHANNELS, STRETCH, WIDE, VECTOR)
    x = tl.load(x_at, mask=mask)
    channels = channels_of(block, run, CHANNELS, STRETCH)
    # In float64 where float32 is written, so that it is rounded once.
    PRECISION: tl.constexpr = tl.float64 if output.dtype.element_ty == tl.float32 else tl.float32
    result = (wide(x).to(PRECISION) - load_vector(mean, channels, C // run)) * load_vector(invstd, channels, C // run)
    if weight is not None:
        result = result * load_vector(weight, channels, C // run)
    if bias is not None:
        result = result + load_vector(bias, channels, C // run)
    put(
        tile_at(output, rows, place_blocks, block, output_strides, PLACES, CHANNELS, STRETCH, WIDE, VECTOR),
        result,
        mask,
    )


@triton.jit
def batch_norm_gather(
    mean,  # [ranks, C]
    invstd,  # [ranks, C]
    running_mean,  # [C], or None
    running_var,  # [C], or None
    counts,  # [ranks]
    mean_all,  # [C]
    invstd_all,  # [C]
    ranks,
    C,
    momentum_bits,  # float64
    eps_bits,  # float64
    running_mean_stride,
    running_var_stride,
    mean_all_stride,
    invstd_all_stride,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The statistics of a block of channels from those of the ranks, in float64."""
    channels = indices(tl.program_id(0), CHANNELS)
    inside = channels < C
    eps = float64_of_bits(eps_bits)
    momentum = float64_of_bits(momentum_bits)
    total = tl.zeros((ROWS, CHANNELS), tl.float64)
    counted = tl.zeros((ROWS,), tl.float64)
    for start in range(0, ranks, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < ranks)[:, None] & inside[None, :]
        count = tl.load(counts + rows, mask=rows < ranks, other=0).to(tl.float64)
        counted += count
        means = wide(tl.load(mean + rows[:, None] * C + channels[None, :], mask=mask, other=0.0)).to(tl.float64)
        total += tl.where(count[:, None] == 0.0, 0.0, means * count[:, None])
    n = tl.sum(counted)
    centre = tl.sum(total, axis=0) / n
    squares = tl.zeros((ROWS, CHANNELS), tl.float64)
    for start in range(0, ranks, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < ranks)[:, None] & inside[None, :]
        count = tl.load(counts + rows, mask=rows < ranks, other=0).to(tl.float64)
        offsets = rows[:, None] * C + channels[None, :]
        apart = wide(tl.load(mean + offsets, mask=mask, other=0.0)).to(tl.float64) - centre[None, :]
        inverse = wide(tl.load(invstd + offsets, mask=mask, other=1.0)).to(tl.float64)
        added = (1.0 / (inverse * inverse) - eps + apart * apart) * count[:, None]
        squares += tl.where(count[:, None] == 0.0, 0.0, added)
    summed = tl.sum(squares, axis=0)
    if running_mean is not None:
        place = running_mean + channels * running_mean_stride
        moved = (1.0 - momentum) * wide(tl.load(place, mask=inside, other=0.0)).to(tl.float64) + momentum * centre
        put(place, moved.to(tl.float32), inside)
    if running_var is not None:
        place = running_var + channels * running_var_stride
        moved = (1.0 - momentum) * wide(tl.load(place, mask=inside, other=0.0)).to(tl.float64) + momentum * (
            summed / (n - 1.0)
        )
        put(place, moved.to(tl.float32), inside)
    put(mean_all + channels * mean_all_stride, centre.to(tl.float32), inside)
    put(invstd_all + channels * invstd_all_stride, (1.0 / tl.sqrt(summed / n + eps)).to(tl.float32), inside)
