"""What a call's layout decides, kept for the next call of the same layout.

Every rule but those about memory speaks of shapes, strides, dtypes and attributes alone. A call that passed them leaves
a recipe: the kernel that was chosen and how its results are made. The next call of the same layout, whose arrays lie
as safely in their memory and share it as little, needs no more than that.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from normgrad.contract.arrays import Make, note_written, numpy_address
from normgrad.contract.plan import Backend, Kernel, OneStep, Problem, failure, launch
from normgrad.operators import gathering
from normgrad.operators.guards import Guard
from normgrad.operators.sharing import Sharing

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Made:
    """An output that the library makes, and how to make another."""

    name: str
    array: Any
    make: Make


class Recipe(Protocol):
    """What a call has left."""

    @property
    def needs_grad(self) -> bool:
        """Whether autograd follows one of the tensors."""

    def tried(self, arguments: Arguments, addresses: list[int], tensors: tuple[Any, ...]) -> Any:
        """The results of a call, None where it does not fit.

        ``addresses`` are those of NumPy's arrays among the arguments, whose layouts fit; ``tensors`` are PyTorch's.
        """


@dataclass(frozen=True, slots=True)
class AnyRecipe:
    """A kernel and how to feed it."""

    needs_grad: bool
    problem: Problem
    backend: Backend
    kernel: Kernel
    outputs: tuple[Make | int | None, ...]  # of each how it is made, or which argument it is; None: not wanted
    guard: Guard | None  # of PyTorch's tensors
    order: tuple[int, ...] | None  # which of the addresses seen are the views'; None for all in order
    sharing: Sharing | None  # of what the caller lets be written
    noted: tuple[int, ...]  # the arguments whose library counts writes

    def tried(self, arguments: Arguments, addresses: list[int], tensors: tuple[Any, ...]) -> Any:
        places = self._places(addresses, tensors)
        return None if places is None else self._served(arguments, places)

    def _places(self, addresses: list[int], tensors: tuple[Any, ...]) -> list[int] | None:
        """Where the views lie, if what the key does not tell is as it was."""
        if self.guard is not None:
            found = self.guard.places(tensors) if self.guard.holds(*tensors) else None
            if found is None:
                return None
            addresses = addresses + found
        if self.order is not None:
            addresses = [addresses[number] for number in self.order]
        return addresses if self.sharing is None or self.sharing.holds(addresses) else None

    def _served(self, arguments: Arguments, addresses: list[int]) -> Any:
        results: list[Any] = []
        for output in self.outputs:
            if output is None:
                results.append(None)
            elif isinstance(output, int):
                results.append(arguments[output])
            else:
                made = output()
                addresses.append(numpy_address(made) if type(made) is np.ndarray else made.data_ptr())
                results.append(made)
        launch(self.problem, addresses, self.kernel, self.backend)
        if self.noted:
            note_written([arguments[place] for place in self.noted])
        return packed(results)


class AtOnce:
    """The recipe of a call on tensors that one step serves, with results of the library's."""

    def __init__(self, usual: AnyRecipe, step: OneStep, makers: Sequence[Make | None]) -> None:
        """``usual`` is the recipe where the step is not ready; ``makers`` make results where it is."""
        assert usual.guard is not None
        self.usual = usual
        self.needs_grad = usual.needs_grad
        self.tried = _tried_at_once(usual, usual.guard, step, makers)


def _tried_at_once(
    usual: AnyRecipe, guard: Guard, step: OneStep, makers: Sequence[Make | None]
) -> Callable[[Arguments, list[int], tuple[Any, ...]], Any]:
    """A closure, whose names take less time than attributes."""
    found = gathering.gather()
    assert found is not None
    gather, holds, problem, is_ready = found, guard.holds, usual.problem, step.is_ready
    size, quick_workspace, allocate, device = (
        step.workspace_size,
        step.workspace,
        usual.backend.allocate,
        problem.device,
    )
    descriptor_at, call, single = step.descriptor, step.call, len(makers) == 1
    wanted = [place for place, make in enumerate(makers) if make is not None]
    table = array("q", gathering.table(guard.counting_on(step.counted_on), wanted, step.numbers, step.fills))
    table_at, _ = table.buffer_info()
    room = array("q", bytes(8 * (len(guard.limits) + len(wanted))))

    def tried(arguments: Arguments, addresses: list[int], tensors: tuple[Any, ...]) -> Any:
        if is_ready is not None and not is_ready():
            return usual.tried(arguments, addresses, tensors)
        if not holds(*tensors):
            return None
        results = tuple([make and make() for make in makers])
        try:
            memory: Any = None
            begin = 0
            if quick_workspace is not None:
                memory, begin = quick_workspace()
            elif size:
                memory = allocate(size, device)
                begin = memory.address
            descriptor = descriptor_at(begin) + room
            address, _ = descriptor.buffer_info()
            if gather(table_at, id(tensors), id(results), address):
                return None
            call(descriptor, address)
        except Exception as error:
            raise failure(problem, error) from error
        del memory  # which the work had to itself until here
        return results[0] if single else results

    tried.table = table  # type: ignore[attr-defined] # kept, since its address is
    return tried


def packed(results: Sequence[Any]) -> Any:
    """Results as users get them: one alone, several as a tuple."""
    return results[0] if len(results) == 1 else tuple(results)
