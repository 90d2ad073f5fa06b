"""Compilation: how kernels are compiled, kept on disk, and announced when it takes a while."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache

# No fast-math flags: contraction would make a value's bits depend on the code around it.

_ANNOUNCE_AFTER = 1.0  # seconds

#: For the functions that kernels are made of.
device = numba.njit(nogil=True, error_model="numpy")
#: For layers that are called once: put in place, since a callee's code is optimised again in every caller above it.
in_place = numba.njit(nogil=True, error_model="numpy", inline="always")


@cache
def _sources() -> str:
    """A digest of every kernel's source: Numba itself looks only at the file that a cached function stands in."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _KernelCache(FunctionCache):
    """Numba's cache on disk, which forgets a kernel when any kernel's source changes."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), _sources())


def kernel(function: Callable[..., None]) -> Any:
    """Compile a kernel when it is first called, and keep it on disk: beside its source, or else in the user's cache."""
    dispatcher = numba.njit(nogil=True, error_model="numpy")(function)
    with suppress(RuntimeError):  # nowhere to write: compiled anew in every process
        dispatcher._cache = _KernelCache(function)
    return dispatcher


@contextmanager
def announced(name: str) -> Iterator[None]:
    """Say on a terminal what is going on while a kernel is compiled for longer than a second."""
    if not sys.stderr.isatty():
        yield
        return
    line = f"normgrad: compiling {name} (once; kept on disk) …"
    shown = threading.Event()

    def show() -> None:
        shown.set()
        sys.stderr.write(line)
        sys.stderr.flush()

    timer = threading.Timer(  # No fast-math flags: contraction would make a value's bits depend on the code around it.
        _ANNOUNCE_AFTER, show
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if shown.is_set():
            sys.stderr.write("\r" + " " * len(line) + "\r")
            sys.stderr.flush()
