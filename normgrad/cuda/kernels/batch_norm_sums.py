"""The sums over a channel that synchronised BatchNorm is made of; tiles as in ``batch_norm_tiles``.

A program has a part of the rows of a block of channels. Every thread keeps float64 sums of its own for each element of
a vector, so that none waits for another before the end; of a few numbers at a time, whose sum is float32 where those
have 16 bits. Another launch takes the parts together.
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


@triton.jit
def rows_of(part, rows_of_part, N, place_blocks, WIDE: tl.constexpr):
    """The first row of a part, and the first that is no longer of it."""
    begin = part * rows_of_part
    end = N * place_blocks
    if WIDE:
        begin = int64(part) * rows_of_part
        end = int64(N) * place_blocks
    return begin, tl.minimum(begin + rows_of_part, end)


@triton.jit
def data_of(
    pointer,
    rows,
    mask,
    place_blocks,
    block,
    strides,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """A tile of data in a wider dtype."""
    at = tile_at(pointer, rows, place_blocks, block, strides, PLACES, CHANNELS, WIDE)
    if MASKED:
        values = tl.load(at, mask=mask, other=0.0)
    else:
        values = tl.load(at)
    return wide(values).to(DTYPE)


@triton.jit
def folded(values, FOLD_ROWS: tl.constexpr, FOLD_PLACES: tl.constexpr):
    """A tile's numbers added up by a few, those that a thread has from far apart."""
    ROWS: tl.constexpr = values.shape[0] // FOLD_ROWS
    PLACES: tl.constexpr = values.shape[1] // FOLD_PLACES
    apart = tl.reshape(values, (FOLD_ROWS, ROWS, FOLD_PLACES, PLACES, values.shape[2]))
    return tl.sum(tl.sum(apart, axis=2), axis=0).to(tl.float64)


@triton.jit
def _add_sums(
    sum_dy,
    sum_dy_xmu,
    grad_out,
    input,
    centre,
    first,
    end,
    place_blocks,
    block,
    C,
    P,
    grad_out_strides,
    input_strides,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    FOLD_ROWS: tl.constexpr,
    FOLD_PLACES: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The sums, with those of one more tile."""
    rows = rows_from(first, ROWS, WIDE)
    mask = tile_mask(rows, end, place_blocks, block, C, P, PLACES, CHANNELS, MASKED)
    WIDER: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float32 else tl.float32
    dy = data_of(grad_out, rows, mask, place_blocks, block, grad_out_strides, PLACES, CHANNELS, MASKED, WIDE, WIDER)
    x = data_of(input, rows, mask, place_blocks, block, input_strides, PLACES, CHANNELS, MASKED, WIDE, WIDER)
    xmu = x - centre
    if MASKED:
        xmu = tl.where(mask, xmu, 0.0)  # no 0·Inf in the sums
    sum_dy += folded(dy, FOLD_ROWS, FOLD_PLACES)
    sum_dy_xmu += folded(dy * xmu, FOLD_ROWS, FOLD_PLACES)
    return sum_dy, sum_dy_xmu


@triton.jit
def batch_norm_part_sums(
    grad_out,  # [N, C, P]
    input,  # [N, C, P]
    mean,  # [C]
    partial,  # float64 [2, parts, C]
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
    FOLD_ROWS: tl.constexpr,  # how many of a tile's rows and places are added up at once
    FOLD_PLACES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Σ grad_out and Σ grad_out·(input − mean) over a part of the rows, for a block of channels."""
    let_next_launch_begin()
    channel_blocks = tl.cdiv(C, CHANNELS)
    place_blocks = tl.cdiv(P, PLACES)
    block = tl.program_id(0) % channel_blocks
    part = tl.program_id(0) // channel_blocks
    channels = indices(block, CHANNELS)
    centre = load_vector(mean, channels, C)
    begin, end = rows_of(part, rows_of_part, N, place_blocks, WIDE)
    sum_dy = tl.zeros((ROWS // FOLD_ROWS, PLACES // FOLD_PLACES, CHANNELS), tl.float64)
    sum_dy_xmu = tl.zeros((ROWS // FOLD_ROWS, PLACES // FOLD_PLACES, CHANNELS), tl.float64)
    whole = (end - begin) // ROWS
    for turn in tl.range(0, whole, num_stages=STAGES):
        sum_dy, sum_dy_xmu = _add_sums(
            sum_dy,
            sum_dy_xmu,
            grad_out,
            input,
            centre,
            begin + turn * ROWS,
            end,
            place_blocks,
            block,
            C,
            P,
            grad_out_strides,
            input_strides,
            ROWS,
            PLACES,
            CHANNELS,
            FOLD_ROWS,
            FOLD_PLACES,
            MASKED,
            WIDE,
        )
    if begin + whole * ROWS < end:
        sum_dy, sum_dy_xmu = _add_sums(
            sum_dy,
            sum_dy_xmu,
            grad_out,
            input,
            centre,
            begin + whole * ROWS,
            end,
            place_blocks,
            block,
            C,
            P,
            grad_out_strides,
            input_strides,
            ROWS,
            PLACES,
            CHANNELS,
            FOLD_ROWS,
            FOLD_PLACES,
            True,
            WIDE,
        )
    first, second = sum_pair(sum_dy, sum_dy_xmu, 1)
    first, second = sum_pair(first, second, 0)
    line = partial + int64(part) * C + channels
    tl.store(line, first, mask=channels < C)
    tl.store(line + int64(tl.num_programs(0) // channel_blocks) * C, second, mask=channels < C)


@triton.jit
def batch_norm_finish_sums(
    partial,  # float64 [2, parts, C]
    invstd,  # [C]
    sum_dy,  # [C], or None
    sum_dy_xmu,  # [C], or None
    grad_weight,  # [C], or None
    grad_bias,  # [C], or None
    parts,
    C,
    sum_dy_stride,
    sum_dy_xmu_stride,
    grad_weight_stride,
    grad_bias_stride,
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
    dy, dy_xmu = tl.sum(first, axis=0), tl.sum(second, axis=0)
    if sum_dy is not None:
        put(sum_dy + channels * sum_dy_stride, dy.to(tl.float32), inside)
    if sum_dy_xmu is not None:
        put(sum_dy_xmu + channels * sum_dy_xmu_stride, dy_xmu.to(tl.float32), inside)
    if grad_weight is not None:
        inverse = wide(tl.load(invstd + channels, mask=inside, other=0.0)).to(tl.float64)
        put(grad_weight + channels * grad_weight_stride, (dy_xmu * inverse).to(tl.float32), inside)
    if grad_bias is not None:
        put(grad_bias + channels * grad_bias_stride, dy.to(tl.float32), inside)
