"""What a prepared kernel is on the CPU: steps, each a compiled function with a descriptor of int64 numbers.

A descriptor holds sizes, strides and addresses. The addresses are filled in at launch, into a copy: a step may run in
several threads at once, and its counters stand in the descriptor too.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from normgrad.cpu import pool
from normgrad.cpu.variants import Kernel

if TYPE_CHECKING:
    from normgrad.cpu.native import Entry

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
        self._descriptor = numbers = array("q", descriptor.tobytes() + bytes(8))  # and room for its own address
        self.numbers = len(numbers)
        self._scratch = tuple((at, place.offset) for at, place in places if place.source == _WORKSPACE)
        self.fills = tuple((at, place.source, place.offset) for at, place in places if place.source != _WORKSPACE)
        self._tags = tags
        self._shared = shared
        self._slots = pool.slots()
        self._entry: Entry | None = None
        self._with_scratch: tuple[int, array[int]] = (0, numbers)
        self._filled: tuple[list[int], array[int], array[int]] = ([], numbers, numbers)

    def run(self, addresses: list[int], workspace: int) -> None:
        """Call the kernel on the tensors at these addresses."""
        descriptor = self._at(addresses, workspace)[:]
        self.call(descriptor, descriptor.buffer_info()[0])

    def call(self, descriptor: array[int], address: int) -> None:
        """Call the kernel with a filled descriptor at its address."""
        entry = self._entry or self._loaded()
        if self._shared:
            status = pool.run(entry, self._slots, address, self._shared, kept=descriptor)
        else:
            status = entry(address)
        if status:
            raise self.gave_up(status)

    def gave_up(self, status: int) -> RuntimeError:
        """What a kernel's status other than 0 says."""
        return RuntimeError(f"{self._kernel.name} gave up with status {status}")

    @property
    def template(self) -> array[int]:
        """The descriptor without any address."""
        return self._descriptor

    @property
    def scratch(self) -> Sequence[tuple[int, int]]:
        """Positions, each for the workspace's address plus an offset."""
        return self._scratch

    @property
    def alone(self) -> int:
        """The address of the compiled kernel, 0 where other threads may take part."""
        return 0 if self._shared else self._loaded().address

    def _loaded(self) -> Entry:
        entry = self._entry
        if entry is None:
            entry = self._entry = self._kernel.entry(self._tags)
        return entry

    def _in_workspace(self, workspace: int) -> array[int]:
        """The descriptor with the workspace's addresses alone: the workspace is often the last call's."""
        last, descriptor = self._with_scratch
        if workspace != last:
            descriptor = self._descriptor[:]
            for position, offset in self._scratch:
                descriptor[position] = workspace + offset
            self._with_scratch = (workspace, descriptor)
        return descriptor

    def _at(self, addresses: list[int], workspace: int) -> array[int]:
        """The descriptor with its addresses: the tensors are sometimes the last call's."""
        descriptor = self._in_workspace(workspace)
        last_addresses, base, filled = self._filled
        if base is not descriptor or addresses != last_addresses:
            filled = descriptor[:]
            for position, source, offset in self.fills:
                filled[position] = addresses[source] + offset
            self._filled = (addresses, descriptor, filled)
        return filled


@dataclass(slots=True)
class SteppedKernel:
    """Steps in order."""

    workspace_size: int
    steps: list[Step] = field(default_factory=list)

    def launch(self, addresses: list[int], workspace: int, stream: Any) -> None:
        """Run the steps one after another."""
        base = _aligned(workspace)
        for step in self.steps:
            step.run(addresses, base)

    @property
    def one_step(self) -> OneStep | None:
        """The only step, for a caller that fills in its descriptor."""
        return OneStep(self.workspace_size, self.steps[0]) if len(self.steps) == 1 else None


class OneStep:
    """A kernel that is one step."""

    def __init__(self, workspace_size: int, step: Step) -> None:
        self.is_ready = self.workspace = None
        self.alignment = ALIGNMENT
        self.workspace_size, self.numbers, self.fills = workspace_size, step.numbers, step.fills
        self.template, self.scratch, self.entry = step.template, step.scratch, step.alone
        self.call = None if self.entry else step.call
        self._step = step

    def failed(self, status: int, address: int) -> None:
        """Raise what the status says."""
        raise self._step.gave_up(status)


def _aligned(workspace: int) -> int:
    return -(-workspace // ALIGNMENT) * ALIGNMENT
