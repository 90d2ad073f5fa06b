"""Native code that tells whether the arguments of a call fit a recipe.

It reads objects of Python and NumPy where they lie, which takes a hundredth of the time of asking them. A function for
each kind of argument takes a row of the recipe's table and the argument, and returns 1 where it fits.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from normgrad.operators import objects
from normgrad.operators.tables import OWN
from normgrad.operators.words import Function, Value, of_head, python


def same(module: ir.Module) -> Function:
    """The very object."""
    write = Function(module, "same", 2)
    row, argument = write.arguments
    write.require(write.is_("==", argument, write.load(row, OWN)))
    write.give(1)
    return write


def _require_type(write: Function, argument: Value, kind: Value) -> None:
    write.require(write.is_("==", write.load(write.add(argument, objects.TYPE)), kind))


def real(module: ir.Module) -> Function:
    """A float, to the last bit."""
    write = Function(module, "real", 2)
    row, argument = write.arguments
    _require_type(write, argument, id(float))
    write.require(write.is_("==", write.load(write.add(argument, objects.REAL)), write.load(row, OWN)))
    write.give(1)
    return write


def whole(module: ir.Module) -> Function:
    """An int."""
    write = Function(module, "whole", 2)
    row, argument = write.arguments
    _require_type(write, argument, id(int))
    too_large = write.stack(8)
    write.store(0, too_large)
    value = write.call(python("PyLong_AsLongLongAndOverflow"), argument, too_large)
    write.require(write.is_("==", write.load(too_large), 0))
    write.require(write.is_("==", value, write.load(row, OWN)))
    write.give(1)
    return write


def sequence(module: ir.Module) -> Function:
    """A list or tuple, or of a further type that is made as tuples are; each item has a row."""
    write = Function(module, "sequence", 2)
    row, argument = write.arguments
    kind = write.load(write.add(argument, objects.TYPE))
    is_list = write.is_("==", kind, id(list))
    is_tuple = write.either(write.is_("==", kind, id(tuple)), write.is_("==", kind, write.load(row, OWN)))
    write.require(write.either(is_list, is_tuple))
    count = write.load(row, OWN + 1)
    write.require(write.is_("==", write.load(write.add(argument, objects.SIZE)), count))
    inside = write.add(argument, objects.ITEMS)
    items = write.chosen(is_list, write.load(inside), inside)
    with write.loop(count) as number:
        item_row = write.at(row, write.add(write.multiply(number, OWN + 1), OWN + 2))
        write.require(write.is_("!=", write.call(write.load(item_row), item_row, write.load(items, number)), 0))
    write.give(1)
    return write


def array(module: ir.Module) -> Function:
    """An array of a layout that lies inside its memory: its own, or that of an array that owns it."""
    write = Function(module, "array", 2)
    row, argument = write.arguments
    dtype, dimensions, flags, low, high, odd, rest = (write.load(row, OWN + place) for place in range(7))
    _require_type(write, argument, id(np.ndarray))
    write.require(write.is_("==", write.load(write.add(argument, objects.DTYPE)), dtype))
    write.require(write.is_("==", write.load_half(argument, objects.DIMENSIONS), dimensions))
    sizes, strides = (write.load(write.add(argument, place)) for place in (objects.SHAPE, objects.STRIDES))
    with write.loop(dimensions) as axis:
        expected = write.add(axis, OWN + 7)
        write.require(write.is_("==", write.load(sizes, axis), write.load(row, expected)))
        stride = write.load(row, write.add(expected, dimensions))
        write.require(write.is_("==", write.load(strides, axis), stride))
    write.require(write.is_("==", write.bits(write.load_half(argument, objects.FLAGS), flags), flags))
    address = write.load(write.add(argument, objects.DATA))
    write.require(write.is_("==", write.bits(address, odd), rest))
    base = write.load(write.add(argument, objects.BASE))
    with write.where(write.is_("!=", base, 0)):
        _require_type(write, base, id(np.ndarray))
        write.require(write.is_("==", write.load(write.add(base, objects.BASE)), 0))
        begin = write.load(write.add(base, objects.DATA))
        write.require(write.is_("<=", begin, write.add(address, low)))
        write.require(write.is_("<=", write.add(address, high), write.add(begin, _nbytes(write, base))))
    write.give(1)
    return write


def _nbytes(write: Function, array: Value) -> Value:
    kept = write.stack(8)
    item_size = write.load_half(write.load(write.add(array, objects.DTYPE)), objects.item_size())
    write.store(item_size, kept)
    sizes = write.load(write.add(array, objects.SHAPE))
    with write.loop(write.load_half(array, objects.DIMENSIONS)) as axis:
        write.store(write.multiply(write.load(kept), write.load(sizes, axis)), kept)
    return write.load(kept)


def fits(module: ir.Module) -> Function:
    """1 where a call fits a recipe: from where its arguments are, how many, the backend it asks for, for a gradient."""
    write = Function(module, "fits", 5)
    recipe, items, given, backend, differentiating = write.arguments
    head = of_head(write, recipe)
    write.require(write.is_("==", backend, head("backend")))
    write.require(write.is_("<=", given, head("row_count")))
    write.require(write.is_("<=", head("fewest"), given))
    write.require(write.is_("==", write.bits(head("needs_grad"), differentiating), 0))
    row_at = write.stack(8)
    write.store(head("rows"), row_at)
    with write.loop(given) as number:
        row = write.load(row_at)
        write.require(write.is_("!=", write.call(write.load(row), row, write.load(items, number)), 0))
        write.store(write.at(row, write.load(row, 1)), row_at)
    write.give(1)
    return write
