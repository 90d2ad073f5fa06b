"""What a call's layout decides, kept for the next call of the same layout.

Every rule but those about memory speaks of shapes, strides, dtypes and attributes alone. A call that passed them leaves
a recipe: the kernel that was chosen and how its results are made. The next call of the same layout, whose arrays lie
as safely in their memory, needs no more than that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from normgrad.contract.arrays import Kind, kind_of, numpy_address
from normgrad.contract.check import Signature
from normgrad.contract.parameters import Call, Role, Tensor
from normgrad.contract.plan import Backend, Kernel, Problem, launch

_NUMBERS = frozenset((int, float, bool))
_INTEGERS = frozenset((int, bool))
_SEQUENCES = frozenset((list, tuple))


class OffTrack(Exception):
    """An argument that only the full checks can judge."""


class Glance:
    """A quick look at an operator's calls: a key, equal where the checks' verdict is, and where the arrays lie."""

    def __init__(self, signature: Signature) -> None:
        read = [p for p in signature.tensors if p.role is not Role.OUTPUT]
        self._arrays = tuple(p.name for p in read if p.role is Role.INPUT)
        self._values = tuple(p.name for p in signature.parameters if not isinstance(p, Tensor))
        self._absent = tuple(p.name for p in read if p.role is Role.IN_PLACE)

    def at(self, arguments: Mapping[str, Any]) -> tuple[list[Hashable], list[int]]:
        """The key and the addresses of the tensors given; OffTrack where something is out of the ordinary."""
        for name in self._absent:
            if arguments[name] is not None:
                raise OffTrack
        key: list[Hashable] = []
        addresses: list[int] = []
        for name in self._arrays:
            array = arguments[name]
            if type(array) is np.ndarray:
                address = numpy_address(array)
                key += (array.dtype, array.shape, array.strides, address & 3)
                if array.base is not None:
                    key += _place_in_base(array, address)
                addresses.append(address)
            elif array is None:
                key.append(None)
            else:
                addresses.append(_glance_torch(array, key))
        for name in self._values:
            value = arguments[name]
            kind = type(value)
            if kind in _NUMBERS:
                key.append((kind, value))  # with its type, since 1 == 1.0
            elif kind in _SEQUENCES and _INTEGERS.issuperset(map(type, value)):
                key.append(tuple(value))
            else:
                raise OffTrack
        return key, addresses


def _place_in_base(array: np.ndarray, address: int) -> tuple[int, int]:
    """What decides, beside its layout, whether a view stays inside the array it is a view of."""
    base = array.base
    if type(base) is not np.ndarray or base.base is not None:
        raise OffTrack
    return address - numpy_address(base), base.nbytes


@cache
def _torch_types() -> frozenset[type]:
    torch = sys.modules["torch"]
    return frozenset((torch.Tensor, torch.nn.Parameter))


def _glance_torch(tensor: Any, key: list[Hashable]) -> int:
    if "torch" not in sys.modules or type(tensor) not in _torch_types():
        raise OffTrack
    try:
        address: int = tensor.data_ptr()
        key += (tensor.dtype, tensor.shape, tensor.stride(), address & 3)
        key += (tensor.storage_offset(), tensor.untyped_storage().nbytes())
    except RuntimeError:  # a tensor without strides or memory
        raise OffTrack from None
    if not tensor.is_cpu:
        key.append(tensor.device)
    if tensor.is_neg():
        raise OffTrack
    return address


@dataclass(frozen=True, slots=True)
class Made:
    """An output that the library makes, in the memory order of an argument of the same shape where there is one."""

    name: str
    like: str
    make: Callable[[Any], Any]


def outputs_to_make(signature: Signature, arguments: Mapping[str, Any], call: Call) -> tuple[Made, ...]:
    """The wanted outputs that the caller did not bring."""
    kind = kind_of(arguments["input"])
    return tuple(
        _to_make(output, arguments, call, kind)
        for output in signature.outputs
        if arguments.get(output.name) is None and output.wanted(call)
    )


def _to_make(output: Tensor, arguments: Mapping[str, Any], call: Call, kind: Kind) -> Made:
    assert output.shape is not None
    shape = output.shape(call).shape
    assert shape is not None
    like = next((name for name in ("input", *call.views) if call.views[name].shape == shape), "input")
    return Made(output.name, like, kind.maker(shape, output.dtype(call).allowed[0], arguments[like]))


@dataclass(frozen=True, slots=True)
class Recipe:
    """A kernel and how to feed it."""

    problem: Problem
    backend: Backend
    kernel: Kernel
    made: tuple[Made, ...]

    def serve(self, arguments: Mapping[str, Any], addresses: list[int]) -> Any:
        """The results of a call on the arrays at these addresses."""
        results: dict[str, Any] = {}
        for output in self.made:
            array = results[output.name] = output.make(arguments[output.like])
            addresses.append(numpy_address(array) if type(array) is np.ndarray else array.data_ptr())
        launch(self.problem, addresses, self.kernel, self.backend)
        return packed([results.get(name) for name in self.problem.signature.output_names])


def packed(results: list[Any]) -> Any:
    """Results as users get them: one alone, several as a tuple."""
    return results[0] if len(results) == 1 else tuple(results)
