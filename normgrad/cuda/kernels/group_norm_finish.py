"""What is left of GroupNorm backward when all groups are done: sums over samples and tiles, and what these tell.

Where all sums of a group in a sample are near zero, products and results may have been rounded as subnormals: these are
computed once more, and so are weight gradients near zero. Sums that are all 0 are those of zeros.

A channel's weight comes to its sums, not to its gradients. Where it is infinite those of both signs, or zeros, make the
sums NaN, which no sum of them tells: they are looked at again, one by one, since that need not be fast. Where results
lie in the data's own memory it is these that are looked at, which are NaN in such a channel: so all of its group is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.common import float64, indices, int64, put, wait_for_launch_before, wide
from normgrad.cuda.kernels.group_norm_again import group_again, weight_gradients_again
from normgrad.cuda.kernels.group_norm_blocks import channels_of
from normgrad.cuda.kernels.memory import put_sums
from normgrad.cuda.kernels.near_zero import NEAR_ZERO, any_of


@triton.jit
def _spoil(tensors, strides, sizes, scale, sample, channel, D: tl.constexpr, CHUNK: tl.constexpr):
    """NaN for the gradients of a channel's group in a sample, if it has an infinite weight, and sums that are NaN."""
    grad_out, input, mean, rstd, _, grad_input = tensors
    grad_out_strides, input_strides, grad_input_strides = strides
    _, group, HxW = sizes
    statistic = sample * group + channel // D
    mu = wide(tl.load(mean + statistic))
    rs = wide(tl.load(rstd + statistic))
    dy_at = grad_out + sample * grad_out_strides[0] + channel * grad_out_strides[1]
    x_at = input + sample * input_strides[0] + channel * input_strides[1]
    sum_g = tl.zeros((CHUNK,), tl.float32)
    sum_gx = tl.zeros((CHUNK,), tl.float32)
    for chunk in range(tl.where(tl.abs(scale) == float("inf"), tl.cdiv(HxW, CHUNK), 0)):
        places = indices(chunk, CHUNK)
        inside = places < HxW
        g = wide(tl.load(dy_at + places * grad_out_strides[2], mask=inside, other=0.0)) * scale
        gx = g * ((wide(tl.load(x_at + places * input_strides[2], mask=inside, other=0.0)) - mu) * rs)
        sum_g += tl.where(inside, g, 0.0)
        sum_gx += tl.where(inside, gx, 0.0)
    all_g, all_gx = tl.sum(sum_g, axis=0), tl.sum(sum_gx, axis=0)
    spoiled = (all_g != all_g) | (all_gx != all_gx)
    first = grad_input + sample * grad_input_strides[0] + channel // D * D * grad_input_strides[1]
    for chunk in range(tl.where(spoiled, tl.cdiv(int64(HxW) * D, CHUNK), 0)):
        elements = indices(chunk, CHUNK)
        target = first + elements // HxW * grad_input_strides[1] + elements % HxW * grad_input_strides[2]
        put(target, tl.full((CHUNK,), float("nan"), tl.float32), elements < int64(HxW) * D)


@triton.jit
def _share(factor):
    """What a factor leaves of a sum that is no smaller without it, if it is small."""
    return tl.minimum(tl.abs(wide(factor)), 1.0)


@triton.jit
def _first_of_group(
    partial,
    rstd,
    weight,
    sample,
    of_group,
    K,
    group,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Of a group's sums in a sample the first that is not 0, as twice its channel, plus 1 if it is one of gradients.

    That is -1 where not all of them are near zero, or all are 0.
    """
    MANY: tl.constexpr = 2 * D * PARTS
    share = float64(1.0)
    if NARROW:
        share = _share(tl.load(rstd + sample * group + of_group)).to(tl.float64)
    first = tl.full((CHUNK,), MANY, tl.int32)
    others = tl.zeros((CHUNK,), tl.int32)
    for begin in range(0, MANY, CHUNK):
        place = begin + tl.arange(0, CHUNK)
        channel = of_group * D + place // (2 * PARTS)
        row = (place // PARTS % 2) * int64(K) + sample * PARTS + place % PARTS
        value = tl.load(partial + row * (int64(group) * D) + channel, mask=place < MANY, other=0.0)
        size = tl.abs(value.to(tl.float64)) * share
        if weight is not None:
            size *= _share(tl.load(weight + channel, mask=place < MANY, other=0.0)).to(tl.float64)
        first = tl.where(size > 0.0, tl.minimum(first, place), first)
        others = tl.where(size < NEAR_ZERO, others, 1)  # as NaN is
    earliest = tl.min(first, axis=0)
    found = (earliest < MANY) & (tl.max(others, axis=0) == 0)
    return tl.where(found, of_group * D * 2 + earliest // PARTS, -1)


@triton.jit
def _are_some(table, K, C, channels, known, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Which of a few channels have sums that are not 0."""
    some = tl.zeros((ROWS, COLUMNS), tl.int1)
    for start in range(0, K, ROWS):
        rows = int64(start) + tl.arange(0, ROWS)
        mask = (rows < K)[:, None] & known[None, :]
        some = some | (tl.load(table + rows[:, None] * C + channels[None, :], mask=mask, other=0.0) != 0.0)
    return tl.max(some.to(tl.int32), axis=0) != 0


@triton.jit
def group_norm_finish(
    partial,  # float32 or float64 [tables, K, C]: of grad_out·x̂, and of grad_out; one of them where it is enough
    first,  # [segments, C]: where the first table's sums belong; or None
    second,  # [segments, C], or None
    first_stride,
    second_stride,
    grad_out,  # [N, C, HxW]
    input,  # [N, C, HxW]
    mean,  # [N, group]
    rstd,  # [N, group]
    weight,  # [C], or None
    grad_input,  # [N, C, HxW], or None
    K,
    segment,  # rows per program, those of whole samples
    samples,
    group,
    HxW,
    grad_out_strides,  # of sample, channel and place
    input_strides,
    grad_input_strides,
    D: tl.constexpr,  # channels of a group
    PARTS: tl.constexpr,  # rows of a sample
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,  # numbers that are computed once more at a time
    NEAR_GROUPS: tl.constexpr,  # look for groups near zero; there are both tables
    NEAR_CHANNELS: tl.constexpr,  # look for weight gradients near zero; there are both tables, in one segment
    INFINITE: tl.constexpr,  # look for infinite weights
    NARROW: tl.constexpr,  # results are computed as float32: they may be subnormals where rstd is small
):
    """The sums over rows of a block of channels, what is near zero once more, and NaN where infinite weights make it.

    The table, and what becomes of its sums, is the program's second number, the rows are its third.
    """
    tensors = (grad_out, input, mean, rstd, weight, grad_input)
    strides = (grad_out_strides, input_strides, grad_input_strides)
    sizes = (samples, group, HxW)
    C = channels_of(group, D, True)
    channels = indices(tl.program_id(0), COLUMNS)
    inside = channels < C
    which = tl.program_id(1)
    stretch = tl.program_id(2)
    begin = int64(stretch) * segment
    end = tl.minimum(begin + segment, K)
    if weight is not None:
        scale = tl.load(weight + channels, mask=inside, other=0.0)
        share = _share(scale)
    wait_for_launch_before()
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    near = tl.zeros((ROWS, COLUMNS), tl.int1)
    for start in range(begin, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & inside[None, :]
        place = (int64(which) * K + rows)[:, None] * C + channels[None, :]
        value = tl.load(partial + place, mask=mask, other=0.0)
        total += value.to(tl.float64)
        if NEAR_GROUPS:
            size = tl.abs(value.to(tl.float32))
            found = value != 0.0
            if weight is not None:
                size *= share[None, :]
                found = found & (share != 0.0)[None, :]
            if NARROW:
                statistic = (rows // PARTS * group)[:, None] + (channels // D)[None, :]
                size *= _share(tl.load(rstd + statistic, mask=mask, other=0.0))
            near = near | (found & (size < NEAR_ZERO))
    result = tl.sum(total, axis=0)
    if NEAR_CHANNELS:
        small = (tl.abs(result) < NEAR_ZERO) & (inside & (which == 0))
        if any_of(small):  # unless there are but zeros to be summed up
            some = _are_some(partial + int64(K) * C, K, C, channels, small, ROWS, COLUMNS)
            small = small & ((result != 0.0) | some)
        if any_of(small):
            again = weight_gradients_again(tensors, strides, sizes, channels, small, D, COLUMNS, CHUNK)
            result = tl.where(small, again, result)
    put_sums(first, second, which, stretch * C + channels, result, first_stride, second_stride, inside)
    if NEAR_GROUPS:  # noqa: SIM102 - one is known at compile time
        if tl.max(near.to(tl.int32)) != 0:
            begin_channel = int64(tl.program_id(0)) * COLUMNS
            end_channel = tl.minimum(begin_channel + COLUMNS, C)
            for sample in range(begin // PARTS, end // PARTS):
                for of_group in range(begin_channel // D, tl.cdiv(end_channel, D)):
                    found = _first_of_group(partial, rstd, weight, sample, of_group, K, group, D, PARTS, CHUNK, NARROW)
                    # One of the programs that have channels of a group computes it.
                    if (found >= begin_channel * 2) & (found < end_channel * 2) & (found % 2 == which):
                        group_again(tensors, strides, sizes, sample, of_group, D, CHUNK)
    if INFINITE:  # noqa: SIM102 - one is known at compile time
        if any_of((tl.abs(wide(scale)) == float("inf")) & ((which == 0) & (stretch == 0))):
            for item in range(COLUMNS * samples):
                channel = int64(tl.program_id(0)) * COLUMNS + item % COLUMNS
                infinite = wide(tl.load(weight + channel, mask=channel < C, other=0.0))
                sample, channel = int64(item // COLUMNS), tl.minimum(channel, C - 1)
                _spoil(tensors, strides, sizes, infinite, sample, channel, D, CHUNK)
