"""From a kernel's Python to native code by Numba's public interface, where its internals are not as expected.

Numba compiles each function for itself and optimises it again for every caller, so it takes several times as long as
:mod:`normgrad.cpu.compile.compiler`. What it makes refers to this process and is not kept on disk.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numba
from numba import types

from normgrad.cpu.compile.object_code import Entry, entry_at
from normgrad.cpu.intrinsics.structs import descriptor_type

if TYPE_CHECKING:
    from normgrad.cpu.tags import Tag

_compiled: list[Any] = []  # Numba frees the code of a function that nothing refers to


def compiled(module: str, name: str, tags: tuple[Tag, ...], is_loop_body: bool = False) -> Entry:
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
