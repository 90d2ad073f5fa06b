"""A checked call, ready to run: the second phase of the two."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import numpy as np

from normgrad.contract.arrays import NotAnArray, as_view, holds_objects, memory_of_tensor, note_written, wants_note
from normgrad.contract.check import Signature, check_memory
from normgrad.contract.overlap import overlaps_itself
from normgrad.contract.status import INVALID, NULLPTR, RUNTIME, ContractError, let_signals_through, quote, shown
from normgrad.contract.stream import Stream
from normgrad.contract.view import Memory, View


@dataclass(frozen=True, slots=True)
class Problem:
    """A checked call as a backend gets it: sound views and attributes by name; absent means absent or not wanted."""

    signature: Signature
    views: Mapping[str, View]
    attributes: Mapping[str, Any]
    device: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", next(iter(self.views.values())).device)

    @property
    def addresses(self) -> list[int]:
        """Where the views lie, in their order."""
        return [view.address for view in self.views.values()]


class Kernel(Protocol):
    """What a backend makes of a problem."""

    @property
    def workspace_size(self) -> int:
        """How many bytes :meth:`launch` needs."""

    def launch(self, addresses: list[int], workspace: int, stream: Any) -> None:
        """Do the work on the tensors at these addresses, in the order of the problem's views.

        Their layout is the problem's, on a GPU they are aligned to 16 bytes as the problem's views are, and they share
        memory no further than those do.
        """


class Workspace(Protocol):
    """Memory for one launch, alive as long as this object is."""

    @property
    def address(self) -> int:
        """Where it begins."""


class Backend(Protocol):
    """A way to compute: knows no rules, gets sound problems."""

    name: str

    def prepare(self, problem: Problem) -> Kernel:
        """Choose and set up the kernel for a problem; computes nothing."""

    def allocate(self, nbytes: int, device: str, stream: Any = None) -> Workspace:
        """Memory for a workspace that the library brings, for work on a stream."""


class _NothingToWrite:
    """The kernel of a problem whose outputs are all empty."""

    workspace_size = 0

    def launch(self, addresses: list[int], workspace: int, stream: Any) -> None:
        """Do nothing."""


def prepare(problem: Problem, backend: Backend) -> Kernel:
    """Return the kernel for a problem. Empty outputs need none, and other dimensions of theirs may be huge."""
    outputs = [view for name, view in problem.views.items() if problem.signature.is_written(name)]
    return backend.prepare(problem) if any(view.numel for view in outputs) else _NothingToWrite()


class Plan:
    """A checked call with its workspace size, which an operator's ``plan`` returns.

    A plan runs once, unless ``repeatable`` is set to True.
    """

    # So that a misspelt ``repeatable`` is an error.
    __slots__ = (
        *("__weakref__", "_addresses", "_backend", "_kernel", "_lock", "_movable"),
        *("_problem", "_repeatable", "_signature", "_spent", "_written_owners"),
    )

    def __init__(self, problem: Problem, backend: Backend) -> None:
        self._signature = problem.signature
        self._backend = backend
        self._problem = problem
        self._kernel = prepare(problem, backend)
        self._addresses = problem.addresses
        self._written_owners = _written_owners(problem)
        self._movable = _movable(problem)
        self._lock = threading.RLock()  # a signal handler may run the plan in the middle of a call
        self._repeatable = False
        self._spent = False
        _every_plan.add(self)

    def __repr__(self) -> str:
        tensors = ", ".join(f"{name} {view.dtype} {view.shape}" for name, view in self._problem.views.items())
        state = "has run" if self._spent else "repeatable" if self._repeatable else "runs once"
        return (
            f"<Plan {self._signature.name}({tensors}) on {self._problem.device} by the backend {self._backend.name}, "
            f"workspace {self.workspace_size} bytes, {state}>"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Plan cannot be copied or pickled: it refers to arrays by their address in this process")

    @property
    def workspace_size(self) -> int:
        """How many bytes of workspace a run needs."""
        return self._kernel.workspace_size

    @property
    def repeatable(self) -> bool:
        """Whether the plan may run more than once."""
        return self._repeatable

    @repeatable.setter
    def repeatable(self, value: bool) -> None:
        with self._lock:
            self._refuse_if_spent()
            self._repeatable = bool(value)

    @property
    def views(self) -> Mapping[str, View]:
        """The views that a run reads and writes, by parameter name."""
        return self._problem.views

    def rebind(self, **arrays: Any) -> None:
        """Use other memory for parameters: arrays with the layout of those that the plan was made for.

        All of them are checked before any is taken.
        """
        with self._lock:
            self._refuse_if_spent()
            views = dict(self._problem.views)
            for name, array in arrays.items():
                views[name] = self._rebound(name, array)
            check_memory(self._signature, views)
            problem = Problem(self._signature, views, self._problem.attributes)
            kernel, addresses, owners = prepare(problem, self._backend), problem.addresses, _written_owners(problem)
            changed = problem, kernel, addresses, owners, _movable(problem)
            # In one statement, so that neither a fork nor a signal handler finds the half of it.
            self._problem, self._kernel, self._addresses, self._written_owners, self._movable = changed

    def _rebound(self, name: str, array: Any) -> View:
        if name not in self._problem.views:
            text = f"{quote(name)} is not a tensor of this plan, which has {', '.join(self._problem.views)}"
            raise ContractError(INVALID, self._signature.name, name, text)
        if array is None:
            raise self._signature.error(name, "is null, and must be given", NULLPTR)
        try:
            view = as_view(array)
        except NotAnArray as problem:
            raise self._signature.error(name, quote(problem)) from problem.__cause__
        planned = self._problem.views[name]
        if not view.same_layout(planned):
            raise self._signature.error(
                name,
                f"is {view.dtype} {view.shape} with strides {view.strides} on {view.device}, and must be as planned: "
                f"{planned.dtype} {planned.shape} with strides {planned.strides} on {planned.device}",
            )
        return view

    def run(self, workspace: Any = None, stream: Any = None) -> None:
        """Do the work.

        Parameters
        ----------
        workspace : array, optional
            Memory of at least ``workspace_size`` bytes, contiguous and on the tensors' device. By default the
            library allocates it.
        stream : Stream, optional
            The stream that does it. By default it is done on the caller's thread before the call returns, on a GPU on
            the current CUDA stream.
        """
        with self._lock:
            self._refuse_if_spent()
            self._refuse_if_moved()
            memory = None if workspace is None else self._given(workspace)
            self._check_stream(stream)
            problem, kernel, addresses = self._problem, self._kernel, self._addresses
            self._spent = not self._repeatable
        if isinstance(stream, Stream):
            stream.submit(lambda: launch(problem, addresses, kernel, self._backend, memory))
        else:
            launch(problem, addresses, kernel, self._backend, memory, stream)
        if self._written_owners:
            note_written(self._written_owners)

    def _check_stream(self, stream: Any) -> None:
        if stream is None or isinstance(stream, Stream):
            return
        if self._problem.device == "cpu":
            raise self._signature.error("stream", f"is {quote(shown(stream))}, and must be a normgrad.Stream or None")
        handle = getattr(stream, "cuda_stream", stream)
        if not isinstance(handle, int) or isinstance(handle, bool):
            raise self._signature.error(
                "stream", f"is {quote(shown(stream))}, and must be a torch.cuda.Stream, a raw handle or None"
            )

    def _refuse_if_spent(self) -> None:
        if self._spent:
            raise self._signature.error(
                None, "the plan has run, and runs once; set repeatable = True before the run, or make another plan"
            )

    def _refuse_if_moved(self) -> None:
        for name, address, find_address, nbytes, find_nbytes in self._movable:
            if find_address() != address or find_nbytes() != nbytes:
                raise self._signature.error(
                    name, "has other memory than it had when the plan was made, and must have the same: rebind it"
                )

    def _given(self, workspace: Any) -> Memory:
        """The caller's workspace, checked."""
        memory = workspace if isinstance(workspace, Memory) else self._memory_of(workspace)
        size = self._kernel.workspace_size
        if size == 0:
            return memory
        if memory.address == 0:
            raise self._signature.error("workspace", f"is null, and must have {size} bytes", NULLPTR)
        if memory.nbytes < size:
            raise self._signature.error("workspace", f"has {memory.nbytes} bytes, and must have {size}")
        if memory.device != self._problem.device:
            raise self._signature.error("workspace", f"is on {memory.device}, and must be on {self._problem.device}")
        used = Memory(memory.address, size, memory.device)
        for name, view in self._problem.views.items():
            if used.intersects(view.reach):
                raise self._signature.error("workspace", f"shares memory with {{{name}}}, and must not")
        return memory

    def _memory_of(self, workspace: Any) -> Memory:
        try:
            view = as_view(workspace)
        except NotAnArray as problem:
            raise self._signature.error("workspace", quote(problem)) from problem.__cause__
        if holds_objects(workspace):
            raise self._signature.error("workspace", "is an array of Python objects, and must be one of plain data")
        reach = view.reach
        is_dense = reach.nbytes == view.numel * view.dtype.itemsize and not overlaps_itself(view)
        if not is_dense or not view.writable or not view.inside_storage:
            layout = f"{'' if view.writable else 'read-only, '}of shape {view.shape} with strides {view.strides}"
            raise self._signature.error("workspace", f"is {layout}, and must be contiguous and writable")
        return Memory(reach.address, reach.nbytes, view.device, owner=workspace)


_every_plan: weakref.WeakSet[Plan] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a process made by fork, where the threads that held them are gone."""
    for plan in list(_every_plan):
        plan._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


#: A tensor of a plan: its name, and twice a number that must not have changed and the function that finds it.
_Movable = tuple[str, int, Callable[[], int], int, Callable[[], int]]


def _movable(problem: Problem) -> list[_Movable]:
    """The tensors whose memory a run has to look at again. The storages are kept, so that their memory stays."""
    found = []
    for name, view in problem.views.items():
        memory = memory_of_tensor(view) if view.numel else None
        if memory is not None:
            found.append((name, view.address, memory[0], view.storage.nbytes, memory[1]))
    return found


def _written_owners(problem: Problem) -> list[Any]:
    """The tensors whose libraries want to know that they were written to."""
    written = [view.storage.owner for name, view in problem.views.items() if problem.signature.is_written(name)]
    return [owner for owner in written if wants_note(owner)]


def launch(
    problem: Problem,
    addresses: list[int],
    kernel: Kernel,
    backend: Backend,
    workspace: Workspace | None = None,
    stream: Any = None,
) -> None:
    """Launch a kernel, with memory of the library's where no workspace is given; status 361001 where it fails."""
    try:
        size = kernel.workspace_size
        if workspace is None and size:
            workspace = backend.allocate(size, problem.device, stream)
        kernel.launch(addresses, workspace.address if workspace else 0, stream)
    except Exception as error:
        let_signals_through(error)
        raise failure(problem, error) from error


def failure(problem: Problem, error: Exception) -> ContractError:
    """The error of a launch that failed."""
    text = f"the work failed: {quote(f'{type(error).__name__}: {error}')}"
    return ContractError(RUNTIME, problem.signature.name, None, text)


def allocate_host(nbytes: int) -> Memory:
    """Fresh memory on the host."""
    owner = np.empty(nbytes, np.uint8)
    return Memory(owner.ctypes.data, nbytes, owner=owner)
