"""Kernels for NVIDIA GPUs that others publish, as their users call them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from normgrad.bench.contenders.contender import Contender, Role, Unavailable
from normgrad.bench.contenders.pytorch import results_of
from normgrad.bench.tensors import arguments_as_torch
from normgrad.bench.workload import EPS, Workload

Forward = Callable[..., Any]  # of input, weight and bias


class _ByAutograd:
    """A library's backward pass, the forward pass done beforehand."""

    name: str

    def prepare(self, work: Workload) -> Iterable[Contender]:
        import torch

        forward = self._forward(work)
        arguments = arguments_as_torch(work.arguments, "cuda")
        weight = arguments["weight"]
        # Detached: the tensors are the other contenders' too, which are timed without autograd.
        leaves = [t.detach().requires_grad_() for t in (arguments["input"], weight, torch.zeros_like(weight))]
        with torch.enable_grad():
            output = forward(*leaves)
        run = partial(_gradients, output, leaves, arguments["grad_out"])
        yield Contender(self.name, Role.PEER, run, partial(results_of, run))

    def _forward(self, work: Workload) -> Forward:
        raise NotImplementedError


def _gradients(output: Any, leaves: Sequence[Any], grad_out: Any) -> Any:
    import torch

    return torch.autograd.grad(output, leaves, grad_out, retain_graph=True)


class Liger(_ByAutograd):
    """Liger-Kernel's LayerNorm and GroupNorm."""

    name = "Liger"

    def _forward(self, work: Workload) -> Forward:
        from liger_kernel.transformers import functional

        if work.case.operator == "layer_norm_backward":
            return lambda x, weight, bias: functional.liger_layer_norm(x, weight, bias, EPS)
        if work.case.operator == "group_norm_backward":
            sizes = (work.case.shape[1], work.case.group)
            return lambda x, weight, bias: functional.liger_group_norm(x, weight, bias, *sizes, EPS)
        raise Unavailable(f"Liger has no {work.case.operator}")


class Quack:
    """QuACK's LayerNorm, of which it publishes the backward pass as a function."""

    name = "QuACK"

    def prepare(self, work: Workload) -> Iterable[Contender]:
        if work.case.operator != "layer_norm_backward":
            raise Unavailable(f"QuACK has no {work.case.operator}")
        try:
            from quack.rmsnorm import layernorm_bwd
        except ImportError as error:
            raise Unavailable(f"QuACK cannot be used: {error}") from None
        a = arguments_as_torch(work.arguments, "cuda")
        rstd, mean = a["rstd"].reshape(-1), a["mean"].reshape(-1)
        run = partial(layernorm_bwd, a["input"], a["weight"], a["grad_out"], rstd, mean)
        yield Contender(self.name, Role.PEER, run, partial(results_of, run))
