"""Kernels for NVIDIA GPUs that others publish: Liger-Kernel's and QuACK's backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from normgrad.bench.cases import CONTIGUOUS
from normgrad.bench.implementations.implementation import Implementation, Role, Unavailable
from normgrad.bench.tensors import arguments_as_torch
from normgrad.bench.workload import Workload

Gradients = Callable[[str, Mapping[str, Any]], tuple[Any, ...]]


def liger(operator: str, a: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return Liger-Kernel's gradients of input, weight and bias; Unavailable where it has no such operator."""
    if operator == "layer_norm_backward":
        from liger_kernel.ops.layer_norm import layer_norm_backward

        statistics = (a["mean"].flatten(), a["rstd"].flatten())
        return _of_input_shape(a, layer_norm_backward(*_rows(a), a["weight"], a["bias"], *statistics))
    if operator == "group_norm_backward":
        from liger_kernel.ops.group_norm import group_norm_backward

        data = (a[name].reshape(a["N"], a["C"], -1) for name in ("grad_out", "input"))
        rest = (a["weight"], a["weight"], a["mean"], a["rstd"], a["C"], a["group"])
        return _of_input_shape(a, group_norm_backward(*data, *rest))
    raise Unavailable(f"Liger has no {operator}")


def quack(operator: str, a: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return QuACK's gradients of input, weight and bias; Unavailable where it has no such operator."""
    if operator != "layer_norm_backward":
        raise Unavailable(f"QuACK has no {operator}")
    try:
        from quack.rmsnorm import layernorm_bwd
    except ImportError as error:
        raise Unavailable(f"QuACK cannot be used: {error}") from None
    grad_out, x = _rows(a)
    return _of_input_shape(a, layernorm_bwd(x, a["weight"], grad_out, a["rstd"].flatten(), a["mean"].flatten()))


def _rows(a: Mapping[str, Any]) -> list[Any]:
    """Return grad_out and input as the two-dimensional tensors that the kernels are written for."""
    return [a[name].reshape(-1, a["weight"].numel()) for name in ("grad_out", "input")]


def _of_input_shape(a: Mapping[str, Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
    return gradients[0].reshape(a["input"].shape), *gradients[1:]


class Published:
    """A library of which the gradients are a function of the operator's name and arguments."""

    def __init__(self, name: str, gradients: Gradients) -> None:
        self.name, self._gradients = name, gradients

    def prepare(self, work: Workload) -> Iterable[Implementation]:
        """The backward pass, on contiguous tensors alone: the kernels take no others."""
        if work.case.layout != CONTIGUOUS:
            raise Unavailable(f"{self.name} takes contiguous tensors")
        run = partial(self._gradients, work.case.operator, arguments_as_torch(work.arguments, work.device))
        yield Implementation(self.name, Role.PEER, run, run)
