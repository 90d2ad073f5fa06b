"""GroupNorm's gradients near zero once more: in float64 and from memory. They are rare, and this need not be fast.

``tensors`` are grad_out, input, mean, rstd, weight and grad_input; ``strides`` those of grad_out, input and grad_input;
``sizes`` how many samples, groups of a sample and places there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.common import float64, indices, int64, wide
from normgrad.cuda.kernels.near_zero import put_float64


@triton.jit
def _as_float64(pointers, mask):
    return wide(tl.load(pointers, mask=mask, other=0.0)).to(tl.float64)


@triton.jit
def _terms(tensors, strides, mu, rs, sample, first_channel, elements, count, HxW):
    """``g`` and ``x̂`` of a few of a group's elements."""
    grad_out, input, _, _, weight, _ = tensors
    grad_out_strides, input_strides, _ = strides
    inside = elements < count
    channels = first_channel + elements // HxW
    dy_at = grad_out + sample * grad_out_strides[0] + channels * grad_out_strides[1]
    x_at = input + sample * input_strides[0] + channels * input_strides[1]
    g = _as_float64(dy_at + elements % HxW * grad_out_strides[2], inside)
    x_hat = (_as_float64(x_at + elements % HxW * input_strides[2], inside) - mu) * rs
    if weight is not None:
        g *= _as_float64(weight + channels, inside)
    return tl.where(inside, g, 0.0), tl.where(inside, x_hat, 0.0)


@triton.jit
def group_again(tensors, strides, sizes, sample, of_group, D: tl.constexpr, CHUNK: tl.constexpr):
    """The gradient of a group of a sample, CHUNK numbers at a time."""
    _, _, mean, rstd, _, grad_input = tensors
    _, _, grad_input_strides = strides
    _, group, HxW = sizes
    mu = wide(tl.load(mean + sample * group + of_group)).to(tl.float64)
    rs = wide(tl.load(rstd + sample * group + of_group)).to(tl.float64)
    count = int64(HxW) * D
    channel = of_group * D
    sum_g = tl.zeros((CHUNK,), tl.float64)
    sum_gx = tl.zeros((CHUNK,), tl.float64)
    for chunk in range(tl.cdiv(count, CHUNK)):
        elements = indices(chunk, CHUNK)
        g, x_hat = _terms(tensors, strides, mu, rs, sample, channel, elements, count, HxW)
        sum_g += g
        sum_gx += g * x_hat
    mean_g = tl.sum(sum_g, axis=0) / float64(count)
    mean_gx = tl.sum(sum_gx, axis=0) / float64(count)
    for chunk in range(tl.cdiv(count, CHUNK)):
        elements = indices(chunk, CHUNK)
        g, x_hat = _terms(tensors, strides, mu, rs, sample, channel, elements, count, HxW)
        target = grad_input + sample * grad_input_strides[0] + (channel + elements // HxW) * grad_input_strides[1]
        result = rs * (g - mean_g - x_hat * mean_gx)
        put_float64(target + elements % HxW * grad_input_strides[2], result, elements < count)


@triton.jit
def weight_gradients_again(
    tensors, strides, sizes, channels, wanted, D: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr
):
    """The weight's gradients of those of a few channels that are wanted, in float64."""
    grad_out, input, mean, rstd, _, _ = tensors
    grad_out_strides, input_strides, _ = strides
    samples, group, HxW = sizes
    ROWS: tl.constexpr = CHUNK // CHANNELS if CHANNELS < CHUNK else 1
    count = int64(samples) * HxW
    total = tl.zeros((ROWS, CHANNELS), tl.float64)
    for block in range(tl.cdiv(count, ROWS)):
        rows = indices(block, ROWS)
        mask = (rows < count)[:, None] & wanted[None, :]
        sample, place = (rows // HxW)[:, None], (rows % HxW)[:, None]
        statistic = sample * group + (channels // D)[None, :]
        dy_at = grad_out + sample * grad_out_strides[0] + channels[None, :] * grad_out_strides[1]
        x_at = input + sample * input_strides[0] + channels[None, :] * input_strides[1]
        dy = _as_float64(dy_at + place * grad_out_strides[2], mask)
        x = _as_float64(x_at + place * input_strides[2], mask)
        total += dy * ((x - _as_float64(mean + statistic, mask)) * _as_float64(rstd + statistic, mask))
    return tl.sum(total, axis=0)
