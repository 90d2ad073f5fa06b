"""Where objects of Python and NumPy keep what they hold: part of the binary interface of both.

It is looked at once before anything counts on it.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from functools import cache

import numpy as np

TYPE = 8  # an object's type
INSIDE = object.__basicsize__
REAL = INSIDE  # the number in a float
SIZE, ITEMS = INSIDE, INSIDE + 8  # of a tuple; of a list the items are elsewhere, and their address is here
BYTES = bytes.__basicsize__ - 1  # the first of the bytes
DATA, DIMENSIONS, SHAPE, STRIDES, BASE, DTYPE, FLAGS = range(INSIDE, INSIDE + 7 * 8, 8)  # of an array
WRITEABLE = 0x400  # of an array's flags

_ITEM_SIZES = (INSIDE + 24, INSIDE + 16)  # of a dtype: where NumPy 2 keeps it, and where NumPy 1 did


def _word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def _half(address: int) -> int:
    return ctypes.c_int32.from_address(address).value


def are_known() -> bool:
    """Whether objects look as these numbers say, and only one thread at a time can change them."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return False
    if ctypes.sizeof(ctypes.c_void_p) != 8 or INSIDE != 16:
        return False
    return _pythons_are_known() and _numpys_are_known() and item_size() > 0


def _pythons_are_known() -> bool:
    pair, items, real, text = ("a", "b"), ["a", "b", "c"], 1.5, b"text"
    return (
        all(_word(id(one) + TYPE) == id(type(one)) for one in (pair, items, real, text, 7))
        and (_word(id(pair) + SIZE), _word(id(items) + SIZE)) == (2, 3)
        and _word(id(pair) + ITEMS + 8) == id(pair[1])
        and _word(_word(id(items) + ITEMS) + 16) == id(items[2])
        and ctypes.c_double.from_address(id(real) + REAL).value == real
        and ctypes.string_at(id(text) + BYTES, 4) == text
    )


def _numpys_are_known() -> bool:
    if np.ndarray.__basicsize__ < FLAGS + 8:
        return False
    whole = np.zeros((3, 4), np.float16)
    view = whole[1:, ::2]
    view.flags.writeable = False
    others = np.zeros((), np.float32), np.zeros((0, 2), np.int32)
    return all(_looks_as_it_says(one) for one in (whole, view, *others))


def _looks_as_it_says(array: np.ndarray) -> bool:
    at, axes = id(array), range(array.ndim)
    return (
        _word(at + DATA) == array.__array_interface__["data"][0]
        and _half(at + DIMENSIONS) == array.ndim
        and _word(at + BASE) == (0 if array.base is None else id(array.base))
        and _word(at + DTYPE) == id(array.dtype)
        and bool(_half(at + FLAGS) & WRITEABLE) == array.flags.writeable
        # With all around them in their places, these are addresses.
        and tuple(_word(_word(at + SHAPE) + 8 * axis) for axis in axes) == array.shape
        and tuple(_word(_word(at + STRIDES) + 8 * axis) for axis in axes) == array.strides
    )


@cache
def item_size() -> int:
    """Where in a dtype its item size is; 0 where it is not found."""
    dtypes = [np.dtype(name) for name in ("f4", "f2", "f8", "c16", "u1", "S7", "f4,f8,u1")]
    found = (place for place in _ITEM_SIZES if all(_half(id(dtype) + place) == dtype.itemsize for dtype in dtypes))
    return next(found, 0)
