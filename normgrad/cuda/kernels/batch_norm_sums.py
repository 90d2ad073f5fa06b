"""The sums over a channel that synchronised BatchNorm is made of; tiles as in ``batch_norm_tiles``.

A program has a part of the rows of a block of channels. Every thread keeps float64 sums of its own, so that none waits
for another before the end; of a few numbers at a time, whose sum is float32 where those have 16 bits. Another launch
takes the parts together where there are several.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.batch_norm_tiles import load_vector, rows_from, tile_at, tile_mask
from normgrad.cuda.kernels.common import (
    indices,
    int64,
    let_next_launch_begin,
    put,
    sum_pair,
    wait_for_launch_before,
    wide,
)
from normgrad.cuda.kernels.near_zero import NEAR_ZERO, any_of


@triton.jit
def work_of(rows_of_part, N, C, P, PLACES: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr):
    """A program's block of channels, its part of how many, the blocks of places, its first row and the one after it."""
    channel_blocks = tl.cdiv(C, CHANNELS)
    place_blocks = tl.cdiv(P, PLACES)
    block = tl.program_id(0) % channel_blocks
    part = tl.program_id(0) // channel_blocks
    begin = part * rows_of_part
    end = N * place_blocks
    if WIDE:
        begin = int64(part) * rows_of_part
        end = int64(N) * place_blocks
    parts = tl.num_programs(0) // channel_blocks
    return block, part, parts, place_blocks, begin, tl.minimum(begin + rows_of_part, end)


@triton.jit
def _halved(values, AXIS: tl.constexpr, NEAR: tl.constexpr):
    """A tile's numbers added up two and two along an axis: neighbours, or those half of it apart."""
    ROWS: tl.constexpr = values.shape[0]
    PLACES: tl.constexpr = values.shape[1]
    CHANNELS: tl.constexpr = values.shape[2]
    if AXIS == 0:
        result = tl.sum(tl.reshape(values, (2, ROWS // 2, PLACES, CHANNELS)), axis=0)
    elif NEAR:
        result = tl.sum(tl.reshape(values, (ROWS, PLACES // 2, 2, CHANNELS)), axis=2)
    else:
        result = tl.sum(tl.reshape(values, (ROWS, 2, PLACES // 2, CHANNELS)), axis=1)
    return result


@triton.jit
def _folded(values, FOLDS: tl.constexpr):
    """A tile's numbers added up by a few, two and two so that roundings are few, and as float64."""
    ROWS: tl.constexpr = FOLDS[0]
    PLACES: tl.constexpr = FOLDS[1]
    NEIGHBOURS: tl.constexpr = FOLDS[2]
    for _ in tl.static_range(NEIGHBOURS):
        values = _halved(values, 1, True)
    for _ in tl.static_range(PLACES):
        values = _halved(values, 1, False)
    for _ in tl.static_range(ROWS):
        values = _halved(values, 0, False)
    return values.to(tl.float64)


@triton.jit
def _data(pointer, rows, mask, place_blocks, block, strides, PLACES, CHANNELS, MASKED: tl.constexpr, WIDE, VECTOR):
    """A tile of data."""
    at = tile_at(pointer, rows, place_blocks, block, strides, PLACES, CHANNELS, WIDE, VECTOR)
    if MASKED:
        values = tl.load(at, mask=mask, other=0.0)
    else:
        values = tl.load(at)
    return values


@triton.jit
def _tiles(row, end, data, ROWS: tl.constexpr, PLACES, CHANNELS, MASKED: tl.constexpr, WIDE: tl.constexpr, VECTOR):
    """The tiles of grad_out and input from a row on, and which elements there are; of the input alone without it."""
    grad_out, input, place_blocks, block, C, P, grad_out_strides, input_strides = data
    rows = rows_from(row, ROWS, WIDE)
    mask = tile_mask(rows, end, place_blocks, block, C, P, PLACES, CHANNELS, True, VECTOR)
    x = _data(input, rows, mask, place_blocks, block, input_strides, PLACES, CHANNELS, MASKED, WIDE, VECTOR)
    dy = x
    if grad_out is not None:
        dy = _data(grad_out, rows, mask, place_blocks, block, grad_out_strides, PLACES, CHANNELS, MASKED, WIDE, VECTOR)
    return dy, x, mask


@triton.jit
def _add(first, second, dy, x, mask, centre, ALONE: tl.constexpr, MASKED: tl.constexpr, FOLDS: tl.constexpr):
    """The sums, with those of one more tile."""
    away = wide(x).to(centre.dtype) - centre
    if MASKED:
        away = tl.where(mask, away, 0.0)  # no 0·Inf in the sums
    by = away
    if not ALONE:
        by = wide(dy).to(centre.dtype)
    first += _folded(by, FOLDS)
    second += _folded(by * away, FOLDS)
    return first, second


@triton.jit
def sums_of_rows(
    begin,
    end,
    centre,
    data,  # grad_out or None, input, blocks of places, the block of channels, C, P, the strides of both
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
    FOLDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Σ grad_out and Σ grad_out·(input − centre) for a block of channels, in the centre's precision.

    Without a grad_out, Σ(input − centre) and Σ(input − centre)².
    """
    SUMS: tl.constexpr = (ROWS >> FOLDS[0], PLACES >> (FOLDS[1] + FOLDS[2]), CHANNELS)
    ALONE: tl.constexpr = data[0] is None
    first = tl.zeros(SUMS, tl.float64)
    second = tl.zeros(SUMS, tl.float64)
    whole = (end - begin) // ROWS
    for turn in tl.range(0, whole, num_stages=STAGES):
        dy, x, mask = _tiles(begin + turn * ROWS, end, data, ROWS, PLACES, CHANNELS, MASKED, WIDE, VECTOR)
        first, second = _add(first, second, dy, x, mask, centre, ALONE, MASKED, FOLDS)
    if begin + whole * ROWS < end:
        dy, x, mask = _tiles(begin + whole * ROWS, end, data, ROWS, PLACES, CHANNELS, True, WIDE, VECTOR)
        first, second = _add(first, second, dy, x, mask, centre, ALONE, True, FOLDS)
    first, second = sum_pair(first, second, 1)
    return sum_pair(first, second, 0)


@triton.jit
def _put_gradients(dy, dy_xmu, channels, C, invstd, sum_dy, sum_dy_xmu, grad_weight, grad_bias, strides):
    """Store a block of channels' sums, and the gradients made of them, where they are wanted."""
    inside = channels < C
    if sum_dy is not None:
        put(sum_dy + channels * strides[0], dy.to(tl.float32), inside)
    if sum_dy_xmu is not None:
        put(sum_dy_xmu + channels * strides[1], dy_xmu.to(tl.float32), inside)
    if grad_weight is not None:
        inverse = wide(tl.load(invstd + channels, mask=inside, other=0.0)).to(tl.float64)
        put(grad_weight + channels * strides[2], (dy_xmu * inverse).to(tl.float32), inside)
    if grad_bias is not None:
        put(grad_bias + channels * strides[3], dy.to(tl.float32), inside)


@triton.jit
def batch_norm_part_sums(
    grad_out,  # [N, C, P]
    input,  # [N, C, P]
    mean,  # [C]
    partial,  # float64 [2, parts, C], or None where there is one part
    invstd,  # [C]; this and the outputs are None where there are more parts
    sum_dy,  # [C], or None
    sum_dy_xmu,  # [C], or None
    grad_weight,  # [C], or None
    grad_bias,  # [C], or None
    output_strides,
    N,
    C,
    P,
    rows_of_part,
    grad_out_strides,  # of sample, channel and place
    input_strides,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
    FOLDS: tl.constexpr,  # how often a tile is added up two and two: rows, places far apart, and neighbours
    STAGES: tl.constexpr,
):
    """Σ grad_out and Σ grad_out·(input − mean) over a part of the rows, for a block of channels."""
    let_next_launch_begin()
    block, part, parts, place_blocks, begin, end = work_of(rows_of_part, N, C, P, PLACES, CHANNELS, WIDE)
    channels = indices(block, CHANNELS)
    WIDER: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float32 else tl.float32
    centre = load_vector(mean, channels, C).to(WIDER)
    data = (grad_out, input, place_blocks, block, C, P, grad_out_strides, input_strides)
    first, second = sums_of_rows(begin, end, centre, data, ROWS, PLACES, CHANNELS, MASKED, WIDE, VECTOR, FOLDS, STAGES)
    if input.dtype.element_ty != tl.float32:
        # Float32 products may have been rounded as subnormals. Where both sums are 0 all is taken for zeros.
        tiny = (tl.abs(second) < NEAR_ZERO) & ((first != 0.0) | (second != 0.0)) & (channels < C)
        if any_of(tiny):
            FEWER: tl.constexpr = ROWS >> FOLDS[0]
            FOLD: tl.constexpr = (0, FOLDS[1], FOLDS[2])
            exact = centre.to(tl.float64)
            _, further = sums_of_rows(begin, end, exact, data, FEWER, PLACES, CHANNELS, True, WIDE, VECTOR, FOLD, 1)
            second = tl.where(tiny, further, second)
    if partial is None:
        outputs = (sum_dy, sum_dy_xmu, grad_weight, grad_bias)
        _put_gradients(first, second, channels, C, invstd, *outputs, output_strides)
    else:
        line = partial + int64(part) * C + channels
        tl.store(line, first, mask=channels < C)
        tl.store(line + int64(parts) * C, second, mask=channels < C)


@triton.jit
def batch_norm_finish_sums(
    partial,  # float64 [2, parts, C]
    invstd,  # [C]
    sum_dy,  # [C], or None
    sum_dy_xmu,  # [C], or None
    grad_weight,  # [C], or None
    grad_bias,  # [C], or None
    output_strides,
    parts,
    C,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ONCE: tl.constexpr,  # there are no more parts than ROWS
):
    """The sums over the parts of a block of channels, and the gradients made of them."""
    wait_for_launch_before()
    channels = indices(tl.program_id(0), CHANNELS)
    inside = channels < C
    further = partial + int64(parts) * C
    offsets = tl.arange(0, ROWS).to(tl.int64)[:, None] * C + channels[None, :]
    mask = (tl.arange(0, ROWS) < parts)[:, None] & inside[None, :]
    first = tl.load(partial + offsets, mask=mask, other=0.0)
    second = tl.load(further + offsets, mask=mask, other=0.0)
    if not ONCE:
        for start in range(ROWS, parts, ROWS):
            rows = start + tl.arange(0, ROWS)
            mask = (rows < parts)[:, None] & inside[None, :]
            offsets = rows.to(tl.int64)[:, None] * C + channels[None, :]
            first += tl.load(partial + offsets, mask=mask, other=0.0)
            second += tl.load(further + offsets, mask=mask, other=0.0)
    outputs = (sum_dy, sum_dy_xmu, grad_weight, grad_bias)
    dy, dy_xmu = tl.sum(first, axis=0), tl.sum(second, axis=0)
    _put_gradients(dy, dy_xmu, channels, C, invstd, *outputs, output_strides)
