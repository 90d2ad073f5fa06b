"""An operator on plain tensors, with results as PyTorch lays them out: the shortest way from Python to its kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from normgrad.contract.arrays import torch_maker
from normgrad.contract.check import check
from normgrad.contract.parameters import Call
from normgrad.contract.products import Product, current_product
from normgrad.operators.calls import Calls
from normgrad.operators.operator import Operator
from normgrad.operators.recipes import Made
from normgrad.torch.outputs import Maker

Results: TypeAlias = Tensor | tuple[Tensor | None, ...]


class TorchKernel:
    """An operator as a function of the arguments that its PyTorch schema has, by position."""

    def __init__(self, operator: Operator[..., Any], make: Maker) -> None:
        self._signature = operator.signature
        self._make = make
        self._defaults = operator.defaults
        self._calls = Calls(operator.signature, operator.names, operator.defaults, self._made)
        self._registers = self._calls.registers

    def __call__(self, *args: Any) -> Results:
        found: Results = self._calls(args + self._defaults[len(args) :], current_product())
        return found

    def recalled(self, args: tuple[Any, ...], differentiating: bool = False) -> Results | None:
        """The results of a call whose layout is known; None where it is not.

        ``differentiating``: nor where autograd follows one of the tensors.
        """
        found: Results | None
        product = current_product()
        found = self._registers[product].recall(args, differentiating)
        if found is not None:
            return found
        found = self._calls.recipes.recalled(args + self._defaults[len(args) :], product, differentiating)
        return found

    def _made(self, named: Mapping[str, Any], call: Call, product: Product | None) -> Sequence[Made]:
        results = dict(zip(self._signature.output_names, self._make(*named.values()), strict=True))
        check(self._signature, {**named, **results}, product, outputs_needed=True)
        return [
            Made(name, result, torch_maker(tuple(result.shape), result.stride(), result.dtype, result.device))
            for name, result in results.items()
            if result is not None
        ]


def are_plain(args: Sequence[Any]) -> bool:
    """Whether the tensors among the arguments are no more than memory: nothing wraps, traces or negates them."""
    return all(
        torch._C._dispatch_keys(arg).raw_repr() == _plain_keys(arg.device) for arg in args if isinstance(arg, Tensor)
    )


@cache
def _plain_keys(device: torch.device) -> int | None:
    if device.type not in ("cpu", "cuda"):
        return None
    keys: int = torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr()
    return keys
