"""What the library says by itself: a line on a terminal while a kernel is compiled, and its log.

The log is ``logging.getLogger("normgrad")``: every fallback to something slower is reported once.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_logger = logging.getLogger("normgrad")
_reported: set[str] = set()
_ANNOUNCE_AFTER = 1.0  # seconds


def warn_once(message: str) -> None:
    """Log a warning, unless the same one was logged before in this process."""
    if message not in _reported:
        _reported.add(message)
        _logger.warning("normgrad: %s", message)


@contextmanager
def announced(work: str) -> Iterator[None]:
    """Say on a terminal what is going on while something takes longer than a second."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    line = f"normgrad: {work} …"
    shown = threading.Event()

    def show() -> None:
        shown.set()
        sys.stderr.write(line)
        sys.stderr.flush()

    timer = threading.Timer(_ANNOUNCE_AFTER, show)
    timer.daemon = True
    with suppress(RuntimeError):  # no thread can be started
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if shown.is_set():
            sys.stderr.write("\r" + " " * len(line) + "\r")
            sys.stderr.flush()
