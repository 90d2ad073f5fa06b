"""LayerNorm and GroupNorm as ``torch.nn.functional`` has them, with our backward pass and statistics in float32.

What the contract does not take, float64 above all, and what PyTorch refuses goes to PyTorch's own functions. In eager
mode a node of autograd's graph calls the kernels; where something watches or transforms the call, it is an operator of
``torch.ops.normgrad``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from normgrad.cuda import devices
from normgrad.torch.choices import (
    group_norm_is_pytorchs,
    layer_norm_is_pytorchs,
    our_group_norm,
    our_layer_norm,
)
from normgrad.torch.library import RUN
from normgrad.torch.outputs import DTYPES

_PLAIN = frozenset((Tensor, torch.nn.Parameter))

# What torch.nn.functional asks first: whether a mode or a tensor is to see that one of its functions is called.
_is_seen = torch.overrides.has_torch_function

_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_MOST_DIMENSIONS = 8


_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Keep Dynamo from tracing into a function that autograd or the dispatcher calls.

    A backward pass may run under Dynamo's frame hook, as in a compiled training step with an eager module. Dynamo would
    trace the first call of a kernel down to Numba and LLVM, and fail.
    """
    wrapped: _Function = torch.compiler.disable(function)
    return wrapped


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.layer_norm``."""
    is_eager = _is_eager(input)
    if is_eager and layer_norm_is_pytorchs(input, weight):
        theirs = torch.nn.functional.layer_norm if _is_seen((weight, bias)) else torch.layer_norm
        return theirs(input, normalized_shape, weight, bias, eps)
    input, weight, bias = _as_autocast_has_it(input, weight, bias)
    rows = input.dim() - len(normalized_shape)
    if not _is_taken(input, weight, bias) or rows < 0 or tuple(input.shape[rows:]) != tuple(normalized_shape):
        return torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)
    if is_eager:
        return _layer_norm(input, weight, bias, tuple(normalized_shape), eps)
    return torch.ops.normgrad.layer_norm(input, normalized_shape, weight, bias, eps)[0]


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """``torch.nn.functional.group_norm``."""
    is_eager = _is_eager(input)
    if is_eager and group_norm_is_pytorchs(input, weight):
        is_refused = input.dim() < 2 or not 0 < num_groups < input.numel()
        theirs = torch.nn.functional.group_norm if is_refused or _is_seen((weight, bias)) else torch.group_norm
        return theirs(input, num_groups, weight, bias, eps)
    input, weight, bias = _as_autocast_has_it(input, weight, bias)
    one_value_a_group = input.numel() <= num_groups  # which PyTorch refuses
    if not _is_taken(input, weight, bias) or input.dim() < 2 or one_value_a_group or input.shape[1] % num_groups:
        return torch.nn.functional.group_norm(input, num_groups, weight, bias, eps)
    sizes = (input.shape[0], input.shape[1], math.prod(input.shape[2:]), num_groups)
    if is_eager:
        return _group_norm(input, weight, bias, sizes, eps)
    return torch.ops.normgrad.group_norm(input, weight, bias, *sizes, eps)[0]


def _as_autocast_has_it(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors in float32 where PyTorch's autocast casts these functions' arguments: on CUDA."""
    data = tensors[0]
    if data is not None and data.is_cuda and torch.is_autocast_enabled("cuda"):
        return tuple(tensor.float() if tensor is not None and tensor.dtype in DTYPES else tensor for tensor in tensors)
    return tensors


def _is_taken(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the contract takes the tensors, as far as PyTorch does too."""
    dtype = input.dtype
    given = [parameter.dtype for parameter in (weight, bias) if parameter is not None]
    return (
        dtype in DTYPES
        and (input.is_cpu or (input.is_cuda and runs_on_gpu(input.device.index)))
        and input.dim() <= _MOST_DIMENSIONS
        and (not given or (given[0] in (dtype, torch.float32) and given[0] == given[-1]))
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def runs_on_gpu(index: int) -> bool:
    """Whether our kernels run on a GPU; what is on another is PyTorch's."""
    return devices.problem(index) is None


def _is_eager(input: Tensor) -> bool:
    """Whether nothing watches, traces or transforms the call."""
    return (
        not _is_compiling()
        and type(input) in _PLAIN
        and _dispatch_modes() == 0
        and not _transforms()
        and forward_ad._current_level < 0
    )


def _wide(parameter: Tensor | None) -> Tensor | None:
    """A parameter in float32, beside which PyTorch keeps the statistics of 16-bit data in float32."""
    return parameter if parameter is None or parameter.dtype == torch.float32 else parameter.float()


class _LayerNorm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...], eps: float
    ) -> Tensor:
        if our_layer_norm(input, weight):
            output, mean, rstd = RUN["layer_norm"](input, shape, weight, bias, eps)
        else:
            output, mean, rstd = torch.native_layer_norm(input, shape, _wide(weight), _wide(bias), eps)
        ctx.save_for_backward(input, weight, bias, mean, rstd)
        ctx.attributes = shape, eps
        return output

    @staticmethod
    @untraced
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        input, weight, bias, mean, rstd = ctx.saved_tensors
        shape, eps = ctx.attributes
        mask = list(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():  # a gradient to be differentiated, through the statistics too
            ops = torch.ops.normgrad
            _, mean, rstd = ops.layer_norm(input, shape, weight, bias, eps)
            found = ops.layer_norm_backward(grad_out, input, shape, mean, rstd, weight, bias, mask)
        else:
            found = RUN["layer_norm_backward"](grad_out, input, shape, mean, rstd, weight, bias, mask)
        return *found, None, None


class _GroupNorm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, sizes: tuple[int, ...], eps: float
    ) -> Tensor:
        if our_group_norm(input, sizes[2], weight):
            output, mean, rstd = RUN["group_norm"](input, weight, bias, *sizes, eps)
        else:
            output, mean, rstd = torch.native_group_norm(input, _wide(weight), _wide(bias), *sizes, eps)
        ctx.save_for_backward(input, weight, bias, mean, rstd)
        ctx.attributes = sizes, eps
        return output

    @staticmethod
    @untraced
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        input, weight, bias, mean, rstd = ctx.saved_tensors
        sizes, eps = ctx.attributes
        mask = list(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():
            ops = torch.ops.normgrad
            _, mean, rstd = ops.group_norm(input, weight, bias, *sizes, eps)
            found = ops.group_norm_backward(grad_out, input, mean, rstd, weight, *sizes, mask)
        else:
            found = RUN["group_norm_backward"](grad_out, input, mean, rstd, weight, *sizes, mask)
        return *found, None, None


# Function.apply looks for transforms of torch.func first, which _is_eager has done.
_layer_norm = super(torch.autograd.Function, _LayerNorm).apply
_group_norm = super(torch.autograd.Function, _GroupNorm).apply
