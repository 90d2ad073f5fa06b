"""The kernels behind ``torch.ops.normgrad``: an operator on plain tensors, with outputs of PyTorch's strides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from normgrad.contract.arrays import FreshArray, as_view, fresh_tensor
from normgrad.contract.check import check
from normgrad.contract.parameters import Call
from normgrad.contract.products import Product, current_product
from normgrad.contract.status import RUNTIME, ContractError
from normgrad.operators.dispatch import Dispatch
from normgrad.operators.operator import Operator
from normgrad.torch.outputs import AllocateOutputs

Results: TypeAlias = Tensor | tuple[Tensor | None, ...]


class TorchKernel:
    """An operator as a function of the arguments that its PyTorch schema has, by position."""

    def __init__(self, operator: Operator, allocate: AllocateOutputs) -> None:
        self._signature = operator.signature
        self._allocate = allocate
        self._defaults = operator.defaults
        self._written = [operator.signature.is_written(name) for name in operator.names]
        self.dispatch = Dispatch(operator.signature, operator.names, self._choose_outputs)

    def __call__(self, *args: Any) -> Results:
        args += self._defaults[len(args) :]
        try:
            results: Results = self.dispatch(args, current_product())
        except ContractError:
            # The contract asks for aligned elements; PyTorch's functions take torch.frombuffer's tensors at any offset.
            if not any(map(_is_misaligned, args)):
                raise
            read = [
                arg.clone() if _is_misaligned(arg) and not written else arg
                for arg, written in zip(args, self._written, strict=True)
            ]
            results = self.dispatch(tuple(read), current_product())
        return results

    def if_taken(self, *args: Any) -> Results | None:
        """Return the results; None where the contract does not take the arguments, such as tensors without memory."""
        try:
            return self(*args)
        except ContractError as error:
            if error.status == RUNTIME:
                raise
            return None

    def _choose_outputs(
        self, named: Mapping[str, Any], call: Call, product: Product | None
    ) -> Mapping[str, FreshArray]:
        results = dict(zip(self._signature.output_names, self._allocate(*named.values()), strict=True))
        check(self._signature, {**named, **results}, product, outputs_needed=True)
        return {
            name: fresh_tensor(tuple(result.shape), result.stride(), as_view(result).dtype, result.device)
            for name, result in results.items()
            if result is not None
        }


def _is_misaligned(arg: Any) -> bool:
    if type(arg) not in (Tensor, torch.nn.Parameter) or not arg.is_cpu:
        return False
    try:
        return arg.data_ptr() % arg.element_size() != 0
    except RuntimeError:  # a tensor without memory, such as one of torch.func's
        return False
