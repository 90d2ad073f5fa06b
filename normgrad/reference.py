"""The backend ``reference``: the oracle behind the contract, slow and correct. Computes in float64, rounds once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from normgrad import oracle
from normgrad.contract.arrays import as_numpy, bytes_at
from normgrad.contract.dtypes import BFLOAT16, numpy_dtype
from normgrad.contract.parameters import Role, Tensor
from normgrad.contract.plan import Problem, allocate_host
from normgrad.contract.view import Memory, View

_ALIGNMENT = 64


@dataclass(frozen=True)
class _Kernel:
    """Widens the inputs into the workspace, so that outputs may lie anywhere, and asks the oracle."""

    problem: Problem

    @property
    def _read(self) -> list[Tensor]:
        return [p for p in self.problem.signature.tensors if p.role is not Role.OUTPUT and p.name in self.problem.views]

    @property
    def workspace_size(self) -> int:
        elements = sum(self.problem.views[parameter.name].numel for parameter in self._read)
        return elements * 8 + _ALIGNMENT if elements else 0

    def launch(self, addresses: list[int], workspace: int, stream: Any) -> None:
        views = {
            name: view.at(address) for (name, view), address in zip(self.problem.views.items(), addresses, strict=True)
        }
        address = -(-workspace // _ALIGNMENT) * _ALIGNMENT
        arguments: dict[str, Any] = {p.name: None for p in self.problem.signature.tensors if p.role is not Role.OUTPUT}
        for parameter in self._read:
            arguments[parameter.name] = values = _float64_at(address, views[parameter.name])
            address += values.nbytes
        compute = getattr(oracle, self.problem.signature.name)
        results = compute(**arguments, **self.problem.attributes)
        if not isinstance(results, tuple):
            results = (results,)
        for parameter, result in zip(self.problem.signature.outputs, results, strict=True):
            if parameter.name in views:
                write(views[parameter.name], result)
        for parameter in self._read:
            if parameter.role is Role.IN_PLACE:
                write(views[parameter.name], arguments[parameter.name])


def _float64_at(address: int, view: View) -> np.ndarray:
    if view.numel == 0:
        return np.empty(view.shape)
    values = np.frombuffer(bytes_at(Memory(address, view.numel * 8)), np.float64).reshape(view.shape)
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        values[...] = as_numpy(view)
    return values


def write(view: View, values: np.ndarray) -> None:
    """Round float64 values to the view's dtype, once, and store them."""
    as_numpy(view)[...] = rounded(values.reshape(view.shape), numpy_dtype(view.dtype))


def rounded(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Float64 values rounded to nearest even in another dtype."""
    with np.errstate(all="ignore"):
        if dtype == numpy_dtype(BFLOAT16):
            # The cast to bfloat16 goes through float32; rounded to odd there, the second rounding is the only one.
            values = _to_odd_float32(values)
        return values.astype(dtype)


def _to_odd_float32(values: np.ndarray) -> np.ndarray:
    """Float64 to float32; where inexact, the neighbour whose last bit is one."""
    near = values.astype(np.float32)
    even = (near.view(np.uint32) & 1) == 0
    inexact = np.isfinite(near) & (near != values)
    towards = np.where(near < values, np.float32(math.inf), np.float32(-math.inf))
    return np.where(inexact & even, np.nextafter(near, towards), near)


class _Reference:
    name = "reference"

    def prepare(self, problem: Problem) -> _Kernel:
        return _Kernel(problem)

    def allocate(self, nbytes: int, device: str, stream: Any = None) -> Memory:
        return allocate_host(nbytes)


backend = _Reference()
