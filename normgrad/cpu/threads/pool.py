"""The threads that call a kernel, without the GIL: PyTorch's where it lends them, otherwise worker threads.

Several threads call a kernel at once with the same descriptor and share its work by counters in it; a call returns when
all items are taken and done. So the pool only has to call it: a worker that arrives late finds nothing left and
returns, and the caller never waits for it. With many callers at once each worker serves one of them at a time, and no
more threads are started.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from normgrad.cpu import limits
from normgrad.cpu.compile.kernel_lookup import Kernel
from normgrad.cpu.descriptors import IDLE, POSTED, Mailbox, layout, size
from normgrad.cpu.threads import torch_pool
from normgrad.log import warn_once
from normgrad.threads import get_num_threads, usable_cores

if TYPE_CHECKING:
    from normgrad.cpu.compile.object_code import Entry

THREAD_NAME = "normgrad-worker"
_SERIES = 1e-3  # seconds: calls that follow each other so closely wake a worker for the next ones

_SERVE = Kernel("normgrad.cpu.threads.worker_loop", "serve")
_STATE, _FUNCTION, _DESCRIPTOR = (layout(Mailbox)[name].offset for name in ("state", "function", "descriptor"))

_current_core: Callable[[], int] | None = None
if hasattr(os, "sched_setaffinity"):
    _current_core = getattr(ctypes.CDLL(None), "sched_getcpu", None)


class _Worker:
    """A daemon thread. After a job it polls for the next one for a moment, then it sleeps."""

    def __init__(self, serve: Entry) -> None:
        self._serve_box = serve
        self._box = array("q", bytes(8 * size(Mailbox)))
        self._kept: Any = None  # what the job in the box needs
        self._posting = threading.Lock()
        self._fence = threading.Lock()
        self._wake = threading.Lock()
        self._wake.acquire()
        self._asleep = False
        self._asked = 0.0
        self._thread = 0
        self._kept_off = -1
        threading.Thread(target=self._serve, name=THREAD_NAME, daemon=True).start()

    def post(self, function: int, descriptor: int, wakes: bool, kept: Any) -> None:
        """Post a job, unless the thread has one already, or is asleep and not to be woken."""
        if self._posting.locked():  # by another call, maybe one of this thread that a signal handler interrupts
            return
        box, now = self._box, time.perf_counter()
        with self._posting:
            asked, self._asked = self._asked, now
            if box[_STATE] != IDLE or (self._asleep and not wakes and now - asked > _SERIES):
                return
            self._kept = kept
            # Who sees the job posted sees what it is: the lock keeps the stores in order.
            with self._fence:
                box[_FUNCTION], box[_DESCRIPTOR] = function, descriptor
            with self._fence:
                box[_STATE] = POSTED
            if self._asleep:
                self._asleep = False
                self._keep_off_this_core()
                self._wake.release()

    def _keep_off_this_core(self) -> None:
        """Make the thread wake up on another core than the caller's.

        With few cores Linux does not look for an idle one but queues the thread behind its waker, which is busy with
        the kernel: it would start when the work is done.
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
        address, _ = self._box.buffer_info()
        while True:
            self._serve_box(address)
            with self._posting:
                asleep = self._asleep = self._box[_STATE] == IDLE
                if asleep:
                    self._kept = None  # a sleeping thread keeps no memory alive
            if asleep:
                self._wake.acquire()


_workers: list[_Worker] = []
_starting = threading.Lock()


def _start(count: int) -> None:
    """Start worker threads, or as many as the system allows: the caller's thread does the work of the others."""
    if _starting.locked():  # by another call, maybe one of this thread that a signal handler interrupts
        return
    with _starting:
        try:
            serve = _SERVE.entry(())
            while len(_workers) < count:
                _workers.append(_Worker(serve))
        except (RuntimeError, MemoryError) as error:
            warn_once(f"large calls run on fewer threads than they could use: a thread did not start ({error})")


def _forget_threads() -> None:
    """Start afresh after a fork: the threads are gone, and locks may be held for ever."""
    global _workers, _starting
    _workers, _starting = [], threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def slots() -> int:
    """Return how many threads a kernel that is prepared now has workspace for: it may run on more than now."""
    return max(get_num_threads(), usable_cores())


def shared(elements: int) -> int:
    """Return how many elements a step shares among threads: 0 if it would be done before another thread starts."""
    return elements if elements >= min(limits.SHARED_FROM, limits.LENT_FROM) else 0


def run(entry: Entry, most: int, descriptor: int, elements: int, kept: Any = None) -> int:
    """Call a kernel on this thread and on as many others as may take part, ``most`` in all; return its status.

    ``kept`` stays alive while other threads may still use it. For few elements only threads that are awake take part,
    or those that calls in quick succession have woken.
    """
    threads, lent = min(get_num_threads(), most), torch_pool.found()
    if lent is not None:
        threads = min(threads, lent.count())
        if threads > 1 and elements >= limits.LENT_FROM and lent.are_here():
            return lent.run(entry, threads, descriptor)
    if threads > 1 and elements >= limits.SHARED_FROM:
        _post(threads - 1, entry.address, descriptor, elements >= limits.WOKEN_FROM, kept)
    return entry(descriptor)


def _post(wanted: int, function: int, descriptor: int, wakes: bool, kept: Any) -> None:
    if len(_workers) < wanted:
        _start(wanted)
    for worker in _workers[:wanted]:
        worker.post(function, descriptor, wakes, kept)
