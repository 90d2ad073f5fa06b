"""The decorators for kernels and the functions they call.

Kernel modules import it, and `kernel_lookup` where a kernel has to be compiled; nothing else does: it imports Numba.

Kernels are compiled by :mod:`normgrad.cpu.compile.compiler`, which uses Numba's internals. Where the installed Numba
has other internals, they are compiled by its public interface (:func:`compiled_publicly`): the results have the same
bits, but Numba optimises each function again for every caller, which takes several times as long, and what it makes
refers to this process and is not kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import numba
from numba import types

from normgrad.contract.status import let_signals_through
from normgrad.cpu.compile.object_code import Entry, entry_at
from normgrad.cpu.intrinsics.structs import descriptor_type
from normgrad.cpu.tags import Tag
from normgrad.log import warn_once

if numba.config.DISABLE_JIT:  # for debugging of the user's own functions; kernels are no Python that could run as it is
    raise RuntimeError(
        "NUMBA_DISABLE_JIT is set, and kernels must be compiled: unset it, or set NORMGRAD_BACKEND=reference"
    )

# No fast-math flags: contraction would make a value's bits depend on the code around it.
_OPTIONS = {
    "nopython": True,
    "nogil": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


def _internal_compiler() -> ModuleType | None:
    """Return the compiler that uses Numba's internals, or None where a trial fails with the installed Numba."""
    try:
        from normgrad.cpu.compile import compiler

        compiler.try_out()
    except MemoryError:
        raise
    except Exception as error:  # a changed internal may show in any way
        let_signals_through(error)
        warn_once(
            f"Numba {numba.__version__} is not a version that normgrad's compiler works with ({type(error).__name__}: "
            f"{error}); kernels are compiled by Numba's public interface, which takes longer, in every process anew"
        )
        return None
    return compiler


#: The compiler that uses Numba's internals, or None: one decision for all kernels of a process.
internal_compiler = _internal_compiler()


def _decorator(**options: bool) -> Callable[[Callable[..., Any]], Any]:
    if internal_compiler is None:
        return numba.jit(**_OPTIONS, **options)
    return internal_compiler.decorator(_OPTIONS | options)


#: For functions that kernels call. LLVM inlines them where it pays. Without a choice of their own they would be inlined
#: always, in every kernel, where the first function that calls one in a process is.
device = _decorator(forceinline=False)
#: For functions that are always inlined.
inline = _decorator(forceinline=True)
#: For kernels themselves: ``kernel(descriptor, *tags)``. They are not called from Python:
#: :mod:`normgrad.cpu.compile.kernel_lookup` finds their native code, or has it compiled.
kernel = device

_compiled: list[Any] = []  # Numba frees the code of a function that nothing refers to


def compiled_publicly(module: str, name: str, tags: tuple[Tag, ...], is_loop_body: bool = False) -> Entry:
    """Return a kernel for its tags, as :mod:`normgrad.cpu.compile.kernel_lookup` loads it from object code."""
    kernel = getattr(import_module(module), name)
    descriptor = descriptor_type(kernel.py_func)
    if is_loop_body:

        @numba.cfunc(types.int32(types.int64, types.int64, descriptor))
        def entry(begin: int, end: int, address: Any) -> int:
            kernel(begin, end, address, *tags)
            return 0
    else:

        @numba.cfunc(types.int32(descriptor))
        def entry(address: Any) -> int:
            kernel(address, *tags)
            return 0

    _compiled.append(entry)
    return entry_at(entry.address)
