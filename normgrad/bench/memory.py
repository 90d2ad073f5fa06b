"""The process's memory: an allocator that keeps what it has, and how much a call needs."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_LARGE = 1 << 30

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def keep_freed_memory() -> bool:
    """Let the allocator keep large blocks once freed, so that a library that allocates its results is not timed at
    getting fresh pages from the system. False where the allocator is not glibc's.
    """
    library = _glibc()
    if library is None:
        return False
    kept = library.mallopt(_MMAP_THRESHOLD, _LARGE) or library.mallopt(_MMAP_MAX, 0)
    return bool(kept and library.mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def peak_growth(run: Callable[[], Any]) -> int | None:
    """By how many bytes the process grew at most during a call; None where the system does not tell.

    Memory that the allocator has kept is given back first. Where the system's record of the peak cannot be reset, the
    growth is that of the peak over the whole process's life: a lower bound.
    """
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)
    if _reset_peak():
        before = _kilobytes("VmRSS")
        run()
        return max(0, _kilobytes("VmHWM") - before) * 1024
    before_peak = _largest_ever()
    run()
    after_peak = _largest_ever()
    return None if before_peak is None or after_peak is None else after_peak - before_peak


def _reset_peak() -> bool:
    try:
        _CLEAR.write_text(_RESET_PEAK)
        return _kilobytes("VmHWM") > 0
    except (OSError, KeyError):
        return False


def _kilobytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise KeyError(field)


def _largest_ever() -> int | None:
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
