"""A prepared kernel: steps, each a compiled function with its descriptor, and the workspace they share.

The addresses of a descriptor are filled in at launch, into a copy: several threads may run one plan at once, and the
counters by which threads share the work of a step are in its descriptor too.
"""

from __future__ import annotations

import threading
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from normgrad.cpu.compile.kernel_lookup import Kernel
from normgrad.cpu.descriptors import Pointer, pack
from normgrad.cpu.tags import Tag
from normgrad.cpu.threads import pool

if TYPE_CHECKING:
    from normgrad.cpu.compile.object_code import Entry

ALIGNMENT = 64


class Workspace:
    """Hands out parts of the workspace while a kernel is prepared."""

    def __init__(self) -> None:
        self._used = 0

    def take(self, nbytes: int) -> Pointer:
        """Return a pointer to a part of so many bytes, aligned to a cache line."""
        part = Pointer.to_workspace(self._used)
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return part

    @property
    def size(self) -> int:
        """Return how many bytes to allocate, whatever the alignment of the allocation."""
        return self._used + ALIGNMENT if self._used else 0


class Step:
    """One call of a kernel: ``kernel(descriptor, *tags)``.

    The descriptor is an instance of a class of :mod:`normgrad.cpu.descriptors`. A step that shares so many elements
    runs on several threads; its workspace has room for as many as there are slots when it is prepared.
    """

    def __init__(self, kernel: Kernel, descriptor: Any, *tags: Tag, shared: int = 0) -> None:
        self._kernel = kernel
        self._descriptor, pointers = pack(descriptor)
        self._scratch = tuple((at, pointer.offset) for at, pointer in pointers if pointer.is_in_workspace)
        self._fills = tuple((at, pointer.view) for at, pointer in pointers if not pointer.is_in_workspace)
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
        for at, view in self._fills:
            descriptor[at] = addresses[view]
        self.call(descriptor, descriptor.buffer_info()[0])

    def call(self, descriptor: array[int], address: int) -> None:
        """Call the kernel with a filled descriptor at its address."""
        entry = self._entry or self.load()
        if self._shared:
            status = pool.run(entry, self._slots, address, self._shared, kept=descriptor)
        else:
            status = entry(address)
        if status:
            raise RuntimeError(f"{self._kernel.name} returned status {status}")

    def load(self) -> Entry:
        """Return the compiled kernel."""
        entry = self._entry = self._entry or self._kernel.entry(self._tags)
        return entry

    def _in_workspace(self, workspace: int) -> array[int]:
        """Return the descriptor with the workspace's addresses, and keep it: the workspace is often the same again."""
        descriptor = self._descriptor[:]
        for at, offset in self._scratch:
            descriptor[at] = workspace + offset
        self._with_workspace = (workspace, descriptor)
        return descriptor


class _Thread(threading.local):
    """State of a thread."""

    between_steps = False


_thread = _Thread()


def holds_workspace() -> bool:
    """Return whether this thread is inside a launch of several steps, which leave data for each other in the workspace.

    A signal handler or a finalizer may ask: its own launch needs another workspace.
    """
    return _thread.between_steps


@dataclass(slots=True)
class SteppedKernel:
    """The steps of a kernel, in order."""

    workspace_size: int
    steps: list[Step] = field(default_factory=list)

    def load(self) -> None:
        """Load the code of all steps, or compile it."""
        for step in self.steps:
            step.load()

    def launch(self, addresses: list[int], workspace: int, stream: Any) -> None:
        """Run the steps one after another."""
        base = -(-workspace // ALIGNMENT) * ALIGNMENT
        if len(self.steps) == 1:
            self.steps[0].run(addresses, base)
            return
        self.load()  # which may fail: no step has written to an output yet
        before, _thread.between_steps = _thread.between_steps, True
        try:
            for step in self.steps:
                step.run(addresses, base)
        finally:
            _thread.between_steps = before
