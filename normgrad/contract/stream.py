"""A stream on the CPU: work in order, beside the caller."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

Work = Callable[[], None]


class _Queue:
    """The work of one stream, and the thread that does it while there is some."""

    def __init__(self) -> None:
        self.renew()
        _every_queue.add(self)

    def renew(self) -> None:
        """Start empty: also in a process made by fork, whose copy of the thread does not run."""
        self.changed = threading.Condition()
        self.waiting: deque[Work] = deque()
        self.busy = False
        self.given = self.done = 0
        self.error: BaseException | None = None

    def add(self, work: Work) -> None:
        with self.changed:
            self.waiting.append(work)
            self.given += 1
            if not self.busy:
                self.busy = True
                threading.Thread(target=self._serve, name="normgrad-stream", daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self.changed:
                if not self.waiting:
                    self.busy = False
                    return
                work = self.waiting.popleft()
            failure: BaseException | None = None
            try:
                work()
            except BaseException as error:
                failure = error
            del work  # what it holds is free once it is done
            with self.changed:
                self.error = self.error or failure
                self.done += 1
                self.changed.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Wait for the work given before; whether it was done in time."""
        with self.changed:
            given = self.given
            return self.changed.wait_for(lambda: self.done >= given, timeout)

    def take_error(self) -> BaseException | None:
        with self.changed:
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
    """Runs work in the order it is given, on a thread of its own; the giver does not wait.

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

    def submit(self, work: Work) -> None:
        """Give the stream work: a function without arguments."""
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
