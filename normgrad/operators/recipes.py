"""What a call's layout decides, kept for the next call of the same layout.

Every rule but those about memory speaks of shapes, strides, dtypes and attributes alone. A call that passed them leaves
a recipe: the kernel that was chosen and how its results are made. The next call of the same layout, whose arrays lie
as safely in their memory and share it as little, needs no more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from normgrad.contract.arrays import Make, note_written, numpy_address
from normgrad.contract.plan import Backend, Kernel, Problem, launch
from normgrad.operators.guards import Guard
from normgrad.operators.sharing import Sharing

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Made:
    """An output that the library makes, and how to make another."""

    name: str
    array: Any
    make: Make


@dataclass(frozen=True, slots=True)
class Recipe:
    """A kernel and how to feed it."""

    needs_grad: bool  # whether autograd follows one of the tensors
    problem: Problem
    backend: Backend
    kernel: Kernel
    outputs: tuple[Make | int | None, ...]  # of each how it is made, or which argument it is; None: not wanted
    guard: Guard | None  # of PyTorch's tensors
    order: tuple[int, ...] | None  # which of the addresses seen are the views'; None for all in order
    sharing: Sharing | None  # of what the caller lets be written
    noted: tuple[int, ...]  # the arguments whose library counts writes

    def tried(self, arguments: Arguments, addresses: list[int], tensors: tuple[Any, ...]) -> Any:
        """The results of a call, None where it does not fit.

        ``addresses`` are those of NumPy's arrays among the arguments, whose layouts fit; ``tensors`` are PyTorch's.
        """
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


def packed(results: Sequence[Any]) -> Any:
    """Results as users get them: one alone, several as a tuple."""
    return results[0] if len(results) == 1 else tuple(results)
