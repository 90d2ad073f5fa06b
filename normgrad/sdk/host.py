"""Devices on the host: their memory is the host's, a stream is a thread that works in order."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from normgrad.contract.plan import Kernel, Plan
from normgrad.contract.stream import Stream
from normgrad.contract.view import Memory
from normgrad.cpu.prepare.launch import SteppedKernel
from normgrad.sdk import native


class HostMark:
    """A point in a stream's work: passed once the work before it is done."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self._at = 0

    def set(self) -> None:
        self._at = time.perf_counter_ns()
        self._passed.set()

    def query(self) -> bool:
        return self._passed.is_set()

    def wait(self) -> None:
        self._passed.wait()

    def milliseconds_since(self, earlier: Any) -> float:
        return (self._at - earlier._at) / 1e6


@dataclass(frozen=True, slots=True)
class _Keeping:
    """Work, and the blocks of memory that must stay until it is done."""

    work: Callable[[], None]
    kept: Any

    def __call__(self) -> None:
        self.work()


class HostStream:
    """A stream whose work the host does."""

    def __init__(self) -> None:
        self._stream = Stream()

    def run(self, plan: Plan, workspace: Memory) -> None:
        _load_before_exit(plan._kernel)
        plan.run(workspace, self._stream)

    def copy(self, to: int, source: int, nbytes: int, sides: tuple[bool, bool], kept: Any) -> None:
        self._stream.submit(_Keeping(partial(copy, to, source, nbytes, sides), kept))

    def fill(self, to: int, value: int, nbytes: int, on_device: bool, kept: Any) -> None:
        self._stream.submit(_Keeping(partial(native.fill, to, value, nbytes), kept))

    def record(self) -> HostMark:
        mark = HostMark()
        self._stream.submit(mark.set)
        return mark

    def wait_for(self, mark: HostMark) -> None:
        self._stream.submit(mark.wait)

    def query(self) -> bool:
        return self._stream.query()

    def synchronize(self, timeout: float | None = None) -> None:
        self._stream.synchronize(timeout)


def copy(to: int, source: int, nbytes: int, sides: tuple[bool, bool]) -> None:
    """Copy bytes; ``sides`` says which of the two addresses, to and source, lie in blocks of ours."""
    if all(sides):
        native.move(to, source, nbytes)
    else:
        native.copy(to, source, nbytes)


def _load_before_exit(kernel: Kernel) -> None:
    """Load a kernel in the caller's thread, then register the wait for work at the end of the process.

    LLVM takes its state down at the end of the process, by handlers that it registers while it is used. They would run
    before the wait if LLVM came into use after that was registered, under a stream that is still loading a kernel.
    """
    if isinstance(kernel, SteppedKernel):
        with suppress(Exception):  # the stream meets it again, and tells it at synchronise
            kernel.load()
        native.wait_for_work_at_exit("kernels")


class HostDevices:
    """The host as the one device there is."""

    def count(self) -> int:
        return 1

    def device_name(self, index: int) -> str:
        return "cpu"

    def allocate(self, nbytes: int, index: int) -> int:
        return native.allocate(nbytes)

    def release(self, address: int) -> None:
        native.release(address)

    def stream(self, index: int) -> HostStream:
        return HostStream()

    def copy(self, to: int, source: int, nbytes: int, sides: tuple[bool, bool]) -> None:
        copy(to, source, nbytes, sides)

    def fill(self, to: int, value: int, nbytes: int, on_device: bool) -> None:
        native.fill(to, value, nbytes)

    def memory_info(self, index: int) -> tuple[int, int]:
        """Free and total bytes."""
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def close(self) -> None:
        """The host's memory and threads last to the very end."""
