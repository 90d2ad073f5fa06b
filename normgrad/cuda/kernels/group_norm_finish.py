"""What is left of GroupNorm backward when all groups are done: sums over samples and tiles, and infinite weights.

A channel's weight comes to its sums, not to its gradients. Where it is infinite those of both signs, or zeros, make the
sums NaN, which no sum of them tells: they are looked at again, one by one, since that need not be fast. Where results
lie in the data's own memory it is these that are looked at, which are NaN in such a channel: so all of its group is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.common import indices, int64, put, wait_for_launch_before, wide
from normgrad.cuda.kernels.group_norm_blocks import channels_of
from normgrad.cuda.kernels.memory import put_sums, sums_over
from normgrad.cuda.kernels.near_zero import any_of

_CHUNK = tl.constexpr(512)


@triton.jit
def _spoil(
    grad_out,
    input,
    mean,
    rstd,
    grad_input,
    scale,
    sample,
    channel,
    group,
    HxW,
    grad_out_strides,
    input_strides,
    grad_input_strides,
    D: tl.constexpr,
):
    """NaN for the gradients of a channel's group in a sample, if it has an infinite weight, and sums that are NaN."""
    statistic = sample * group + channel // D
    mu = wide(tl.load(mean + statistic))
    rs = wide(tl.load(rstd + statistic))
    dy_at = grad_out + sample * grad_out_strides[0] + channel * grad_out_strides[1]
    x_at = input + sample * input_strides[0] + channel * input_strides[1]
    sum_g = tl.zeros((_CHUNK,), tl.float32)
    sum_gx = tl.zeros((_CHUNK,), tl.float32)
    for chunk in range(tl.where(tl.abs(scale) == float("inf"), tl.cdiv(HxW, _CHUNK), 0)):
        places = indices(chunk, _CHUNK)
        inside = places < HxW
        g = wide(tl.load(dy_at + places * grad_out_strides[2], mask=inside, other=0.0)) * scale
        gx = g * ((wide(tl.load(x_at + places * input_strides[2], mask=inside, other=0.0)) - mu) * rs)
        sum_g += tl.where(inside, g, 0.0)
        sum_gx += tl.where(inside, gx, 0.0)
    all_g, all_gx = tl.sum(sum_g, axis=0), tl.sum(sum_gx, axis=0)
    spoiled = (all_g != all_g) | (all_gx != all_gx)
    first = grad_input + sample * grad_input_strides[0] + channel // D * D * grad_input_strides[1]
    for chunk in range(tl.where(spoiled, tl.cdiv(int64(HxW) * D, _CHUNK), 0)):
        elements = indices(chunk, _CHUNK)
        target = first + elements // HxW * grad_input_strides[1] + elements % HxW * grad_input_strides[2]
        put(target, tl.full((_CHUNK,), float("nan"), tl.float32), elements < int64(HxW) * D)


@triton.jit
def group_norm_finish(
    partial,  # float32 or float64 [wanted, K, C]
    first,  # [C]: the weight's gradient, or the bias's where that is not wanted; None where neither is
    second,  # [C], or None
    first_stride,
    second_stride,
    grad_out,  # [N, C, HxW]
    input,  # [N, C, HxW]
    mean,  # [N, group]
    rstd,  # [N, group]
    weight,  # [C]
    grad_input,  # [N, C, HxW]
    K,
    samples,
    group,
    HxW,
    grad_out_strides,  # of sample, channel and place
    input_strides,
    grad_input_strides,
    D: tl.constexpr,  # channels of a group
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The sums over the rows of a block of channels, and NaN for the groups of those whose weight is infinite."""
    wait_for_launch_before()
    C = channels_of(group, D, True)
    channels = indices(tl.program_id(0), COLUMNS)
    which = tl.program_id(1)
    scale = wide(tl.load(weight + channels, mask=channels < C, other=0.0))
    if first is not None:
        result = sums_over(partial + which.to(tl.int64) * K * C, 0, K, channels, C, ROWS, COLUMNS)
        put_sums(first, second, which, channels, result, first_stride, second_stride, channels < C)
    if any_of((tl.abs(scale) == float("inf")) & (which == 0)):
        for item in range(COLUMNS * samples):
            channel = int64(tl.program_id(0)) * COLUMNS + item % COLUMNS
            _spoil(
                grad_out,
                input,
                mean,
                rstd,
                grad_input,
                wide(tl.load(weight + channel, mask=channel < C, other=0.0)),
                int64(item // COLUMNS),
                tl.minimum(channel, C - 1),
                group,
                HxW,
                grad_out_strides,
                input_strides,
                grad_input_strides,
                D,
            )
