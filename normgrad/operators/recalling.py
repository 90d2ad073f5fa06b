"""A known call in native code from beginning to end, as a function that Python calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir

from normgrad.cpu.native import translated
from normgrad.operators import matching, objects, serving
from normgrad.operators.tables import HEAD, REGISTER
from normgrad.operators.words import NONE, TRUE, Function, python, taken

#: ``recall(arguments, differentiating)``: the results of a known call, None for any other.
Recall = Callable[[tuple[Any, ...], bool], Any]

_METH_FASTCALL = 0x80


class _Method(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


class Code:
    """The native code in this process."""

    def __init__(self) -> None:
        module = ir.Module()
        rows = (matching.same, matching.real, matching.whole, matching.sequence, matching.array)
        names = [write(module).function.name for write in rows]
        _recall(module)
        *found, recall = translated(str(module), [*names, "recall"])
        #: The functions that look at an argument, by name.
        self.rows: dict[str, int] = dict(zip(names, found, strict=True))
        self._method = _Method(b"recall", recall, _METH_FASTCALL, None)

    def recall(self, register: int) -> Recall:
        """The function for the register at an address."""
        new = ctypes.pythonapi.PyCFunction_NewEx
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
        function: Recall = new(ctypes.addressof(self._method), register, None)
        return function


@cache
def code() -> Code:
    """The same code for all."""
    return Code()


def _recall(module: ir.Module) -> Function:
    """What Python calls: the register's address as an object, where the two arguments are, and that there are two."""
    fits, served = matching.fits(module), serving.served(module)
    write = Function(module, "recall", 3)
    this, given, count = write.arguments
    unknown = _unknown(module)
    with write.where(write.is_("!=", count, 2)):
        write.give(write.call(unknown))
    arguments, differentiating = write.load(given), write.is_("==", write.load(given, 1), TRUE)
    with write.where(write.is_("!=", write.load(write.add(arguments, objects.TYPE)), id(tuple))):
        write.give(write.call(unknown))
    register = write.call(python("PyLong_AsLongLong"), this)
    backend = write.call(python("PyDict_GetItem"), write.load(register, 1), write.load(register, 2))
    items, size = write.add(arguments, objects.ITEMS), write.load(write.add(arguments, objects.SIZE))
    follows = write.chosen(differentiating, 1, 0)
    with write.loop(write.load(register)) as number:
        with write.where(write.is_("<=", write.load(register), number)):  # what a call ran has forgotten recipes
            write.give(write.call(unknown))
        recipe = write.load(register, write.add(number, len(REGISTER)))
        with write.where(write.is_("!=", write.call(fits, recipe, items, size, backend, follows), 0)):
            owner = taken(write, write.load(recipe, HEAD.index("owner")))
            found = write.call(served, recipe, arguments)
            write.call(python("Py_DecRef"), owner)
            with write.where(write.is_("!=", found, NONE)):
                write.give(found)
            write.call(python("Py_DecRef"), found)
    write.give(write.call(unknown))
    return write


def _unknown(module: ir.Module) -> Function:
    """None, as a function returns it."""
    write = Function(module, "unknown", 0)
    write.give(taken(write, NONE))
    return write
