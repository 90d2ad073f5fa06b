"""Threads of our own for kernels that do not hold the interpreter's lock.

A kernel is called by several threads at once with the same arguments and shares out its work itself, by counters in
its descriptor; it returns when nothing is left to take and nothing is unfinished. So the pool only has to call it:
a helper that arrives late finds nothing left and leaves, and the caller never waits for it. With many callers at
once each helper serves one of them at a time, and no more threads are made.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Any, TypeVar

import numpy as np

from normgrad.contract.arrays import numpy_address
from normgrad.cpu.variants import Kernel
from normgrad.threads import get_num_threads, usable_cores

THREAD_NAME = "normgrad-helper"

T = TypeVar("T")
_Job = tuple[Callable[..., Any], tuple[Any, ...], Any]
_WATCH = Kernel("normgrad.cpu.waiting", "watch")


class _State(Enum):
    """What a helper does: a busy one looks for a job by itself before it rests."""

    BUSY = 0
    WATCHING = 1
    ASLEEP = 2


_current_core: Callable[[], int] | None = None
if hasattr(os, "sched_setaffinity"):
    _current_core = getattr(ctypes.CDLL(None), "sched_getcpu", None)


class _Helper:
    """One daemon thread. After a job it looks out for the next one for a moment, then it goes to sleep."""

    def __init__(self, watch: Callable[[int], int]) -> None:
        self._watch = watch
        self._job: _Job | None = None
        self._posting = threading.Lock()
        self._wake = threading.Lock()
        self._wake.acquire()
        self._bell = np.zeros(1, np.int64)  # its number changes with every job that a watching thread is given
        self._state = _State.BUSY
        self._thread = 0
        self._kept_off = -1
        threading.Thread(target=self._serve, name=THREAD_NAME, daemon=True).start()

    def post(self, work: Callable[..., Any], args: tuple[Any, ...], kept: Any) -> None:
        """Ask for help, unless a job is waiting already."""
        with self._posting:
            if self._job is None:
                self._job = (work, args, kept)
                if self._state is _State.WATCHING:
                    self._bell[0] += 1
                elif self._state is _State.ASLEEP:
                    self._keep_off_this_core()
                    self._wake.release()

    def _keep_off_this_core(self) -> None:
        """Have the thread wake up on another core than the caller's.

        With few cores Linux does not look for an idle one but queues the thread behind its waker, which is busy with
        the kernel: help would come when the work is done.
        """
        if _current_core is None or self._thread == 0:
            return
        core = _current_core()
        others = os.sched_getaffinity(0) - {core} if core != self._kept_off else ()
        if others:
            with suppress(OSError):  # not allowed, or the thread is gone with its interpreter
                os.sched_setaffinity(self._thread, others)
                self._kept_off = core

    def _serve(self) -> None:
        self._thread = threading.get_native_id()
        while True:
            seen = int(self._bell[0])
            job = self._take(_State.WATCHING)
            if job is None:
                descriptor = np.array([numpy_address(self._bell), seen], np.int64)
                self._watch(numpy_address(descriptor))
                job = self._take(_State.ASLEEP)
            if job is None:
                self._wake.acquire()
                job = self._take(_State.BUSY)
            assert job is not None
            work, args, _ = job
            work(*args)
            del job, work, args, _  # a waiting thread keeps no memory alive

    def _take(self, state: _State) -> _Job | None:
        """The job that is waiting, if any; the thread's state where there is none."""
        with self._posting:
            job, self._job = self._job, None
            self._state = state if job is None else _State.BUSY
            return job


_helpers: list[_Helper] = []
_starting = threading.Lock()


def _start(count: int) -> None:
    with _starting:
        while len(_helpers) < count:
            _helpers.append(_Helper(_WATCH.entry(())))


def _forget_threads() -> None:
    """In a process made by fork the threads are gone, and locks may be held for ever: start afresh."""
    global _helpers, _starting
    _helpers, _starting = [], threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def slots() -> int:
    """How many threads a kernel that is prepared now should have room for: it may run with more than there are now."""
    return max(get_num_threads(), usable_cores())


def run(work: Callable[..., T], most: int, *args: Any, kept: Any = None) -> T:
    """Call ``work(*args)`` on this thread and on as many others as may take part, ``most`` in all.

    What it returns is this thread's answer. ``kept`` stays alive while others may still be at it.
    """
    wanted = min(get_num_threads(), most) - 1
    if len(_helpers) < wanted:
        _start(wanted)
    for helper in _helpers[:wanted]:
        helper.post(work, args, kept)
    return work(*args)
