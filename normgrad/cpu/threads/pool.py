"""Threads for kernels that do not hold the interpreter's lock: PyTorch's where it lends them, or else of our own.

A kernel is called by several threads at once with the same arguments and shares out its work itself, by counters in
its descriptor; it returns when nothing is left to take and nothing is unfinished. So the pool only has to call it:
a helper that arrives late finds nothing left and leaves, and the caller never waits for it. With many callers at
once each helper serves one of them at a time, and no more threads are made.
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

from normgrad.cpu.compile.kernel_lookup import Kernel
from normgrad.cpu.fields.jobs import BOX_SIZE, DESCRIPTOR, FUNCTION, IDLE, POSTED, STATE
from normgrad.cpu.threads import torch_pool
from normgrad.log import warn_once
from normgrad.threads import get_num_threads, usable_cores

if TYPE_CHECKING:
    from normgrad.cpu.compile.object_code import Entry

THREAD_NAME = "normgrad-helper"

#: Elements from which on two threads that are awake are faster than one, and from which on waking one up pays.
SHARED_FROM, _WOKEN_FROM = 1 << 18, 1 << 19
#: Elements from which on PyTorch's threads help, which are awake between its operators.
LENT_FROM = 1 << 16
_SERIES = 1e-3  # seconds: calls that follow each other so closely wake a helper for the next ones

_SERVE = Kernel("normgrad.cpu.threads.worker_loop", "serve")

_current_core: Callable[[], int] | None = None
if hasattr(os, "sched_setaffinity"):
    _current_core = getattr(ctypes.CDLL(None), "sched_getcpu", None)


class _Helper:
    """One daemon thread. After a job it looks out for the next one for a moment, then it goes to sleep."""

    def __init__(self, serve: Entry) -> None:
        self._serve_box = serve
        self._box = array("q", bytes(8 * BOX_SIZE))
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
        """Ask for help, unless the thread has a job already, or is asleep and not to be woken."""
        box, now = self._box, time.perf_counter()
        with self._posting:
            asked, self._asked = self._asked, now
            if box[STATE] != IDLE or (self._asleep and not wakes and now - asked > _SERIES):
                return
            self._kept = kept
            # Whoever sees the job posted sees what it is: the two stores cannot change places across the lock.
            with self._fence:
                box[FUNCTION], box[DESCRIPTOR] = function, descriptor
            with self._fence:
                box[STATE] = POSTED
            if self._asleep:
                self._asleep = False
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
        address, _ = self._box.buffer_info()
        while True:
            self._serve_box(address)
            with self._posting:
                asleep = self._asleep = self._box[STATE] == IDLE
                if asleep:
                    self._kept = None  # a sleeping thread keeps no memory alive
            if asleep:
                self._wake.acquire()


_helpers: list[_Helper] = []
_starting = threading.Lock()


def _start(count: int) -> None:
    """Start worker threads, or as many of them as can be had: the caller's thread does what they would have done."""
    with _starting:
        serve = _SERVE.entry(())
        try:
            while len(_helpers) < count:
                _helpers.append(_Helper(serve))
        except (RuntimeError, MemoryError) as error:
            warn_once(f"large calls run on fewer threads than they could use: a thread did not start ({error})")


def _forget_threads() -> None:
    """In a process made by fork the threads are gone, and locks may be held for ever: start afresh."""
    global _helpers, _starting
    _helpers, _starting = [], threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def slots() -> int:
    """How many threads a kernel that is prepared now should have room for: it may run with more than there are now."""
    return max(get_num_threads(), usable_cores())


def shared(elements: int) -> int:
    """How many elements a step is to share, which works on so many: none if it is done before help comes."""
    return elements if elements >= min(SHARED_FROM, LENT_FROM) else 0


def run(entry: Entry, most: int, descriptor: int, elements: int, kept: Any = None) -> int:
    """Call a kernel on this thread and on as many others as may take part, ``most`` in all.

    What it returns is this thread's answer. ``kept`` stays alive while others may still be at it. For few elements
    only those help who are awake, or are called again and again.
    """
    threads, lent = min(get_num_threads(), most), torch_pool.found()
    if lent is not None:
        threads = min(threads, lent.count())
        if threads > 1 and elements >= LENT_FROM and lent.are_here():
            return lent.run(entry, threads, descriptor)
    if threads > 1 and elements >= SHARED_FROM:
        _call_helpers(threads - 1, entry.address, descriptor, elements >= _WOKEN_FROM, kept)
    return entry(descriptor)


def _call_helpers(wanted: int, function: int, descriptor: int, wakes: bool, kept: Any) -> None:
    if len(_helpers) < wanted:
        _start(wanted)
    for helper in _helpers[:wanted]:
        helper.post(function, descriptor, wakes, kept)
