"""Huge pages for large results in PyTorch's memory. NumPy requests them itself.

The system provides fresh memory page by page, as it is first written. For a large result in pages of 4 KB this takes
longer than the kernel; pages of 2 MB take a fraction of that.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache

#: Bytes of a result from which on they are requested, as in NumPy.
REQUESTED_FROM = 4 << 20


def request(address: int, nbytes: int) -> None:
    """Ask the system to provide fresh memory in huge pages, where it has them; no error where it has not."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    advise = _madvise()
    if advise is not None and length > 0:
        advise(first, length, mmap.MADV_HUGEPAGE)


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the C library's madvise; None where there is none, or no huge pages."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return madvise
