"""Native object code in this process: for which machine it is, what it needs, and how it becomes callable.

LLVM's binding alone does it, whose import takes a tenth of Numba's.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol, cast

import llvmlite
import llvmlite.binding as llvm


class Entry(Protocol):
    """A compiled kernel: takes a descriptor's address, returns 0."""

    address: int

    def __call__(self, descriptor: int, /) -> int: ...


#: What code that is kept may need from outside: functions of C, which every process has. Whatever is of Python or Numba
#: lies elsewhere, or nowhere, in another process.
OF_C = frozenset(("memcpy", "memmove", "memset", "sched_yield", "SwitchToThread"))

_entry_type = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)  # lets go of the interpreter's lock


@cache
def _target() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_triple(llvm.get_process_triple())


@cache
def identity() -> str:
    """What object code depends on beside its source: LLVM and this machine's processor."""
    features = llvm.get_host_cpu_features().flatten()
    version = ".".join(map(str, llvm.llvm_version_info))
    return f"llvmlite {llvmlite.__version__}, LLVM {version}, {llvm.get_process_triple()}, {_processor()}, {features}"


def _processor() -> str:
    return str(llvm.get_host_cpu_name())


def target_machine() -> Any:
    """A new target machine for this very processor."""
    target = _target()
    return target.create_target_machine(
        cpu=_processor(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )


@cache
def _engine() -> Any:
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())


def loaded(code: bytes, symbol: str) -> Entry:
    """The function of that name in object code, which stays loaded. One thread at a time."""
    for name in needs(code):
        if llvm.address_of_symbol(name) is None:
            llvm.add_symbol(name, address_of(name))
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address(symbol)
    entry: Any = _entry_type(address)
    entry.address = address
    return cast(Entry, entry)


@cache
def _libraries_of_c() -> list[Any]:
    if sys.platform == "win32":
        return [ctypes.CDLL("msvcrt"), ctypes.CDLL("kernel32")]
    return [ctypes.CDLL(None)]


def address_of(name: str) -> int:
    """Where a function of C lies in this process. LLVM would end the process where it finds none."""
    for library in _libraries_of_c():
        if hasattr(library, name):
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    raise OSError(f"compiled code needs {name}, which this process has not")


def needs_only_c(code: bytes) -> bool:
    """Return whether object code refers to nothing outside itself but the functions of :data:`OF_C`."""
    try:
        return OF_C.issuperset(needs(code))
    except (struct.error, ValueError, IndexError):  # not the ELF file that it says it is
        return False


def needs(code: bytes) -> list[str]:
    """The names that object code looks for outside itself; of other formats than ELF nothing is said."""
    if code[:5] != b"\x7fELF\x02":
        return []
    return [name for name, section in _elf_symbols(code) if name and section == 0]


def _elf_symbols(code: bytes) -> Iterator[tuple[str, int]]:
    """Each symbol of a 64-bit ELF file, with the number of its section."""
    order = "<" if code[5] == 1 else ">"
    (sections_at,) = struct.unpack_from(f"{order}Q", code, 40)
    size, count = struct.unpack_from(f"{order}HH", code, 58)
    headers = [struct.unpack_from(f"{order}IIQQQQIIQQ", code, sections_at + size * i) for i in range(count)]
    for _, kind, _, _, start, length, link, _, _, _ in headers:
        if kind == 2:  # a table of symbols, whose names lie in the section that it links to
            names_at = headers[link][4]
            for name, _, _, section, _, _ in struct.iter_unpack(f"{order}IBBHQQ", code[start : start + length]):
                begin = names_at + name
                yield code[begin : code.index(b"\0", begin)].decode(), section
