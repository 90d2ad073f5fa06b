"""Functions of int64 numbers, written in LLVM's language; an address is a number too."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from llvmlite import ir

from normgrad.operators.tables import HEAD

WORD = ir.IntType(64)
_HALF = ir.IntType(32)

Value = Any  # of LLVM's, or a number of Python's

NONE, TRUE = id(None), id(True)


class Function:
    """A function of a module, whose lines are written one after the other."""

    def __init__(self, module: ir.Module, name: str, arguments: int, returns: int = 64) -> None:
        self.returned = ir.IntType(returns)
        self.function = ir.Function(module, ir.FunctionType(self.returned, [WORD] * arguments), name)
        self.arguments = self.function.args
        self._write = ir.IRBuilder(self.function.append_basic_block("start"))

    def load(self, base: Value, index: Value = 0) -> Value:
        """The number at a place, counted in numbers from an address on."""
        return self._write.load(self._pointer(base, index))

    def load_half(self, base: Value, offset: int) -> Value:
        """The 32-bit number that lies so many bytes from an address on."""
        pointer = self._write.inttoptr(self.add(base, offset), _HALF.as_pointer())
        return self._write.zext(self._write.load(pointer), WORD)

    def store(self, value: Value, base: Value, index: Value = 0) -> None:
        """Put a number at a place."""
        self._write.store(_value(value), self._pointer(base, index))

    def _pointer(self, base: Value, index: Value) -> Value:
        return self._write.inttoptr(self.at(base, index), WORD.as_pointer())

    def at(self, base: Value, index: Value) -> Value:
        """The address of a place, counted in numbers."""
        offset = 8 * index if isinstance(index, int) else self.multiply(index, 8)
        return self.add(base, offset)

    def add(self, one: Value, other: Value) -> Value:
        return self._write.add(_value(one), _value(other))

    def subtract(self, one: Value, other: Value) -> Value:
        return self._write.sub(_value(one), _value(other))

    def multiply(self, one: Value, other: Value) -> Value:
        return self._write.mul(_value(one), _value(other))

    def bits(self, one: Value, mask: Value) -> Value:
        return self._write.and_(_value(one), _value(mask))

    def is_(self, sign: str, one: Value, other: Value) -> Value:
        """A comparison of signed numbers, such as ``is_("<=", one, other)``."""
        return self._write.icmp_signed(sign, _value(one), _value(other))

    def either(self, one: Value, other: Value) -> Value:
        return self._write.or_(one, other)

    def both(self, one: Value, other: Value) -> Value:
        return self._write.and_(one, other)

    def chosen(self, condition: Value, yes: Value, no: Value) -> Value:
        """One of two numbers."""
        return self._write.select(condition, _value(yes), _value(no))

    def call(self, target: Value, *arguments: Value, returns: int = 64) -> Value:
        """Call a function of the module, or one of C at an address, whose shorter number is widened."""
        if isinstance(target, Function):
            function, width = target.function, target.returned.width
        else:
            kind = ir.FunctionType(ir.IntType(returns), [WORD] * len(arguments))
            function, width = self._write.inttoptr(_value(target), kind.as_pointer()), returns
        found = self._write.call(function, [_value(argument) for argument in arguments])
        return found if width == 64 else self._write.sext(found, WORD)

    def stack(self, nbytes: Value) -> Value:
        """The address of so many bytes that are the function's own, at a multiple of 64."""
        area = self._write.alloca(ir.IntType(8), size=_value(nbytes))
        area.align = 64
        return self._write.ptrtoint(area, WORD)

    def give(self, value: Value) -> None:
        """Return a number."""
        self._write.ret(self.returned(value) if isinstance(value, int) else value)

    def require(self, condition: Value, otherwise: Value = 0) -> None:
        """Go on where a condition holds, and return a number where it does not."""
        with self.where(self._write.not_(condition)):
            self.give(otherwise)

    @contextmanager
    def where(self, condition: Value) -> Iterator[None]:
        """Write lines that are for when a condition holds."""
        inside, after = (self.function.append_basic_block() for _ in range(2))
        self._write.cbranch(condition, inside, after)
        self._write.position_at_end(inside)
        yield
        if not self._write.block.is_terminated:
            self._write.branch(after)
        self._write.position_at_end(after)

    @contextmanager
    def loop(self, count: Value) -> Iterator[Value]:
        """Write lines that are run so many times, with the number of the time."""
        head, inside, after = (self.function.append_basic_block() for _ in range(3))
        before = self._write.block
        self._write.branch(head)
        self._write.position_at_end(head)
        index = self._write.phi(WORD)
        index.add_incoming(WORD(0), before)
        self._write.cbranch(self.is_("<", index, count), inside, after)
        self._write.position_at_end(inside)
        yield index
        index.add_incoming(self.add(index, 1), self._write.block)
        self._write.branch(head)
        self._write.position_at_end(after)


def _value(value: Value) -> Value:
    return WORD(value) if isinstance(value, int) else value


@cache
def python(name: str) -> int:
    """Where a function of Python's interface for C lies."""
    return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0


def taken(write: Function, thing: Value) -> Value:
    """Hold an object once more."""
    write.call(python("Py_IncRef"), thing)
    return thing


def of_head(write: Function, recipe: Value) -> Callable[[str], Value]:
    """A function for what stands under a name at the beginning of a recipe's table."""
    return lambda name: write.load(recipe, HEAD.index(name))
