"""PyTorch's intra-op threads for our kernels, in a process that has imported it.

After each of its operators they poll for the next one for a while, each on a core of its own. They start at once, and
a worker thread of ours would have to share a core with one of them. AOTInductor's ``torch_parallel_for`` runs a
function on them: OpenMP or PyTorch's own pool, as many threads as ``torch.set_num_threads`` allows.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normgrad.cpu.compile.kernel_lookup import Kernel
from normgrad.cpu.descriptors import ParallelLoop, layout

if TYPE_CHECKING:
    from normgrad.cpu.compile.object_code import Entry

_LIBRARIES = {"linux": "libtorch_cpu.so", "darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}
_STATUS = layout(ParallelLoop)["status"].offset
_TAKE_PART = Kernel("normgrad.cpu.threads.worker_loop", "take_part", is_loop_body=True)


class TorchThreads:
    """The threads that PyTorch uses for calls from the main thread."""

    def __init__(self, torch: Any) -> None:
        folder = Path(torch.__file__).parent / "lib"
        library = ctypes.CDLL(str(folder / _LIBRARIES[sys.platform]))
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        prototype = ctypes.CFUNCTYPE(ctypes.c_int32, number, number, number, pointer, pointer)
        self._share = prototype(("torch_parallel_for", library))
        self._take_part = _TAKE_PART.entry(()).address
        self._main: int | None = threading.main_thread().ident
        #: How many threads PyTorch would use.
        self.count: Callable[[], int] = torch.get_num_threads

    def are_here(self) -> bool:
        """Return whether PyTorch uses these threads for calls from this thread; other threads have their own."""
        return threading.get_ident() == self._main

    def are_gone(self) -> None:
        """Note that no thread can use them any longer."""
        self._main = None

    def run(self, entry: Entry, threads: int, descriptor: int) -> int:
        """Call a kernel on so many threads, of which this one is the first; all have returned afterwards."""
        loop = array("q", (entry.address, descriptor, 0, 0))  # a ParallelLoop
        failed = self._share(0, threads, 1, self._take_part, loop.buffer_info()[0])
        return failed or loop[_STATUS]


_found: TorchThreads | None = None
_looks = True  # whether PyTorch may still come


def found() -> TorchThreads | None:
    """Return PyTorch's threads, once it is imported; None without it, and where it cannot lend them."""
    global _found, _looks
    if _looks and "torch" in sys.modules:
        torch = sys.modules["torch"]
        if hasattr(torch, "get_num_threads"):  # which it has not while its import is under way
            with suppress(AttributeError, KeyError, OSError, MemoryError):
                _found = TorchThreads(torch)
            _looks = False
    return _found


def _forget_threads() -> None:
    """Forget the threads after a fork: they are gone, and a call that uses them would wait for ever."""
    global _looks
    _looks = _looks and "torch" not in sys.modules
    if _found is not None:
        _found.are_gone()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
