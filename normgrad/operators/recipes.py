"""What a call's layout decides, kept for the next call of the same layout.

Every rule but those about memory speaks of shapes, strides, dtypes and attributes alone. A call that passed them leaves
a recipe: the kernel that was chosen and how its results are made. The next call of the same layout only has to
look where its arrays lie.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from normgrad.contract.arrays import Kind, as_view, kind_of, numpy_address
from normgrad.contract.check import Signature
from normgrad.contract.dtypes import DType
from normgrad.contract.parameters import Call, Role, Tensor
from normgrad.contract.plan import Backend, Kernel, Problem, launch
from normgrad.contract.view import Shape, View

_NUMBERS = frozenset((int, float, bool))
_INTEGERS = frozenset((int, bool))
_SEQUENCES = frozenset((list, tuple))
_ABSENT = "absent"


class Layout:
    """What of an operator's calls a recipe depends on."""

    def __init__(self, signature: Signature) -> None:
        read = [p for p in signature.tensors if p.role is not Role.OUTPUT]
        self._arrays = tuple(p.name for p in read if p.role is Role.INPUT)
        self._in_place = tuple(p.name for p in read if p.role is Role.IN_PLACE)
        self._values = tuple(p.name for p in signature.parameters if not isinstance(p, Tensor))

    def of(self, arguments: Mapping[str, Any]) -> Hashable | None:
        """A key that is equal for calls of the same layout; None for arguments off the beaten track."""
        for name in self._in_place:
            if arguments[name] is not None:
                return None
        key: list[Hashable] = []
        for name in self._arrays:
            array = arguments[name]
            layout = _ABSENT if array is None else _array_layout(array)
            if layout is None:
                return None
            key.append(layout)
        for name in self._values:
            value = arguments[name]
            kind = type(value)
            if kind in _NUMBERS:
                key.append((kind, value))  # with its type, since 1 == 1.0 == True
            elif kind in _SEQUENCES and all(type(item) in _INTEGERS for item in value):
                key.append(tuple(value))
            else:
                return None
        return tuple(key)


def _array_layout(array: Any) -> Hashable | None:
    if type(array) is np.ndarray:
        return array.dtype, array.shape, array.strides
    torch = sys.modules.get("torch")
    if torch is not None and type(array) in (torch.Tensor, torch.nn.Parameter):
        try:
            return None if array.is_neg() else (array.dtype, array.shape, array.stride(), array.device)
        except RuntimeError:  # no strides: a sparse tensor
            return None
    return None


@dataclass(frozen=True, slots=True)
class _Made:
    """An output that the library makes, in the memory order of an argument of the same shape where there is one."""

    name: str
    shape: Shape
    dtype: DType
    like: str


@dataclass(frozen=True, slots=True)
class _Given:
    """A tensor that the caller brings, with the bytes it reaches below and above its address."""

    name: str
    itemsize: int
    below: int
    above: int

    def address(self, array: Any) -> int | None:
        """Where the array lies; None unless it is sure to be sound."""
        if type(array) is np.ndarray:
            address = numpy_address(array)
            sound = array.base is None or as_view(array).inside_storage
        else:
            address = array.data_ptr()
            storage = array.untyped_storage()
            start = storage.data_ptr()
            sound = start <= address - self.below and address + self.above <= start + storage.nbytes()
        return address if sound and not address % self.itemsize and (address or not self.above) else None


@dataclass(frozen=True, slots=True)
class Recipe:
    """A kernel and how to feed it."""

    problem: Problem
    backend: Backend
    kernel: Kernel
    given: tuple[_Given, ...]
    made: tuple[_Made, ...]
    outputs: tuple[str, ...]

    def serve(self, arguments: Mapping[str, Any]) -> Any | None:
        """The results of a call, or None where an array's memory needs a closer look."""
        addresses = []
        for given in self.given:
            address = given.address(arguments[given.name])
            if address is None:
                return None
            addresses.append(address)
        results = make(self.made, kind_of(arguments["input"]), arguments)
        addresses += [_address(array) for array in results.values()]
        launch(self.problem, addresses, self.kernel, self.backend)
        return packed([results.get(name) for name in self.outputs])


def recipe_for(problem: Problem, backend: Backend, kernel: Kernel, made: tuple[_Made, ...]) -> Recipe:
    """The recipe of a call whose outputs the library made."""
    fresh = {output.name for output in made}
    given = tuple(_given(name, view) for name, view in problem.views.items() if name not in fresh)
    return Recipe(problem, backend, kernel, given, made, problem.signature.output_names)


def _given(name: str, view: View) -> _Given:
    reach = view.reach
    return _Given(name, view.dtype.itemsize, view.address - reach.address, reach.end - view.address)


def outputs_to_make(signature: Signature, arguments: Mapping[str, Any], call: Call) -> tuple[_Made, ...]:
    """The wanted outputs that the caller did not bring."""
    return tuple(
        _to_make(output, call) for output in signature.outputs if arguments[output.name] is None and output.wanted(call)
    )


def _to_make(output: Tensor, call: Call) -> _Made:
    assert output.shape is not None
    shape = output.shape(call).shape
    assert shape is not None
    alike = (name for name in ("input", *call.views) if call.views[name].shape == shape)
    return _Made(output.name, shape, output.dtype(call).allowed[0], next(alike, "input"))


def _address(array: Any) -> int:
    return numpy_address(array) if isinstance(array, np.ndarray) else array.data_ptr()


def make(made: tuple[_Made, ...], kind: Kind, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Fresh arrays by name."""
    return {output.name: kind.empty(output.shape, output.dtype, arguments[output.like]) for output in made}


def packed(results: list[Any]) -> Any:
    """Results as users get them: one alone, several as a tuple."""
    return results[0] if len(results) == 1 else tuple(results)
