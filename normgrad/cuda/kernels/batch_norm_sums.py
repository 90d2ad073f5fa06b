"""The sums over a channel that synchronised BatchNorm is made of; tiles as in ``batch_norm_tiles``.

A program has a part of the rows of a block of channels. Every element of its tile keeps sums of its own, so that no
thread waits for another before the end. Another launch takes the parts together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.batch_norm_tiles import load_vector, rows_from, tile_at, tile_mask
from normgrad.cuda.kernels.common import (
    add_with_rest,
    float64_of_bits,
    indices,
    int64,
    put,
    rounded_sum,
    sum_pair,
    wait_for_launch_before,
    wide,
)


@triton.jit
def _rows_of(part, rows_of_part, N, place_blocks, WIDE: tl.constexpr):
    """The first row of a part, and the first that is no longer of it."""
    begin = part * rows_of_part
    end = N * place_blocks
    if WIDE:
        begin = int64(part) * rows_of_part
        end = int64(N) * place_blocks
    return begin, tl.minimum(begin + rows_of_part, end)


@triton.jit
def batch_norm_part_sums(
    grad_out,  # [N, C, P]
    input,  # [N, C, P]
    mean,  # [C]
    partial,  # float32 [2, parts, C]
    N,
    C,
    P,
    rows_of_part,
    grad_out_sample,
    grad_out_channel,
    grad_out_place,
    input_sample,
    input_channel,
    input_place,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Σ grad_out and Σ grad_out·(input − mean) over a part of the rows, for a block of channels."""
    channel_blocks = tl.cdiv(C, CHANNELS)
    place_blocks = tl.cdiv(P, PLACES)
    block = tl.program_id(0) % channel_blocks
    part = tl.program_id(0) // channel_blocks
    channels = indices(block, CHANNELS)
    centre = load_vector(mean, channels, C)
    begin, end = _rows_of(part, rows_of_part, N, place_blocks, WIDE)
    sum_dy = tl.zeros((ROWS, PLACES, CHANNELS), tl.float32)
    rest_dy = tl.zeros((ROWS, PLACES, CHANNELS), tl.float32)
    sum_dy_xmu = tl.zeros((ROWS, PLACES, CHANNELS), tl.float32)
    rest_dy_xmu = tl.zeros((ROWS, PLACES, CHANNELS), tl.float32)
    for turn in tl.range(0, tl.cdiv(rows_of_part, 4 * ROWS), num_stages=STAGES):
        all_dy = tl.zeros((ROWS, PLACES, CHANNELS), tl.float32)
        all_dy_xmu = tl.zeros((ROWS, PLACES, CHANNELS), tl.float32)
        for tile in tl.static_range(4):
            rows = rows_from(begin + (turn * 4 + tile) * ROWS, ROWS, WIDE)
            mask = tile_mask(rows, end, place_blocks, block, C, P, PLACES, CHANNELS, MASKED)
            dy_at = tile_at(
                grad_out,
                rows,
                place_blocks,
                block,
                grad_out_sample,
                grad_out_channel,
                grad_out_place,
                PLACES,
                CHANNELS,
                WIDE,
            )
            x_at = tile_at(
                input, rows, place_blocks, block, input_sample, input_channel, input_place, PLACES, CHANNELS, WIDE
            )
            dy = wide(tl.load(dy_at, mask=mask, other=0.0))
            xmu = tl.where(mask, wide(tl.load(x_at, mask=mask, other=0.0)) - centre, 0.0)  # no 0·Inf in the sums
            all_dy += dy
            all_dy_xmu += dy * xmu
        sum_dy, rest_dy = add_with_rest(sum_dy, rest_dy, all_dy)
        sum_dy_xmu, rest_dy_xmu = add_with_rest(sum_dy_xmu, rest_dy_xmu, all_dy_xmu)
    first, second = sum_pair(rounded_sum(sum_dy, rest_dy), rounded_sum(sum_dy_xmu, rest_dy_xmu), 1)
    first, second = sum_pair(first, second, 0)
    line = partial + int64(part) * C + channels
    tl.store(line, first, mask=channels < C)
    tl.store(line + int64(tl.num_programs(0) // channel_blocks) * C, second, mask=channels < C)


@triton.jit
def batch_norm_finish_sums(
    partial,  # float32 [2, parts, C]
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
):
    """The sums over the parts of a block of channels, and the gradients made of them."""
    wait_for_launch_before()
    channels = indices(tl.program_id(0), CHANNELS)
    inside = channels < C
    first = tl.zeros((ROWS, CHANNELS), tl.float64)
    second = tl.zeros((ROWS, CHANNELS), tl.float64)
    further = partial + int64(parts) * C
    for start in range(0, parts, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < parts)[:, None] & inside[None, :]
        offsets = rows.to(tl.int64)[:, None] * C + channels[None, :]
        first += tl.load(partial + offsets, mask=mask, other=0.0).to(tl.float64)
        second += tl.load(further + offsets, mask=mask, other=0.0).to(tl.float64)
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


@triton.jit
def _data(
    pointer,
    first,
    end,
    place_blocks,
    block,
    C,
    P,
    sample_stride,
    channel_stride,
    place_stride,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A tile in float32, and which of its elements there are."""
    rows = rows_from(first, ROWS, WIDE)
    mask = tile_mask(rows, end, place_blocks, block, C, P, PLACES, CHANNELS, MASKED)
    at = tile_at(
        pointer, rows, place_blocks, block, sample_stride, channel_stride, place_stride, PLACES, CHANNELS, WIDE
    )
    return wide(tl.load(at, mask=mask, other=0.0)), mask


@triton.jit
def _median(a, b, c):
    return tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))


@triton.jit
def batch_norm_part_moments(
    input,  # [N, C, P]
    moments,  # float64 [3, parts, C]: how many elements, their mean, Σ(x − mean)²
    N,
    C,
    P,
    rows_of_part,
    input_sample,
    input_channel,
    input_place,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The moments of a part of the rows, for a block of channels.

    An element's sums are about the middle one of the first three numbers that it met: so a constant channel has no
    variance at all, and a number that is far from the rest spoils none.
    """
    channel_blocks = tl.cdiv(C, CHANNELS)
    place_blocks = tl.cdiv(P, PLACES)
    block = tl.program_id(0) % channel_blocks
    part = tl.program_id(0) // channel_blocks
    begin, end = _rows_of(part, rows_of_part, N, place_blocks, WIDE)
    about = tl.zeros((ROWS, PLACES, CHANNELS), tl.float32)
    count = tl.zeros((ROWS, PLACES, CHANNELS), tl.int32)
    sum_away = tl.zeros((ROWS, PLACES, CHANNELS), tl.float32)
    rest_away = tl.zeros((ROWS, PLACES, CHANNELS), tl.float32)
    sum_squares = tl.zeros((ROWS, PLACES, CHANNELS), tl.float32)
    rest_squares = tl.zeros((ROWS, PLACES, CHANNELS), tl.float32)
    for turn in tl.range(0, tl.cdiv(rows_of_part, 4 * ROWS), num_stages=STAGES):
        rows = begin + turn * (4 * ROWS)
        x0, mask0 = _data(
            input,
            rows,
            end,
            place_blocks,
            block,
            C,
            P,
            input_sample,
            input_channel,
            input_place,
            ROWS,
            PLACES,
            CHANNELS,
            MASKED,
            WIDE,
        )
        x1, mask1 = _data(
            input,
            rows + ROWS,
            end,
            place_blocks,
            block,
            C,
            P,
            input_sample,
            input_channel,
            input_place,
            ROWS,
            PLACES,
            CHANNELS,
            MASKED,
            WIDE,
        )
        x2, mask2 = _data(
            input,
            rows + 2 * ROWS,
            end,
            place_blocks,
            block,
            C,
            P,
            input_sample,
            input_channel,
            input_place,
            ROWS,
            PLACES,
            CHANNELS,
            MASKED,
            WIDE,
        )
        x3, mask3 = _data(
            input,
            rows + 3 * ROWS,
            end,
            place_blocks,
            block,
            C,
            P,
            input_sample,
            input_channel,
            input_place,
            ROWS,
            PLACES,
            CHANNELS,
            MASKED,
            WIDE,
        )
        first = x0
        fresh = turn == 0
        if MASKED:
            first = tl.where(mask0, x0, tl.where(mask1, x1, tl.where(mask2, x2, x3)))
            fresh = (count == 0) & (mask0 | mask1 | mask2 | mask3)
            count += mask0.to(tl.int32) + mask1.to(tl.int32) + mask2.to(tl.int32) + mask3.to(tl.int32)
        middle = _median(first, tl.where(mask1, x1, first), tl.where(mask2, x2, first))
        about = tl.where(fresh & (middle - middle == 0.0), middle, about)
        apart0 = tl.where(mask0, x0 - about, 0.0)
        apart1 = tl.where(mask1, x1 - about, 0.0)
        apart2 = tl.where(mask2, x2 - about, 0.0)
        apart3 = tl.where(mask3, x3 - about, 0.0)
        away = (apart0 + apart1) + (apart2 + apart3)
        squares = (apart0 * apart0 + apart1 * apart1) + (apart2 * apart2 + apart3 * apart3)
        sum_away, rest_away = add_with_rest(sum_away, rest_away, away)
        sum_squares, rest_squares = add_with_rest(sum_squares, rest_squares, squares)
    if not MASKED:
        count += tl.cdiv(tl.maximum(end - begin - tl.arange(0, ROWS), 0), ROWS).to(tl.int32)[:, None, None]
    # About one number for all: of a block of channels, the mean of those that its elements' sums are about.
    seen = tl.sum(tl.sum((count > 0).to(tl.float32), axis=1), axis=0)
    origin = tl.sum(tl.sum(tl.where(count > 0, about / seen[None, None, :], 0.0), axis=1), axis=0).to(tl.float64)
    number = count.to(tl.float64)
    shift = tl.where(count > 0, about.to(tl.float64) - origin[None, None, :], 0.0)
    away = rounded_sum(sum_away, rest_away).to(tl.float64)
    squares = rounded_sum(sum_squares, rest_squares).to(tl.float64) + shift * (2.0 * away + number * shift)
    away, squares = sum_pair(away + number * shift, squares, 1)
    away, squares = sum_pair(away, squares, 0)
    numbers = tl.sum(tl.sum(number, axis=1), axis=0)
    drift = away / numbers
    spread = squares - drift * away
    channels = indices(block, CHANNELS)
    line = moments + int64(part) * C + channels
    lines = int64(tl.num_programs(0) // channel_blocks) * C
    tl.store(line, numbers, mask=channels < C)
    tl.store(line + lines, origin + drift, mask=channels < C)
    tl.store(line + 2 * lines, tl.where(spread < 0.0, 0.0, spread), mask=channels < C)


@triton.jit
def batch_norm_finish_moments(
    moments,  # float64 [3, parts, C]
    mean,  # [C]
    invstd,  # [C]
    parts,
    C,
    eps_bits,  # float64
    mean_stride,
    invstd_stride,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The mean and reciprocal deviation of a block of channels from the moments of their parts."""
    wait_for_launch_before()
    channels = indices(tl.program_id(0), CHANNELS)
    inside = channels < C
    lines = int64(parts) * C
    total = tl.zeros((ROWS, CHANNELS), tl.float64)
    counted = tl.zeros((ROWS, CHANNELS), tl.float64)
    for start in range(0, parts, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < parts)[:, None] & inside[None, :]
        place = moments + rows[:, None] * C + channels[None, :]
        number = tl.load(place, mask=mask, other=0.0)
        counted += number
        total += number * tl.load(place + lines, mask=mask, other=0.0)
    n = tl.sum(counted, axis=0)
    centre = tl.sum(total, axis=0) / n
    squares = tl.zeros((ROWS, CHANNELS), tl.float64)
    for start in range(0, parts, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < parts)[:, None] & inside[None, :]
        place = moments + rows[:, None] * C + channels[None, :]
        number = tl.load(place, mask=mask, other=0.0)
        apart = tl.load(place + lines, mask=mask, other=0.0) - centre[None, :]
        added = tl.load(place + 2 * lines, mask=mask, other=0.0) + number * apart * apart
        squares += tl.where(mask, added, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / n + float64_of_bits(eps_bits))
    put(mean + channels * mean_stride, centre.to(tl.float32), inside)
    put(invstd + channels * invstd_stride, inverse.to(tl.float32), inside)
