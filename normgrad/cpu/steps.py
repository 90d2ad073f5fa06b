"""What a prepared kernel is on the CPU: steps, each a compiled function with a descriptor of int64 numbers.

A descriptor holds sizes, strides and addresses. The addresses are filled in at launch, into a copy: a step may run in
several threads at once, and its counters stand in the descriptor too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from normgrad.cpu import pool
from normgrad.cpu.jit import announced

ALIGNMENT = 64
_WORKSPACE = -1


@dataclass(frozen=True, slots=True)
class Place:
    """Where memory will be: a tensor of the problem (by its number) or the workspace, and how many bytes in."""

    source: int
    offset: int = 0

    def __add__(self, offset: int) -> Place:
        return Place(self.source, self.offset + offset)


class Workspace:
    """Hands out pieces of the workspace while a kernel is prepared."""

    def __init__(self) -> None:
        self._used = 0

    def take(self, nbytes: int) -> Place:
        """A piece, aligned to a cache line."""
        place = Place(_WORKSPACE, self._used)
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return place

    @property
    def size(self) -> int:
        """How many bytes to ask for, whatever the alignment of what comes."""
        return self._used + ALIGNMENT if self._used else 0


_compiled: set[tuple[Any, ...]] = set()  # kernels with the types they have been called with


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a compiled function: ``function(descriptor, *tags)``.

    A tag is a scalar whose type chooses a dtype. A shared step runs on all threads and divides its work itself.
    """

    function: Callable[..., None]
    descriptor: np.ndarray
    places: tuple[tuple[int, Place], ...]
    tags: tuple[Any, ...] = ()
    shared: bool = False

    def run(self, addresses: Sequence[int], workspace: int) -> None:
        descriptor = self.descriptor.copy()
        for position, place in self.places:
            start = workspace if place.source == _WORKSPACE else addresses[place.source]
            descriptor[position] = start + place.offset
        key = (self.function, *map(type, self.tags))
        if key not in _compiled:
            with announced(self.function.__name__):
                self.function(descriptor, *self.tags)
            _compiled.add(key)
        elif self.shared:
            pool.run(self.function, descriptor, *self.tags)
        else:
            self.function(descriptor, *self.tags)


@dataclass(slots=True)
class SteppedKernel:
    """Steps in order."""

    workspace_size: int
    steps: list[Step] = field(default_factory=list)

    def launch(self, addresses: Sequence[int], workspace: int, stream: Any) -> None:
        """Run the steps one after another."""
        base = -(-workspace // ALIGNMENT) * ALIGNMENT
        for step in self.steps:
            step.run(addresses, base)
