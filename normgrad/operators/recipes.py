"""What a call's layout decides, kept for the next call of the same layout.

Every rule but those about memory speaks of shapes, strides, dtypes and attributes alone. A call that passed them leaves
a recipe: the kernel that was chosen and how its results are made. The next call of the same layout, whose arrays lie
as safely in their memory and share it as little, needs no more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from normgrad.contract.arrays import Kind, kind_of, note_written, numpy_address, wants_note
from normgrad.contract.check import Signature
from normgrad.contract.parameters import Call, Role, Tensor
from normgrad.contract.plan import Backend, Kernel, Problem, launch
from normgrad.operators.guards import Guard, guard_of, is_negated, torch_types
from normgrad.operators.sharing import Sharing

_NUMBERS = frozenset((int, float, bool))
_INTEGERS = frozenset((int, bool))
_SEQUENCES = frozenset((list, tuple))


class OffTrack(Exception):
    """An argument that only the full checks can judge."""


#: What a glance at a call saw: a key of all but the tensors of PyTorch, where all arrays lie, those tensors.
Seen: TypeAlias = tuple[list[Hashable], list[int], list[Any]]


class Glance:
    """A quick look at an operator's calls: where its key and a recipe's guard say the same, so would the checks."""

    def __init__(self, signature: Signature) -> None:
        given = [p for p in signature.tensors if p.role is not Role.OUTPUT]
        self._arrays = tuple(p.name for p in given)
        self._changed = tuple(p.name for p in given if p.is_written)
        self._outputs = signature.output_names
        self._values = tuple(p.name for p in signature.parameters if not isinstance(p, Tensor))

    def at(self, arguments: Mapping[str, Any], *, outputs: bool) -> Seen:
        """What is seen of a call, of its outputs too if they are among the arguments; OffTrack where that is odd."""
        key: list[Hashable] = []
        addresses: list[int] = []
        tensors: list[Any] = []
        plain: frozenset[type] | None = None
        for name in self._arrays + self._outputs if outputs else self._arrays:
            array = arguments[name]
            if type(array) is np.ndarray:
                address = numpy_address(array)
                key.append((array.dtype, array.shape, array.strides, address & 3))
                if array.base is not None:
                    key.append(_place_in_base(array.base, address))
                addresses.append(address)
            elif array is None:
                key.append(None)
            else:
                if plain is None:
                    plain = torch_types()
                if type(array) not in plain:
                    raise OffTrack
                try:
                    address = array.data_ptr()
                except RuntimeError:  # a tensor without memory
                    raise OffTrack from None
                key.append(address & 3)
                addresses.append(address)
                tensors.append(array)
        for name in self._changed + self._outputs if outputs else self._changed:
            array = arguments[name]
            if type(array) is np.ndarray:
                key.append(array.flags.writeable)
        for name in self._values:
            value = arguments[name]
            kind = type(value)
            if kind in _NUMBERS:
                key.append((kind, value))  # with its type, since 1 == 1.0
            elif kind in _SEQUENCES and _INTEGERS.issuperset(map(type, value)):
                key.append(tuple(value))
            else:
                raise OffTrack
        return key, addresses, tensors

    def names(self, arguments: Mapping[str, Any]) -> list[str]:
        """Whose addresses a glance sees, in its order."""
        return [name for name in self._arrays + self._outputs if arguments.get(name) is not None]


def _place_in_base(base: Any, address: int) -> tuple[Hashable, ...]:
    """What decides, beside its layout, whether a view stays inside the array it is a view of."""
    if type(base) is np.ndarray:
        if base.base is None:
            return address - numpy_address(base), base.nbytes
        if not hasattr(base.base, "base"):  # memory of something else: what the array reaches is what there is
            return address - numpy_address(base), base.shape, base.strides, base.itemsize
    elif not hasattr(base, "base"):
        return ()
    raise OffTrack


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
    results: tuple[str | None, ...]  # the outputs by name, None where one is not wanted
    used: tuple[int, ...] | None  # which of the addresses seen belong to views; None for all
    guard: Guard | None  # of PyTorch's tensors
    sharing: Sharing | None  # of what the caller lets be written
    noted: tuple[str, ...]  # the arguments whose library counts writes

    def fits(self, addresses: list[int], tensors: list[Any]) -> bool:
        """Whether what the key does not tell is as it was."""
        if self.guard is not None and not self.guard.holds(tensors):
            return False
        return self.sharing is None or self.sharing.holds(self._of_views(addresses))

    def _of_views(self, addresses: list[int]) -> list[int]:
        return addresses if self.used is None else [addresses[number] for number in self.used]

    def serve(self, arguments: Mapping[str, Any], addresses: list[int]) -> Any:
        """The results of a call that fits."""
        addresses = self._of_views(addresses)
        results: dict[str | None, Any] = {None: None}
        for output in self.made:
            array = results[output.name] = output.make(arguments[output.like])
            addresses.append(numpy_address(array) if type(array) is np.ndarray else array.data_ptr())
        launch(self.problem, addresses, self.kernel, self.backend)
        for name in self.noted:
            note_written(arguments[name])
        return packed([results[name] if name in results else arguments[name or ""] for name in self.results])


def recipe_for(
    problem: Problem,
    backend: Backend,
    kernel: Kernel,
    made: tuple[Made, ...],
    arguments: Mapping[str, Any],
    names: Sequence[str],
    wanted: frozenset[str],
) -> Recipe | None:
    """What a call leaves for the next one; None where its memory decides too much.

    ``names`` are those that a glance sees, in its order.
    """
    if any(is_negated(arguments[name]) for name in names):  # which is read through a copy
        return None
    given = [name for name in names if name in problem.views]
    written = [name for name in given if problem.signature.is_written(name)]
    sharing = Sharing([problem.views[name] for name in given], [given.index(name) for name in written])
    if not sharing.is_plain:
        return None
    return Recipe(
        problem,
        backend,
        kernel,
        made,
        tuple(name if name in wanted else None for name in problem.signature.output_names),
        None if given == list(names) else tuple(names.index(name) for name in given),
        guard_of(arguments, problem, names),
        sharing if written else None,
        tuple(name for name in written if wants_note(arguments[name])),
    )


def packed(results: list[Any]) -> Any:
    """Results as users get them: one alone, several as a tuple."""
    return results[0] if len(results) == 1 else tuple(results)
