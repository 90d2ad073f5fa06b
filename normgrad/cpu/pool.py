"""Threads of our own for kernels that do not hold the interpreter's lock.

A kernel is called by several threads at once with the same arguments and shares out its work itself, by counters in
its descriptor; it returns when nothing is left to take and nothing is unfinished. So the pool only has to call it:
a helper that arrives late finds nothing left and leaves, and the caller never waits for it. With many callers at
once each helper serves one of them at a time, and no more threads are made.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from normgrad.threads import get_num_threads, usable_cores

THREAD_NAME = "normgrad-helper"


class _Helper:
    """One daemon thread, asleep while it has no job."""

    def __init__(self) -> None:
        self._job: tuple[Callable[..., None], tuple[Any, ...]] | None = None
        self._posting = threading.Lock()
        self._wake = threading.Lock()
        self._wake.acquire()
        threading.Thread(target=self._serve, name=THREAD_NAME, daemon=True).start()

    def post(self, kernel: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Ask for help, unless a job is waiting already."""
        with self._posting:
            if self._job is None:
                self._job = (kernel, args)
                self._wake.release()

    def _serve(self) -> None:
        while True:
            self._wake.acquire()
            with self._posting:
                job, self._job = self._job, None
            assert job is not None
            kernel, args = job
            kernel(*args)
            del job, kernel, args  # a sleeping thread keeps no memory alive


_helpers: list[_Helper] = []
_starting = threading.Lock()


def _start(count: int) -> None:
    with _starting:
        while len(_helpers) < count:
            _helpers.append(_Helper())


def _forget_threads() -> None:
    """In a process made by fork the threads are gone, and locks may be held for ever: start afresh."""
    global _helpers, _starting
    _helpers, _starting = [], threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def slots() -> int:
    """How many threads a kernel that is prepared now should have room for: it may run with more than there are now."""
    return max(get_num_threads(), usable_cores())


def run(kernel: Callable[..., None], most: int, *args: Any) -> None:
    """Call ``kernel(*args)`` on this thread and on as many others as may take part, ``most`` in all."""
    wanted = min(get_num_threads(), most) - 1
    if len(_helpers) < wanted:
        _start(wanted)
    for helper in _helpers[:wanted]:
        helper.post(kernel, args)
    kernel(*args)
