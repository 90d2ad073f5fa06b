"""Object code: which machine it is for, which symbols it needs, and how it is loaded into this process.

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


#: External symbols that code on disk may need: functions of the C library, which every process has. Symbols of Python
#: or Numba have another address, or none, in another process.
OF_C = frozenset(("memcpy", "memmove", "memset", "sched_yield", "SwitchToThread"))

_entry_type = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)  # releases the GIL


@cache
def _target() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_triple(llvm.get_process_triple())


@cache
def identity() -> str:
    """Return what object code depends on beside its source: LLVM and this machine's processor."""
    features = llvm.get_host_cpu_features().flatten()
    version = ".".join(map(str, llvm.llvm_version_info))
    return f"llvmlite {llvmlite.__version__}, LLVM {version}, {llvm.get_process_triple()}, {_processor()}, {features}"


def _processor() -> str:
    return str(llvm.get_host_cpu_name())


def target_machine() -> Any:
    """Return a new target machine for this processor."""
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
    """Load object code for good, and return the function of that name. One thread at a time."""
    for name in needs(code):
        if llvm.address_of_symbol(name) is None:
            llvm.add_symbol(name, address_of(name))
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return entry_at(engine.get_function_address(symbol))


def entry_at(address: int) -> Entry:
    """Return native code at an address as a function that Python can call."""
    entry: Any = _entry_type(address)
    entry.address = address
    return cast(Entry, entry)


@cache
def _libraries_of_c() -> list[Any]:
    if sys.platform == "win32":
        return [ctypes.CDLL("msvcrt"), ctypes.CDLL("kernel32")]
    return [ctypes.CDLL(None)]


def address_of(name: str) -> int:
    """Return the address of a function of the C library. LLVM would abort the process where there is none."""
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
    """Return the undefined symbols of object code; none for other formats than ELF."""
    if code[:5] != b"\x7fELF\x02":
        return []
    return [name for name, section in _elf_symbols(code) if name and section == 0]


def _elf_symbols(code: bytes) -> Iterator[tuple[str, int]]:
    """Yield each symbol of a 64-bit ELF file, with the index of its section."""
    order = "<" if code[5] == 1 else ">"
    (sections_at,) = struct.unpack_from(f"{order}Q", code, 40)
    size, count = struct.unpack_from(f"{order}HH", code, 58)
    headers = [struct.unpack_from(f"{order}IIQQQQIIQQ", code, sections_at + size * i) for i in range(count)]
    for _, section_type, _, _, start, length, link, _, _, _ in headers:
        if section_type == 2:  # SHT_SYMTAB; the names are in the section that it links to
            names_at = headers[link][4]
            for name, _, _, section, _, _ in struct.iter_unpack(f"{order}IBBHQQ", code[start : start + length]):
                begin = names_at + name
                yield code[begin : code.index(b"\0", begin)].decode(), section
