"""The decorators for kernels and the functions they call. Only kernel modules import it: it imports Numba.

Kernels are compiled by :mod:`normgrad.cpu.compile.compiler`, which uses Numba's internals. Where the installed Numba
has other internals, they are compiled by its public interface (:mod:`normgrad.cpu.compile.public_compiler`): the
results have the same bits, but compilation takes several times as long and is repeated in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numba

from normgrad.contract.status import let_signals_through
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
