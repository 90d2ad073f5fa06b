"""The native half of the library, as Python calls it: memory of the process, by address."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

_MOST = 1 << 26  # more than any list of dimensions; a longer one is a wrong count

_ffi: Any = None
_lib: Any = None


class BadAddress(Exception):
    """Memory that cannot be read or written."""


def bind(ffi: Any, lib: Any) -> None:
    """Take the library that this Python was started by or loaded into."""
    global _ffi, _lib
    _ffi, _lib = ffi, lib


@cache
def wait_for_work_at_exit(loaded: str) -> None:
    """Wait for streams at the end of the process before what is now loaded is taken down; once for each such thing.

    Handlers run last in, first out: once a backend is loaded, the one from the start would come after its libraries'.
    """
    _lib.normgrad_started()


def read(address: int, nbytes: int) -> bytes:
    """The bytes at an address that the caller gave."""
    if nbytes > _MOST:
        raise BadAddress(f"{nbytes} bytes at {address:#x} are more than any array that is read here")
    buffer = _ffi.new("char[]", nbytes)
    copy(int(_ffi.cast("uintptr_t", buffer)), address, nbytes)
    return bytes(_ffi.buffer(buffer))


def read_numbers(address: int, count: int, code: str) -> tuple[Any, ...]:
    """An array at an address that the caller gave; the code is the struct module's."""
    itemsize = struct.calcsize(code)
    if count * itemsize > _MOST:
        raise BadAddress(f"an array of {count} elements at {address:#x} is longer than any that is read here")
    return struct.unpack(f"={count}{code}", read(address, count * itemsize))


def write(address: int, code: str, *values: Any) -> None:
    """Write numbers to an address that the caller gave."""
    data = struct.pack(f"={code}", *values)
    buffer = _ffi.from_buffer(data)
    copy(address, int(_ffi.cast("uintptr_t", buffer)), len(data))


def copy(to: int, source: int, nbytes: int) -> None:
    """Copy between addresses of which one or both are the caller's."""
    if nbytes and _lib.normgrad_copy(to, source, nbytes):
        raise BadAddress(f"{nbytes} bytes cannot be copied from {source:#x} to {to:#x}: no such memory")


def move(to: int, source: int, nbytes: int) -> None:
    """Copy between addresses that are known to be good; the ranges may overlap."""
    _lib.normgrad_move(to, source, nbytes)


def fill(to: int, value: int, nbytes: int) -> None:
    """Set bytes that are known to be good."""
    _lib.normgrad_fill(to, value, nbytes)


def allocate(nbytes: int) -> int:
    """The address of fresh memory, aligned to 64 bytes; 0 where there is none."""
    return int(_lib.normgrad_allocate(nbytes))


def release(address: int) -> None:
    """Give back what :func:`allocate` gave."""
    _lib.normgrad_release(address)


def new_array(values: tuple[int, ...]) -> int:
    """An array of int64 that the caller frees with ``delete[]``."""
    address = int(_lib.normgrad_new_array(8 * len(values)))
    if not address:
        raise MemoryError(f"no memory for {len(values)} numbers")
    write(address, f"{len(values)}q", *values)
    return address


def lasting_text(text: str) -> int:
    """The address of a C string that lives as long as the process. The same text has the same address."""
    kept = _texts.setdefault(text, _ffi.new("char[]", text.encode()))  # in one step: another thread may do the same
    return int(_ffi.cast("uintptr_t", kept))


_texts: dict[str, Any] = {}
