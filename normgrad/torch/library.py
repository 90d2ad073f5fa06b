"""``torch.ops.normgrad``: the nine operators, registered for dispatch, tracing, differentiation and batching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from normgrad.contract.check import check_device
from normgrad.operators import OPERATORS
from normgrad.operators.dispatch import packed
from normgrad.operators.operator import Operator
from normgrad.torch import derivatives, formulas, internals, outputs
from normgrad.torch.batching import batched
from normgrad.torch.derivatives import Gradients
from normgrad.torch.kernels import TorchKernel
from normgrad.torch.outputs import AllocateOutputs
from normgrad.torch.schemas import schema

#: The kernel of every operator, for plain tensors.
KERNELS = {name: TorchKernel(operator, getattr(outputs, name)) for name, operator in OPERATORS.items()}

#: The operators whose gradients are operators themselves.
_GRADIENTS: dict[str, Callable[..., Gradients]] = {
    "layer_norm": derivatives.layer_norm_gradients,
    "group_norm": derivatives.group_norm_gradients,
}

_library = torch.library.Library("normgrad", "DEF")


def _define(name: str) -> None:
    """Register an operator: its kernels, fake kernel, derivatives, batching rule and autocast rule."""
    qualified, kernel, allocate = f"normgrad::{name}", KERNELS[name], getattr(outputs, name)
    _library.define(name + schema(OPERATORS[name]), tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(torch.ops.normgrad, name).default
    for key in ("CPU", "CUDA"):
        _library.impl(name, kernel, key)
    torch.library.register_fake(qualified, _fake_kernel(OPERATORS[name], allocate), lib=_library)
    torch.library.register_vmap(qualified, _batching_rule(name, op), lib=_library)
    if name in ("layer_norm", "group_norm"):  # PyTorch's own are computed in float32 under autocast on CUDA
        torch.library.register_autocast(qualified, "cuda", torch.float32, lib=_library)
    _register_autograd(name, op)


def _fake_kernel(operator: Operator, allocate: AllocateOutputs) -> Callable[..., Any]:
    """Return the kernel for meta and fake tensors. It has to refuse tensors on two devices.

    The dispatcher calls it where a single tensor is on ``meta``: its results would then be memory that nothing writes.
    """

    def fake(*args: Any) -> Any:
        tensors = [(name, arg) for name, arg in zip(operator.names, args, strict=False) if isinstance(arg, Tensor)]
        for name, tensor in tensors:
            check_device(operator.signature, name, tensor.device, tensors[0][1].device)
        return packed(allocate(*args))

    return fake


def _batching_rule(name: str, op: Any) -> Callable[..., Any]:
    defaults = [argument.default_value for argument in op._schema.arguments]

    def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
        missing = defaults[len(args) :]  # the dispatcher leaves out arguments that have their default
        return batched(name, op, info.batch_size, (*in_dims, *[None] * len(missing)), (*args, *missing))

    return rule


def _register_autograd(name: str, op: Any) -> None:
    """Register the derivatives of an operator.

    Reverse mode is what ``torch.library.register_autograd`` registers, which would drop the tangents of forward mode
    without a word: in forward mode an operator is its formula, whose operations PyTorch differentiates.
    """
    backward, setup_context = _reverse_mode(name, op)
    if internals.below_autograd is None:
        if op._schema.is_mutable:  # which register_autograd refuses
            return

        def backward_of_given(ctx: Any, *grads: Any) -> Any:
            given = ctx.needs_input_grad  # without the arguments that have their default
            ctx.needs_input_grad = (*given, *[False] * (len(op._schema.arguments) - len(given)))
            return backward(ctx, *grads)[: len(given)]

        torch.library.register_autograd(
            f"normgrad::{name}", backward_of_given, setup_context=setup_context, lib=_library
        )
        return
    below, formula = internals.below_autograd, getattr(formulas, name)
    defaults = [argument.default_value for argument in op._schema.arguments]
    mutates = op._schema.is_mutable

    def forward(ctx: Any, *args: Any) -> Any:
        with internals.outer_levels() if internals.transforms_are_active() else nullcontext(), below():
            results = op(*args)
        setup_context(ctx, args, results)
        return results

    node = type(
        f"normgrad::{name}",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )
    apply = super(torch.autograd.Function, node).apply  # without a look for transforms of torch.func

    def autograd(*args: Any) -> Any:
        if internals.has_tangent(args):
            if mutates:
                with below():
                    op(*args)
            return formula(*args)
        if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            if not internals.transforms_are_active():
                return apply(*args, *defaults[len(args) :])
            if not internals.has_levels:
                return formula(*args)
            with internals.single_level():
                return apply(*args, *defaults[len(args) :])
        with below():
            return op(*args)

    _library.impl(name, autograd, "Autograd")


def _reverse_mode(name: str, op: Any) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return ``backward`` and ``setup_context``, as ``torch.library.register_autograd`` takes them."""
    formula, gradients = getattr(formulas, name), _GRADIENTS.get(name)
    # A gradient with a kernel of its own depends on the statistics among the results, and not on the bias. So it saves
    # what the nodes of eager mode save, and checkpointing may run the two passes one with a mode and one without.
    unsaved = [
        number
        for number, argument in enumerate(op._schema.arguments)
        if argument.is_write or (gradients is not None and argument.name == "bias")
    ]

    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        tensors = [
            arg if isinstance(arg, Tensor) and number not in unsaved else None for number, arg in enumerate(inputs)
        ]
        tensors += output[1:] if gradients else []
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.args = [None if isinstance(arg, Tensor) else arg for arg in inputs]

    def backward(ctx: Any, *grads: Any) -> Any:
        given, tensors = ctx.args, ctx.saved_tensors
        args = [arg if tensor is None else tensor for arg, tensor in zip(given, tensors[: len(given)], strict=True)]
        if gradients is not None:
            return gradients(args, [None, *tensors[len(given) :]], ctx.needs_input_grad, grads)
        return derivatives.pulled_back(formula, args, ctx.needs_input_grad, grads)

    return backward, setup_context


for _name in OPERATORS:
    _define(_name)
