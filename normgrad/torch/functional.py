"""LayerNorm and GroupNorm as ``torch.nn.functional`` has them: what normgrad's modules and ``override()`` call.

A call takes one of three ways:

- Eager, with nothing watching: a node of autograd's graph that runs the kernels directly, without the dispatcher.
- Watched by a mode, transform or tracer: an operator of ``torch.ops.normgrad``, which the watcher sees.
- PyTorch's own function, for what :mod:`normgrad.torch.heuristics` leaves to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from normgrad.operators.mixed import MIXED
from normgrad.torch import formulas, heuristics, internals, outputs
from normgrad.torch.internals import Wait, is_intercepted, is_pending, is_watched, untraced
from normgrad.torch.kernels import TorchKernel
from normgrad.torch.library import KERNELS
from normgrad.torch.sharding import is_dtensor, norm_of_shards

#: N, C, HxW and the number of groups.
_Sizes = tuple[int, int, int, int]

#: The classes of tensors that the kernels take; a subclass would have to see the call.
TENSORS = frozenset((Tensor, torch.nn.Parameter))
_OPTIONAL_TENSORS = TENSORS | {type(None)}

#: The classes of data that our operators take in a compiled model: ``torch.export`` may trace with fake tensors.
_COMPILED_TENSORS = (Tensor, torch.nn.Parameter, internals.FakeTensor)

_layer_norm_forward, _layer_norm_backward = KERNELS["layer_norm"], KERNELS["layer_norm_backward"]
_group_norm_forward, _group_norm_backward = KERNELS["group_norm"], KERNELS["group_norm_backward"]

# Under autocast on CUDA the output may have another dtype than the data: by operator and dtype of the output.
_MIXED_FORWARD = {
    (name, dtype): TorchKernel(MIXED[name], outputs.with_output_dtype(getattr(outputs, name), dtype))
    for name in ("layer_norm", "group_norm")
    for dtype in outputs.DTYPES
}
_mixed_layer_norm_backward = TorchKernel(MIXED["layer_norm_backward"], outputs.layer_norm_backward)
_mixed_group_norm_backward = TorchKernel(MIXED["group_norm_backward"], outputs.group_norm_backward)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    autocast_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``torch.nn.functional.layer_norm`` of the arguments; under autocast on CUDA in ``autocast_dtype``."""
    output = None
    if are_plain(input, weight, bias) and not is_watched() and not is_intercepted():
        if not heuristics.layer_norm_is_slower(input, weight) and (
            layer_norm_problem(input, normalized_shape, weight, bias) is None
        ):
            return run_layer_norm(input, normalized_shape, weight, bias, eps, autocast_dtype)
        output = torch.layer_norm(input, normalized_shape, weight, bias, eps)
    elif _is_traceable(input, weight, bias, heuristics.layer_norm_is_slower):
        if layer_norm_problem(input, normalized_shape, weight, bias) is None:
            output = torch.ops.normgrad.layer_norm(input, normalized_shape, weight, bias, eps)[0]
    elif is_pending(input):
        return layer_norm(Wait.apply(input), normalized_shape, weight, bias, eps, autocast_dtype)
    elif is_dtensor(input):
        row_dims = input.dim() - len(normalized_shape)
        output = norm_of_shards(
            lambda x, w, b: layer_norm(x, normalized_shape, w, b, eps, autocast_dtype), input, row_dims, weight, bias
        )
    if output is None:
        output = torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)
    return as_autocast(output, input, autocast_dtype)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    autocast_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``torch.nn.functional.group_norm`` of the arguments; under autocast on CUDA in ``autocast_dtype``."""
    output = None
    if are_plain(input, weight, bias) and not is_watched() and not is_intercepted():
        if not heuristics.group_norm_is_slower(input, weight):
            if group_norm_problem(input, num_groups, weight, bias) is None:
                return run_group_norm(input, num_groups, weight, bias, eps, autocast_dtype)
        elif type(num_groups) is int and input.dim() > 1 and 0 < 2 * num_groups <= input.numel():
            output = torch.group_norm(input, num_groups, weight, bias, eps)  # PyTorch's in Python would not refuse it
    elif _is_traceable(input, weight, bias, heuristics.group_norm_is_slower):
        if group_norm_problem(input, num_groups, weight, bias) is None:
            output = torch.ops.normgrad.group_norm(input, weight, bias, *sizes_of(input), num_groups, eps)[0]
    elif is_pending(input):
        return group_norm(Wait.apply(input), num_groups, weight, bias, eps, autocast_dtype)
    elif is_dtensor(input):
        output = norm_of_shards(
            lambda x, w, b: group_norm(x, num_groups, w, b, eps, autocast_dtype), input, 1, weight, bias
        )
    if output is None:
        output = torch.nn.functional.group_norm(input, num_groups, weight, bias, eps)
    return as_autocast(output, input, autocast_dtype)


def as_autocast(output: Tensor, input: Tensor, autocast_dtype: torch.dtype) -> Tensor:
    """Return an output of PyTorch's dtype in the dtype that was asked for under autocast."""
    if autocast_dtype == torch.float32 or not _is_autocast(input) or output.dtype != torch.float32:
        return output
    return output.to(autocast_dtype)


def _is_autocast(input: Tensor) -> bool:
    """Return whether PyTorch's autocast computes these norms in float32: on CUDA, unless the data is float64."""
    return input.is_cuda and torch.is_autocast_enabled("cuda")


def compiled_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    always_ours: bool,
    autocast_dtype: torch.dtype,
) -> Tensor:
    """Return what a LayerNorm becomes under ``torch.compile`` and ``torch.export``."""
    if (always_ours or heuristics.compiles_to_layer_norm(input, normalized_shape)) and (
        type(input) in _COMPILED_TENSORS and layer_norm_problem(input, normalized_shape, weight, bias) is None
    ):
        output = torch.ops.normgrad.layer_norm(input, normalized_shape, weight, bias, eps)[0]
    else:
        output = torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)
    return as_autocast(output, input, autocast_dtype)


def compiled_group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    always_ours: bool,
    autocast_dtype: torch.dtype,
) -> Tensor:
    """Return what a GroupNorm becomes under ``torch.compile`` and ``torch.export``."""
    if always_ours and type(input) in _COMPILED_TENSORS and group_norm_problem(input, num_groups, weight, bias) is None:
        output = torch.ops.normgrad.group_norm(input, weight, bias, *sizes_of(input), num_groups, eps)[0]
    else:
        output = torch.nn.functional.group_norm(input, num_groups, weight, bias, eps)
    return as_autocast(output, input, autocast_dtype)


def are_plain(input: Any, weight: Any, bias: Any) -> bool:
    """Return whether the arguments are tensors in strided memory, of no subclass that would have to see the call."""
    return (
        type(input) in TENSORS
        and type(weight) in _OPTIONAL_TENSORS
        and type(bias) in _OPTIONAL_TENSORS
        and input.layout is torch.strided
        and not input.is_nested
    )


def _is_traceable(input: Any, weight: Any, bias: Any, is_slower: Callable[[Tensor, Tensor | None], bool]) -> bool:
    """Return whether the operators of ``torch.ops.normgrad`` take a watched call.

    Subclasses other than fake tensors, and proxies of symbolic tracing, know PyTorch's functions alone; and what
    ``torch.jit.trace`` records must run where normgrad is not imported. Under ``torch.func`` small tensors are
    PyTorch's as in eager mode: ``torch.vmap`` of ours may be a call per sample, of PyTorch's it is one for all.
    """
    fake = internals.FakeTensor
    parameters = {type(weight), type(bias)} <= _OPTIONAL_TENSORS | {fake}
    if not parameters or not (type(input) is fake or are_plain(input, None, None)) or torch.jit.is_tracing():
        return False
    return not (internals.transforms_are_active() and is_slower(input, weight))


def layer_norm_problem(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> str | None:
    """Return why a call cannot be ours; None where it can."""
    rows, shape = input.dim() - len(normalized_shape), tuple(normalized_shape)
    if rows < 0 or not shape or tuple(input.shape[rows:]) != shape:
        return heuristics.REFUSED
    if not (_fits(weight, shape) and _fits(bias, shape)):
        return heuristics.REFUSED
    return heuristics.obstacle(input, weight, bias)


def group_norm_problem(input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None) -> str | None:
    """Return why a call cannot be ours; None where it can."""
    if input.dim() < 2 or type(num_groups) is not int or num_groups <= 0 or input.shape[1] % num_groups:
        return heuristics.REFUSED
    samples, channels, positions = sizes_of(input)
    if channels // num_groups * positions == 1 and samples == 1:  # one element per group
        return heuristics.REFUSED
    if not (_fits(weight, (channels,)) and _fits(bias, (channels,))):
        return heuristics.REFUSED
    return heuristics.obstacle(input, weight, bias)


def _fits(parameter: Tensor | None, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter is dense and has the shape that PyTorch asks for; a formula would broadcast others."""
    if parameter is None:
        return True
    return parameter.layout is torch.strided and not parameter.is_nested and tuple(parameter.shape) == shape


def sizes_of(input: Tensor) -> tuple[int, int, int]:
    """Return N, C and HxW."""
    samples, channels, *positions = input.shape
    return samples, channels, math.prod(positions)


def run_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    autocast_dtype: torch.dtype,
) -> Tensor:
    """Run an eager call that is ours. Under autocast the kernels read the data as it is: there is no float32 copy."""
    dtype = input.dtype
    if _is_autocast(input):
        dtype, weight, bias = autocast_dtype, _float32(weight), _float32(bias)
    return _apply_layer_norm(input, weight, bias, tuple(normalized_shape), eps, dtype)


def run_group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    autocast_dtype: torch.dtype,
) -> Tensor:
    """Run an eager call that is ours, under autocast as ``run_layer_norm`` does."""
    if not input.is_contiguous():
        layout = outputs.memory_format(input)
        if layout != torch.contiguous_format:  # a crop is copied, as by PyTorch: kernels would copy to rows and back
            input = input.contiguous(memory_format=layout)
    dtype = input.dtype
    if _is_autocast(input):
        dtype, weight, bias = autocast_dtype, _float32(weight), _float32(bias)
    return _apply_group_norm(input, weight, bias, (*sizes_of(input), num_groups), eps, dtype)


def _float32(parameter: Tensor | None) -> Tensor | None:
    return parameter if parameter is None or parameter.dtype == torch.float32 else parameter.float()


def _contiguous(parameter: Tensor | None) -> Tensor | None:
    """Return a float32 parameter as PyTorch's kernel of GroupNorm reads it: without a look at the strides."""
    parameter = _float32(parameter)
    return parameter if parameter is None else parameter.contiguous()


class NormgradLayerNorm(torch.autograd.Function):  # type: ignore[misc]
    """LayerNorm in eager mode. A profile shows the name of the class, and ``NormgradLayerNormBackward``.

    What the contract refuses after all, such as bfloat16 on a product without it, the formula computes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: tuple[int, ...],
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        if dtype != input.dtype:
            found: Any = _MIXED_FORWARD["layer_norm", dtype].if_taken(input, shape, weight, bias, eps)
        elif heuristics.takes_layer_norm_forward(input, weight):
            found = _layer_norm_forward.if_taken(input, shape, weight, bias, eps)
        else:  # float32 parameters, beside which PyTorch keeps the statistics of 16-bit data in float32
            found = torch.native_layer_norm(input, shape, _float32(weight), _float32(bias), eps)
        output, mean, rstd = found or _in_dtype(formulas.layer_norm(input.float(), shape, weight, bias, eps), dtype)
        ctx.save_for_backward(input, weight, mean, rstd)  # no gradient depends on the bias
        ctx.attributes = shape, eps
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    @untraced
    def backward(ctx: Any, grad_out: Tensor | None) -> Any:
        if grad_out is None:  # what comes after has no gradient: nor have the parameters, which an optimizer then skips
            return (None,) * 6
        input, weight, mean, rstd = ctx.saved_tensors
        shape, eps = ctx.attributes
        mask = ctx.needs_input_grad[:3]
        args = grad_out, input, shape, mean, rstd, weight, None, mask
        if torch.is_grad_enabled():  # a gradient to be differentiated, through the statistics too
            _, mean, rstd = torch.ops.normgrad.layer_norm(input, shape, weight, None, eps)
            found = _gradients(
                torch.ops.normgrad.layer_norm_backward, grad_out, input, shape, mean, rstd, weight, None, mask
            )
        elif torch.compiler.is_dynamo_compiling() or type(grad_out) is not Tensor or is_watched():
            found = _gradients(torch.ops.normgrad.layer_norm_backward, *args)
        else:
            kernel = _layer_norm_backward if grad_out.dtype == input.dtype else _mixed_layer_norm_backward
            found = kernel.if_taken(*args) or formulas.layer_norm_backward(*args)
        return *found, None, None, None


class NormgradGroupNorm(torch.autograd.Function):  # type: ignore[misc]
    """GroupNorm in eager mode."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        sizes: _Sizes,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        if dtype != input.dtype:
            found: Any = _MIXED_FORWARD["group_norm", dtype].if_taken(input, weight, bias, *sizes, eps)
        elif heuristics.takes_group_norm_forward(input, sizes[2], weight):
            found = _group_norm_forward.if_taken(input, weight, bias, *sizes, eps)
        else:
            found = torch.native_group_norm(input, _contiguous(weight), _contiguous(bias), *sizes, eps)
        output, mean, rstd = found or _in_dtype(formulas.group_norm(input.float(), weight, bias, *sizes, eps), dtype)
        ctx.save_for_backward(input, weight, mean, rstd)
        ctx.attributes = sizes, eps
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    @untraced
    def backward(ctx: Any, grad_out: Tensor | None) -> Any:
        if grad_out is None:  # what comes after has no gradient: nor have the parameters, which an optimizer then skips
            return (None,) * 6
        input, weight, mean, rstd = ctx.saved_tensors
        sizes, eps = ctx.attributes
        mask = ctx.needs_input_grad[:3]
        args = grad_out, input, mean, rstd, weight, *sizes, mask
        if torch.is_grad_enabled():
            _, mean, rstd = torch.ops.normgrad.group_norm(input, weight, None, *sizes, eps)
            found = _gradients(
                torch.ops.normgrad.group_norm_backward, grad_out, input, mean, rstd, weight, *sizes, mask
            )
        elif torch.compiler.is_dynamo_compiling() or type(grad_out) is not Tensor or is_watched():
            found = _gradients(torch.ops.normgrad.group_norm_backward, *args)
        else:
            kernel = _group_norm_backward if grad_out.dtype == input.dtype else _mixed_group_norm_backward
            found = kernel.if_taken(*args) or formulas.group_norm_backward(*args)
        return *found, None, None, None


def _in_dtype(results: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return results of a formula on float32 data, with the output rounded once to its dtype."""
    output, mean, rstd = results
    return output.to(dtype), mean, rstd


def _gradients(operator: Any, grad_out: Tensor, input: Tensor, *args: Any) -> Any:
    """Return the gradients by an operator, which takes one dtype of data; autograd converts them to the input's."""
    common = torch.promote_types(grad_out.dtype, input.dtype)
    return operator(grad_out.to(common), input.to(common), *args)


# Function.apply looks for transforms of torch.func first, of which none is active here.
_apply_layer_norm = super(torch.autograd.Function, NormgradLayerNorm).apply
_apply_group_norm = super(torch.autograd.Function, NormgradGroupNorm).apply
