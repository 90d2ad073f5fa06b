"""The plain path: an operator's formula in PyTorch's own operations, in float64; slow, and correct with any compiler.

The backend takes it where no kernel may be launched, because Triton compiled them to layouts that they do not work with
(``layout_checks``) or to other parameters than expected (``driver_launch``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normgrad.contract.arrays import bytes_at, torch_dtypes
from normgrad.contract.plan import Problem
from normgrad.contract.view import View


@dataclass(frozen=True)
class PlainKernel:
    """An operator call, computed by its formula."""

    problem: Problem
    workspace_size: int = 0

    def launch(self, addresses: Sequence[int], workspace: int, stream: Any) -> None:
        """Compute on a stream: a PyTorch stream, a raw handle, or by default the device's current one."""
        views = {
            name: view.at(address) for (name, view), address in zip(self.problem.views.items(), addresses, strict=True)
        }
        if self.problem.device == "cpu":
            self._compute(views)
            return
        device = torch.device(self.problem.device)
        if stream is None:
            stream = torch.cuda.current_stream(device)
        elif isinstance(stream, int):
            stream = torch.cuda.ExternalStream(stream, device=device)
        with torch.cuda.stream(stream):
            self._compute(views)

    def _compute(self, views: Mapping[str, View]) -> None:
        # Imported here: normgrad.torch registers operators on this backend.
        from normgrad.torch import formulas

        signature, attributes = self.problem.signature, self.problem.attributes
        tensors = {name: _tensor_at(view) for name, view in views.items()}
        arguments: dict[str, Any] = {
            tensor.name: tensors[tensor.name].double() if tensor.name in tensors else None
            for tensor in signature.tensors
            if not signature.is_output(tensor.name)
        }
        results = getattr(formulas, signature.name)(**arguments, **attributes)
        for name, result in zip(signature.output_names, results if isinstance(results, tuple) else (results,)):  # noqa: B905
            if name in tensors:
                tensors[name].copy_(result.reshape(tensors[name].shape))
        if signature.name == "batch_norm_gather_stats_with_counts":
            mean, invstd = results
            count, momentum = arguments["counts"].sum(), attributes["momentum"]
            variance = (invstd**-2 - attributes["eps"]) * count / (count - 1)
            for name, new in (("running_mean", mean), ("running_var", variance)):
                if name in tensors:  # moves towards the statistics of the whole batch, in place
                    tensors[name].copy_((1 - momentum) * arguments[name] + momentum * new)


class _Array:
    """Device memory as ``torch.as_tensor`` takes it, with elements as integers: the protocol has no bfloat16."""

    def __init__(self, view: View) -> None:
        itemsize = view.dtype.itemsize
        self.__cuda_array_interface__ = {
            "shape": view.shape,
            "strides": tuple(stride * itemsize for stride in view.strides),
            "typestr": f"<i{itemsize}" if itemsize > 1 else "|u1",
            "data": (view.address, False),
            "version": 3,
        }


def _tensor_at(view: View) -> Tensor:
    """Return a tensor that shares a view's memory."""
    dtype = torch_dtypes()[view.dtype]
    if view.numel == 0:
        return torch.empty(view.shape, dtype=dtype, device=view.device)
    if view.device != "cpu":
        return torch.as_tensor(_Array(view), device=view.device).view(dtype)
    reach = view.reach
    whole = torch.frombuffer(bytes_at(reach), dtype=dtype)
    return whole.as_strided(view.shape, view.strides, (view.address - reach.address) // view.dtype.itemsize)
