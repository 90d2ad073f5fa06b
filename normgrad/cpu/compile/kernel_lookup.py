"""Kernels by name and tags: found on disk as native code, or compiled. Numba is imported only to compile.

A step of a launch (:mod:`normgrad.cpu.prepare.launch`) asks for its kernel here.
"""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from normgrad.cpu.compile import disk_cache
from normgrad.log import announced

if TYPE_CHECKING:
    from normgrad.cpu.compile.object_code import Entry
    from normgrad.cpu.tags import Tag

_SYMBOL = "normgrad_{}"
_BACKEND = Path(__file__).parent.parent  # the folder of the backend, with all kernels and what they are made of

# A fork waits for a compilation under way: in the child its thread would be gone, and its locks held for ever.
_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)

_entries: dict[tuple[Kernel, tuple[Tag, ...]], Entry] = {}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function with the decorator ``kernel``, by its module and name.

    The body of a parallel loop takes the bounds of its part of the loop before the descriptor.
    """

    module: str
    name: str
    is_loop_body: bool = False

    def entry(self, tags: tuple[Tag, ...]) -> Entry:
        """Return the compiled function for these tags. It takes a descriptor's address and returns 0."""
        variant = self, tags
        found = _entries.get(variant)
        if found is None:
            with _lock:
                found = _entries.get(variant)
                if found is None:
                    found = _entries[variant] = _load(self, tags)
        return found


def _load(kernel: Kernel, tags: tuple[Tag, ...]) -> Entry:
    from normgrad.cpu.compile import object_code

    types = "-".join(tag.name for tag in tags)
    key = f"{kernel.module}.{kernel.name}({types}); {_sources(kernel.module)}; {_numba()}; {object_code.identity()}"
    symbol = _SYMBOL.format(hashlib.sha256(key.encode()).hexdigest())
    name = f"{kernel.name}-{types}" if types else kernel.name
    code = disk_cache.find(name, key)
    if code is None or not object_code.needs_only_c(code):
        with announced(f"compiling {kernel.name} (once; kept on disk)"):
            from normgrad.cpu.compile import jit

            if jit.internal_compiler is None:
                return jit.compiled_publicly(kernel.module, kernel.name, tags, kernel.is_loop_body)
            code = jit.internal_compiler.compiled(kernel.module, kernel.name, tags, symbol, kernel.is_loop_body)
        if object_code.needs_only_c(code):
            disk_cache.keep(name, key, code)
    return object_code.loaded(code, symbol)


@cache
def _sources(module: str) -> str:
    """Return a digest of all sources of this backend, and of the module's where it is elsewhere."""
    found = find_spec(module)
    own = {Path(found.origin)} if found is not None and found.origin else set()
    digest = hashlib.sha256()
    for path in sorted({*_BACKEND.rglob("*.py"), *own}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _numba() -> str:
    """Return which Numba is installed, without importing it."""
    found = find_spec("numba")
    if found is None or not found.origin:
        return "no Numba"
    return Path(found.origin).with_name("_version.py").read_text(encoding="utf-8")
