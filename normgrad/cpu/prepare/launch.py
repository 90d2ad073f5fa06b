"""What a prepared kernel is on the CPU: steps, each a compiled function with a descriptor of int64 numbers.

A descriptor holds sizes, strides and addresses. The addresses are filled in at launch, into a copy: a step may run in
several threads at once, and its counters stand in the descriptor too.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from normgrad.cpu.compile.kernel_lookup import Kernel
from normgrad.cpu.threads import pool

if TYPE_CHECKING:
    from normgrad.cpu.compile.object_code import Entry

ALIGNMENT = 64
_WORKSPACE = -1


@dataclass(frozen=True, slots=True)
class Place:
    """Where memory will be: a tensor of the problem, by its number, or so many bytes into the workspace."""

    source: int
    offset: int = 0


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


class Step:
    """One call of a kernel: ``kernel(descriptor, *tags)``.

    A tag is a scalar whose type chooses a dtype. A step that shares its elements, so many, runs on several
    threads and divides its work itself; its workspace has room for as many as there are slots when it is prepared.
    """

    def __init__(
        self,
        kernel: Kernel,
        descriptor: np.ndarray,
        places: Sequence[tuple[int, Place]],
        tags: tuple[Any, ...] = (),
        shared: int = 0,
    ) -> None:
        self._kernel = kernel
        self._descriptor = array("q", descriptor.tobytes())
        self._scratch = tuple((at, place.offset) for at, place in places if place.source == _WORKSPACE)
        self._fills = tuple((at, place.source) for at, place in places if place.source != _WORKSPACE)
        self._tags = tags
        self._shared = shared
        self._slots = pool.slots()
        self._entry: Entry | None = None
        self._with_workspace: tuple[int, array[int]] = (0, self._descriptor)

    def run(self, addresses: list[int], workspace: int) -> None:
        """Call the kernel on the tensors at these addresses."""
        base, descriptor = self._with_workspace
        if base != workspace:
            descriptor = self._in_workspace(workspace)
        descriptor = descriptor[:]
        for position, source in self._fills:
            descriptor[position] = addresses[source]
        self.call(descriptor, descriptor.buffer_info()[0])

    def call(self, descriptor: array[int], address: int) -> None:
        """Call the kernel with a filled descriptor at its address."""
        entry = self._entry or self._loaded()
        if self._shared:
            status = pool.run(entry, self._slots, address, self._shared, kept=descriptor)
        else:
            status = entry(address)
        if status:
            raise RuntimeError(f"{self._kernel.name} gave up with status {status}")

    def _loaded(self) -> Entry:
        entry = self._entry = self._kernel.entry(self._tags)
        return entry

    def _in_workspace(self, workspace: int) -> array[int]:
        """Return the descriptor with the workspace's addresses, and keep it: the workspace is often the same again."""
        descriptor = self._descriptor[:]
        for position, offset in self._scratch:
            descriptor[position] = workspace + offset
        self._with_workspace = (workspace, descriptor)
        return descriptor


class _Thread(threading.local):
    """What a thread is doing."""

    between_steps = False


_thread = _Thread()


def holds_workspace() -> bool:
    """Return whether this thread is inside a launch of several steps, which leave data for each other in the workspace.

    A signal handler or a finalizer may ask: its own launch needs another workspace.
    """
    return _thread.between_steps


@dataclass(slots=True)
class SteppedKernel:
    """Steps in order."""

    workspace_size: int
    steps: list[Step] = field(default_factory=list)

    def launch(self, addresses: list[int], workspace: int, stream: Any) -> None:
        """Run the steps one after another."""
        base = -(-workspace // ALIGNMENT) * ALIGNMENT
        if len(self.steps) == 1:
            self.steps[0].run(addresses, base)
            return
        before, _thread.between_steps = _thread.between_steps, True
        try:
            for step in self.steps:
                step.run(addresses, base)
        finally:
            _thread.between_steps = before
