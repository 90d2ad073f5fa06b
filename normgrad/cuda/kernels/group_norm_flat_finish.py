"""What is left of GroupNorm backward where groups are rows: the teams' sums of columns, and what is near zero."""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.common import indices, int64, wait_for_launch_before, wide
from normgrad.cuda.kernels.group_norm_again import group_again, weight_gradients_again
from normgrad.cuda.kernels.memory import put_sums
from normgrad.cuda.kernels.near_zero import NEAR_ZERO, any_of

_ROWS = tl.constexpr(256)


@triton.jit
def _sums_over(
    source,
    K,
    C,
    HxW,
    channels,
    known,
    begin,
    end,
    TEAMS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLACES: tl.constexpr,
    SIZES: tl.constexpr,
):
    """The sums of channels' numbers, or of their SIZES, over all teams and a stretch of places, in their order."""
    total = tl.zeros((TEAMS, CHANNELS, PLACES), tl.float64)
    for team in range(0, K, TEAMS):
        teams = int64(team) + tl.arange(0, TEAMS)
        rows = (teams[:, None] * C + channels[None, :]) * HxW
        known_rows = (teams < K)[:, None] & known[None, :]
        for start in range(begin, end, PLACES):
            places = start + tl.arange(0, PLACES)
            mask = known_rows[:, :, None] & (places < end)[None, None, :]
            value = tl.load(source + rows[:, :, None] + places[None, None, :], mask=mask, other=0.0)
            if SIZES:
                value = tl.abs(value)
            total += value.to(tl.float64)
    return tl.sum(tl.sum(total, axis=2), axis=0)


@triton.jit
def _are_near(sizes, rstd, rows, known, samples, group):
    """Whether rows are near zero, in the order of their sizes."""
    size = tl.load(sizes + rows, mask=known, other=0.0)
    rs = wide(tl.load(rstd + rows % samples * group + rows // samples, mask=known, other=0.0))
    return (size > 0.0) & (size * tl.minimum(tl.abs(rs), 1.0) < NEAR_ZERO)


@triton.jit
def group_norm_flat_finish(
    partial,  # float32 or float64 [tables, K, C, HxW]
    first,  # [segments, C], or None
    second,  # [segments, C], or None
    first_stride,
    second_stride,
    sizes,  # float32 [group, samples]; or None
    grad_out,  # [samples, C, HxW]
    input,  # [samples, C, HxW]
    mean,  # [samples, group]
    rstd,  # [samples, group]
    weight,  # [C], or None
    grad_input,  # [samples, C, HxW], or None
    K,
    segment,  # places per program
    samples,
    group,
    HxW,
    grad_out_strides,  # of sample, channel and place
    input_strides,
    grad_input_strides,
    D: tl.constexpr,
    TEAMS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNK: tl.constexpr,  # numbers that are computed once more at a time
    NEAR_CHANNELS: tl.constexpr,  # look for weight gradients near zero; there are both tables, in one segment
):
    """Sum a stretch of the places of a block of channels over all teams, in float64; and what is near zero once more.

    The stretch is the program's second number, the table its third.
    """
    wait_for_launch_before()
    tensors = (grad_out, input, mean, rstd, weight, grad_input)
    strides = (grad_out_strides, input_strides, grad_input_strides)
    counts = (samples, group, HxW)
    C = int64(group) * D
    channels = indices(tl.program_id(0), CHANNELS)
    inside = channels < C
    stretch = tl.program_id(1)
    which = tl.program_id(2)
    begin = stretch.to(tl.int64) * segment
    end = tl.minimum(begin + segment, HxW)
    source = partial + which.to(tl.int64) * K * C * HxW
    result = _sums_over(source, K, C, HxW, channels, inside, begin, end, TEAMS, CHANNELS, PLACES, False)
    if NEAR_CHANNELS:
        small = (tl.abs(result) < NEAR_ZERO) & (inside & (which == 0))
        if any_of(small):  # unless there are but zeros to be summed up
            source += int64(K) * C * HxW
            some = _sums_over(source, K, C, HxW, channels, small, begin, end, TEAMS, CHANNELS, PLACES, True)
            small = small & ((result != 0.0) | (some != 0.0))
        if any_of(small):
            again = weight_gradients_again(tensors, strides, counts, channels, small, D, CHANNELS, CHUNK)
            result = tl.where(small, again, result)
    put_sums(first, second, which, stretch * C + channels, result, first_stride, second_stride, inside)
    if sizes is not None:
        programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
        program = (which * tl.num_programs(1) + stretch) * tl.num_programs(0) + tl.program_id(0)
        rows = int64(samples) * group
        for block in range(program, tl.cdiv(rows, _ROWS), programs):
            begin = int64(block) * _ROWS
            row = begin + tl.arange(0, _ROWS)
            if any_of(_are_near(sizes, rstd, row, row < rows, samples, group)):
                for item in range(begin, tl.minimum(begin + _ROWS, rows)):
                    if any_of(_are_near(sizes, rstd, item + tl.arange(0, 1), True, samples, group)):
                        group_again(tensors, strides, counts, item % samples, item // samples, D, CHUNK)
