"""``torch.ops.normgrad``: the nine operators, for dispatch, tracing, differentiation and batching by PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from normgrad.operators import OPERATORS
from normgrad.operators.dispatch import packed
from normgrad.torch import derivatives, formulas, outputs
from normgrad.torch.batching import batched
from normgrad.torch.derivatives import Gradients, as_tuple
from normgrad.torch.kernels import TorchKernel, are_plain

_MASK = "bool[3] output_mask=[True, True, True]"
_GROUPS = "SymInt N, SymInt C, SymInt HxW, int group"
SCHEMAS = {
    "layer_norm_backward": "(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor mean, Tensor rstd, "
    f"Tensor? weight=None, Tensor? bias=None, {_MASK}) -> (Tensor, Tensor, Tensor)",
    "group_norm_backward": "(Tensor grad_out, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, "
    f"{_GROUPS}, {_MASK}) -> (Tensor, Tensor, Tensor)",
    "batch_norm_elemt_backward": "(Tensor grad_out, Tensor input, Tensor mean, Tensor invstd, Tensor? weight, "
    "Tensor sum_dy, Tensor sum_dy_xmu, Tensor counter) -> Tensor",
    "layer_norm": "(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, "
    "float eps=1e-05) -> (Tensor, Tensor, Tensor)",
    "group_norm": f"(Tensor input, Tensor? weight, Tensor? bias, {_GROUPS}, float eps=1e-05) "
    "-> (Tensor, Tensor, Tensor)",
    "batch_norm_stats": "(Tensor input, float eps=1e-05) -> (Tensor, Tensor)",
    "batch_norm_gather_stats_with_counts": "(Tensor input, Tensor mean, Tensor invstd, Tensor(a!)? running_mean, "
    "Tensor(b!)? running_var, float momentum, float eps, Tensor counts) -> (Tensor, Tensor)",
    "batch_norm_elemt": "(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, "
    "float eps=1e-05) -> Tensor",
    "batch_norm_reduce_backward": "(Tensor grad_out, Tensor input, Tensor mean, Tensor invstd, Tensor? weight, "
    "bool input_g=True, bool weight_g=True, bool bias_g=True) -> (Tensor, Tensor, Tensor, Tensor)",
}

#: The kernel of every operator, for plain tensors.
KERNELS = {name: TorchKernel(operator, getattr(outputs, name)) for name, operator in OPERATORS.items()}

_GRADIENTS: dict[str, Callable[..., Gradients]] = {
    "layer_norm": derivatives.layer_norm_gradients,
    "group_norm": derivatives.group_norm_gradients,
}

#: Every operator as a function without a gradient: in eager code the modules call its kernel directly.
RUN: dict[str, Callable[..., Any]] = {}

_library = torch.library.Library("normgrad", "DEF")


def _any_requires_grad(args: Sequence[Any]) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)


def _derivative(name: str, op: Any, forward: Callable[..., Any]) -> type[torch.autograd.Function]:
    """The operator as a node of autograd's graph and as a function that the transforms of ``torch.func`` know."""
    formula, gradients = getattr(formulas, name), _GRADIENTS.get(name)
    unread = [number for number, argument in enumerate(op._schema.arguments) if argument.is_write]

    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        tensors = [
            arg if isinstance(arg, torch.Tensor) and number not in unread else None for number, arg in enumerate(inputs)
        ]
        # The statistics are what a gradient with a kernel of its own needs of the results.
        tensors += output[1:] if gradients else []
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.args = [None if isinstance(arg, torch.Tensor) else arg for arg in inputs]
        ctx.results = [item is not None or None for item in as_tuple(output)]

    def saved(ctx: Any) -> tuple[list[Any], list[Any]]:
        args, tensors = ctx.args, ctx.saved_tensors
        whole = [arg if tensor is None else tensor for arg, tensor in zip(args, tensors[: len(args)], strict=True)]
        return whole, [None, *tensors[len(args) :]]

    def backward(ctx: Any, *grads: Any) -> Any:
        args, results = saved(ctx)
        if gradients is not None:
            return gradients(args, results, ctx.needs_input_grad, grads)
        return derivatives.pulled_back(formula, args, ctx.needs_input_grad, grads)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        args, _ = saved(ctx)
        return packed(derivatives.pushed_forward(formula, args, tangents, ctx.results))

    def vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
        return batched(name, op, info.batch_size, in_dims, args)

    methods: dict[str, Callable[..., Any]] = {
        "forward": forward,
        "setup_context": setup_context,
        "backward": backward,
        "jvp": jvp,
        "vmap": vmap,
    }
    return type(name, (torch.autograd.Function,), {key: staticmethod(method) for key, method in methods.items()})


def _define(name: str) -> None:
    """Register an operator's kernels, fake kernel, derivatives and batching rule."""
    _library.define(name + SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(torch.ops.normgrad, name).default
    kernel, make = KERNELS[name], getattr(outputs, name)
    defaults = [argument.default_value for argument in op._schema.arguments]

    def below_autograd(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    def forward(*args: Any) -> Any:
        return op(*args) if torch._C._are_functorch_transforms_active() else below_autograd(*args)

    def run(*args: Any) -> Any:
        found = kernel.if_taken(*args) if are_plain(args) else None
        return forward(*args) if found is None else found

    RUN[name] = run
    derivative = _derivative(name, op, forward)
    apply_here = super(torch.autograd.Function, derivative).apply  # without a look for transforms of torch.func

    def autograd(*args: Any) -> Any:
        if (torch.is_grad_enabled() and _any_requires_grad(args)) or forward_ad._current_level >= 0:
            return apply_here(*args, *defaults[len(args) :])
        return below_autograd(*args)

    def transformed(*args: Any) -> Any:
        return derivative.apply(*args, *defaults[len(args) :])

    def fake(*args: Any) -> Any:
        return packed(make(*args))

    for key in ("CPU", "CUDA"):
        _library.impl(name, kernel, key)
    _library.impl(name, autograd, "Autograd")
    _library.impl(name, transformed, "FuncTorchDynamicLayerFrontMode")
    torch.library.register_fake(f"normgrad::{name}", fake, lib=_library)


for _name in SCHEMAS:
    _define(_name)
