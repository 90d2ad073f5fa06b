"""A stream on the CPU: work in order, beside the caller."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from normgrad.contract.status import counted, shown

Work = Callable[[], None]


class _Task:
    """A piece of work, and whether it is done."""

    __slots__ = ("is_done", "work")

    def __init__(self, work: Work) -> None:
        self.work: Work | None = work
        self.is_done = False


class _Queue:
    """The work of one stream, and the thread that does it while there is some.

    A thread may fail to start: none is to be had, the interpreter is shutting down, or Ctrl-C interrupts the call.
    So only the thread itself says that the queue is served, and every later call on an unserved queue starts another
    thread, or does the work in the caller's thread where that is impossible. Two threads that start for one queue do
    no harm: the second leaves at once.

    The state is guarded by a lock whose acquisition in a ``with`` statement no signal handler interrupts; methods of a
    Condition are Python code, in which a KeyboardInterrupt can leave the lock held. It is re-entrant: a signal handler
    or a finalizer may use the stream in the middle of a call.
    """

    def __init__(self) -> None:
        self.renew()
        _every_queue.add(self)

    def renew(self) -> None:
        """Start empty: also in a process made by fork, whose copy of the thread does not run."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.waiting: deque[_Task] = deque()
        self.last_taken: _Task | None = None
        self.server: threading.Thread | None = None  # the thread that takes the tasks, in _serve
        self.error: BaseException | None = None

    def add(self, work: Work) -> None:
        task = _Task(work)
        with self.lock:
            self.waiting.append(task)
        self._have_served(task)

    def _have_served(self, task: _Task) -> None:
        """Start the thread where the queue has work and no thread; without threads, work here up to a task."""
        with self.lock:
            if self.server is not None or not self.waiting:
                return
        try:
            threading.Thread(target=self._serve, name="normgrad-stream", daemon=True).start()
        except (RuntimeError, MemoryError):
            self._serve(task)

    def _serve(self, last: _Task | None = None) -> None:
        """Do the work that waits: all of it, or in a caller's thread up to a task."""
        me = threading.current_thread()
        with self.lock:
            if self.server is not None:
                return
            self.server = me
        try:
            while last is None or not last.is_done:
                task = self._take()
                if task is None:
                    return
                self._do(task, is_callers=last is not None)
        finally:
            with self.lock:
                if self.server is me:
                    self.server = None

    def _take(self) -> _Task | None:
        """Take the next task. Without one the server leaves, under the lock: a task that is added later has none."""
        with self.lock:
            if not self.waiting:
                self.server = None
                return None
            self.last_taken = self.waiting.popleft()
            return self.last_taken

    def _do(self, task: _Task, is_callers: bool) -> None:
        failure: BaseException | None = None
        try:
            assert task.work is not None
            task.work()
        except BaseException as error:
            failure = error
            if is_callers and not isinstance(error, Exception):  # Ctrl-C belongs to the caller
                failure = None
                raise
        finally:
            with self.lock:
                task.work = None  # what it holds is free once it is done
                task.is_done = True
                self.error = self.error or failure
                self.changed.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Wait for the work given before; whether it was done in time."""
        with self.lock:
            task = self.waiting[-1] if self.waiting else self.last_taken
            is_in_work = self.server is threading.current_thread()
        if task is None:
            return True
        if is_in_work and timeout is None:
            raise RuntimeError("the work of a stream waits for the stream itself, and would wait for ever")
        self._have_served(task)
        with self.lock:
            return self.changed.wait_for(lambda: task.is_done, timeout)

    def state(self) -> str:
        """What the queue has to do, in words, without waiting for it."""
        with self.lock:
            is_at_work = self.last_taken is not None and not self.last_taken.is_done
            tasks = len(self.waiting) + is_at_work
            failed = ", an error waits for synchronize()" if self.error is not None else ""
        return (f"{counted(tasks, 'task')} to do" if tasks else "idle") + failed

    def take_error(self) -> BaseException | None:
        with self.lock:
            error, self.error = self.error, None
        return error


_every_queue: weakref.WeakSet[_Queue] = weakref.WeakSet()


def _finish_all() -> None:
    for queue in list(_every_queue):
        queue.wait(None)


def _renew_all() -> None:
    for queue in list(_every_queue):
        queue.renew()


atexit.register(_finish_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)


class Stream:
    """Run work in the order in which it is given, on a thread of its own; the caller does not wait.

    Streams run side by side. Any thread may give work and synchronise.

    Examples
    --------
    >>> import numpy as np, normgrad
    >>> x = np.ones((2, 4), np.float32)
    >>> mean, rstd = np.zeros((2, 1), np.float32), np.ones((2, 1), np.float32)
    >>> out = np.empty_like(x)
    >>> plan = normgrad.layer_norm_backward.plan(
    ...     x, x, [4], mean, rstd, output_mask=(True, False, False), out=(out, None, None))
    >>> stream = normgrad.Stream()
    >>> plan.run(stream=stream)
    >>> stream.synchronize()
    >>> out[0]
    array([-1., -1., -1., -1.], dtype=float32)
    """

    def __init__(self) -> None:
        self._queue = _Queue()

    def __repr__(self) -> str:
        return f"<Stream: {self._queue.state()}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Stream cannot be copied or pickled: it has a thread of this process")

    def submit(self, work: Work) -> None:
        """Give the stream work: a function without arguments."""
        if not callable(work):
            raise TypeError(f"the work is {shown(work)}, and must be a function without arguments")
        self._queue.add(work)

    def query(self) -> bool:
        """Whether all the work given so far is done."""
        return self._queue.wait(0)

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until the work given so far is done; raise the first error of it, once.

        Raises TimeoutError when that takes longer than ``timeout`` seconds.
        """
        if not self._queue.wait(timeout):
            raise TimeoutError(f"the stream was still at work after {timeout} s")
        error = self._queue.take_error()
        if error is not None:
            raise error
