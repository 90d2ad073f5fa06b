"""The operators' formulas in PyTorch's own differentiable operations.

Where a derivative has no kernel, it is the derivative of the formula. They compute in float32, and in float64 for
float64 tensors, in which the tests compare autograd with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normgrad.torch.outputs import DTYPES_OF_16_BITS

Mask = Sequence[bool]


def _acc(tensor: Tensor) -> Tensor:
    """Return a tensor in the dtype that the formula computes in."""
    return tensor.float() if tensor.dtype in DTYPES_OF_16_BITS else tensor


def _scaled(normalized: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        normalized = normalized * _acc(weight)
    return normalized if bias is None else normalized + _acc(bias)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``output, mean, rstd``."""
    inner = tuple(range(-len(normalized_shape), 0))
    x = _acc(input)
    mean = x.mean(inner, keepdim=True)
    rstd = ((x - mean).square().mean(inner, keepdim=True) + eps).rsqrt()
    return _scaled((x - mean) * rstd, weight, bias).to(input.dtype), mean, rstd


def layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    output_mask: Mask = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return ``grad_input, grad_weight, grad_bias``."""
    rows = input.dim() - len(normalized_shape)
    inner, outer = tuple(range(rows, input.dim())), tuple(range(rows))
    dtype = input.dtype if weight is None else weight.dtype
    per_row = [*input.shape[:rows], *[1] * len(normalized_shape)]
    dy, rstd = _acc(grad_out), _acc(rstd).reshape(per_row)
    x_hat = (_acc(input) - _acc(mean).reshape(per_row)) * rstd
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        g = dy if weight is None else dy * _acc(weight)
        along, across = g.mean(inner, keepdim=True), (g * x_hat).mean(inner, keepdim=True)
        grad_input = (rstd * (g - along - x_hat * across)).to(input.dtype)
    if output_mask[1]:
        grad_weight = _sum(dy * x_hat, outer).to(dtype)
    if output_mask[2]:
        grad_bias = _sum(dy, outer).to(dtype)
    return grad_input, grad_weight, grad_bias


def _sum(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    return tensor.sum(dims) if dims else tensor  # to sum over no dimensions means over all


def group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``output, mean, rstd``."""
    x = _acc(input).reshape(N, group, C // group, HxW)
    mean = x.mean((2, 3), keepdim=True)
    rstd = ((x - mean).square().mean((2, 3), keepdim=True) + eps).rsqrt()
    by_channel = (1, group, C // group, 1)
    shaped = [None if vector is None else vector.reshape(by_channel) for vector in (weight, bias)]
    output = _scaled((x - mean) * rstd, *shaped).reshape(input.shape).to(input.dtype)
    return output, mean.reshape(N, group), rstd.reshape(N, group)


def group_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Mask = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return ``grad_input, grad_weight, grad_bias``."""
    grouped = (N, group, C // group, HxW)
    dy, rstd = _acc(grad_out).reshape(grouped), _acc(rstd).reshape(N, group, 1, 1)
    x_hat = (_acc(input).reshape(grouped) - _acc(mean).reshape(N, group, 1, 1)) * rstd
    like_weight, dtype = ((C,), mean.dtype) if weight is None else (weight.shape, weight.dtype)
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        g = dy if weight is None else dy * _acc(weight).reshape(1, group, C // group, 1)
        along, across = g.mean((2, 3), keepdim=True), (g * x_hat).mean((2, 3), keepdim=True)
        grad_input = (rstd * (g - along - x_hat * across)).reshape(input.shape).to(input.dtype)
    if output_mask[1]:
        grad_weight = (dy * x_hat).sum((0, 3)).reshape(like_weight).to(dtype)
    if output_mask[2]:
        grad_bias = dy.sum((0, 3)).reshape(like_weight).to(dtype)
    return grad_input, grad_weight, grad_bias


def _by_channel(vector: Tensor, data: Tensor) -> Tensor:
    return _acc(vector).reshape(1, -1, *[1] * (data.dim() - 2))


def _all_but_channel(data: Tensor) -> tuple[int, ...]:
    return (0, *range(2, data.dim()))


def batch_norm_stats(input: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Return ``mean, invstd``."""
    x, dims = _acc(input), _all_but_channel(input)
    mean = x.mean(dims)
    return mean, ((x - _by_channel(mean, x)).square().mean(dims) + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return ``mean, invstd`` of all ranks; the running statistics stay as they are."""
    there = counts.reshape(-1, 1) > 0
    mean, invstd = torch.where(there, _acc(mean), 0), torch.where(there, _acc(invstd), 1)
    shares = counts.to(mean.dtype).reshape(-1, 1)
    shares = shares / shares.sum()
    mean_all = (mean * shares).sum(0)
    variance = ((invstd.square().reciprocal() - eps + (mean - mean_all).square()) * shares).sum(0)
    return mean_all, (variance + eps).rsqrt()


def batch_norm_elemt(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float = 1e-5
) -> Tensor:
    """Return ``output``."""
    x = _acc(input)
    shaped = [None if vector is None else _by_channel(vector, x) for vector in (weight, bias)]
    return _scaled((x - _by_channel(mean, x)) * _by_channel(invstd, x), *shaped).to(input.dtype)


def batch_norm_reduce_backward(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool = True,
    weight_g: bool = True,
    bias_g: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return ``sum_dy, sum_dy_xmu, grad_weight, grad_bias``."""
    dy, x, dims = _acc(grad_out), _acc(input), _all_but_channel(input)
    dtype = mean.dtype if weight is None else weight.dtype
    sum_dy = dy.sum(dims)
    sum_dy_xmu = (dy * (x - _by_channel(mean, x))).sum(dims)
    grad_weight = (sum_dy_xmu * _acc(invstd)).to(dtype) if weight_g else None
    grad_bias = sum_dy.to(dtype) if bias_g else None
    return sum_dy if input_g else None, sum_dy_xmu if input_g else None, grad_weight, grad_bias


def batch_norm_elemt_backward(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counter: Tensor,
) -> Tensor:
    """Return ``grad_input``."""
    x, scale = _acc(input), _by_channel(invstd, input)
    count = counter.to(x.dtype).sum()
    centred = (x - _by_channel(mean, x)) * scale.square()
    grad = _acc(grad_out) - _by_channel(sum_dy, x) / count - centred * (_by_channel(sum_dy_xmu, x) / count)
    grad = grad * scale
    return (grad if weight is None else grad * _by_channel(weight, x)).to(input.dtype)
