"""Recipes as tables of int64 numbers, which native code follows."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from normgrad.contract.arrays import numpy_address
from normgrad.operators import gathering, objects
from normgrad.operators.guards import sequence_types, torch_types

#: What a recipe's table begins with: numbers, and the addresses of its parts, of functions of C and of objects.
#: 0 for what it has not.
HEAD = (
    "owner",  # the object that holds all that the table points to
    "rows",
    "row_count",
    "fewest",  # arguments: any after them are as the defaults are
    "backend",  # what the environment asks for
    "needs_grad",
    "serve",  # a function of the arguments that does all the rest in Python
    "seen",  # the places of arrays or tensors among the arguments
    "seen_count",
    "is_ready",  # whether this thread can call the kernel, unless it always can
    "check",  # PyTorch's guards of the tensors
    "gather",  # the tensors' addresses and the fills, as normgrad.operators.gathering says
    "gather_table",
    "makers",  # for each result a function and its arguments; or 0 and an argument's place, -1 for none
    "maker_count",
    "result_count",  # the user's: a workspace may come after them
    "made",  # which of the results are made
    "made_count",
    "fills",  # without a gather: position, number of an address, offset
    "fill_count",
    "pairs",  # of the addresses: how two of them must lie
    "pair_count",
    "numbers",  # in the descriptor
    "template",
    "scratch",  # positions for addresses in the workspace, with offsets
    "scratch_count",
    "workspace_size",
    "allocate",  # a function for a workspace and its address; 0 where it lies on the stack
    "entry",
    "call",  # a function of the descriptor and its address, instead of the entry
    "failed",  # a function of the entry's status and the descriptor's address, which raises or does the rest
    "kept",  # what parts point to
)

#: What a register begins with: how many recipes follow, the environment, the variable for the backend.
REGISTER = ("count", "environment", "variable")

OWN = 2  # where in a row that begins what its function needs, after that function and the row's size

_INT64 = range(-(1 << 63), 1 << 63)


class Unfit(Exception):
    """A call that a table cannot describe."""


#: A number, or the name of a native function that looks at an argument, for its address.
Entry = int | str


def row(argument: Any, written: bool) -> list[Entry]:
    """What an argument must be like to fit a recipe, from one that fits; whether it is an array that is written to."""
    kind = type(argument)
    if kind is np.ndarray:
        return _row("array", _array(argument, written))
    if argument is None or kind is bool:
        return _row("same", [id(argument)])
    if kind is float:
        return _row("real", struct.unpack("q", struct.pack("d", argument)))
    if kind is int and argument in _INT64:
        return _row("whole", [argument])
    if issubclass(kind, list | tuple):
        if not all(type(item) in (int, bool) for item in argument):
            raise Unfit
        rows = [entry for item in argument for entry in row(item, False)]
        further, *_ = *sequence_types(), tuple
        return _row("sequence", [id(further), len(argument), *rows])
    if kind in torch_types():
        has_layout = gathering.has_layout()
        if has_layout is not None:
            return _row(has_layout, gathering.layout_row(argument))
    raise Unfit


def _row(function: Entry, own: Sequence[Entry]) -> list[Entry]:
    return [function, OWN + len(own), *own]


def _array(one: np.ndarray, written: bool) -> list[int]:
    spans = [(size - 1) * stride for size, stride in zip(one.shape, one.strides, strict=True)] if one.size else []
    low = sum(min(span, 0) for span in spans)
    high = sum(max(span, 0) for span in spans) + (one.itemsize if one.size else 0)
    flags = objects.WRITEABLE if written else 0
    odd = 3
    return [id(one.dtype), one.ndim, flags, low, high, odd, numpy_address(one) & odd, *one.shape, *one.strides]


class Table:
    """A recipe's table, with all that it points to."""

    def __init__(self, head: Mapping[str, Any], kept: Any, functions: Mapping[str, int]) -> None:
        """What is not in the head is 0; ``kept`` are objects that rows point to, the functions those that they name."""
        self._kept = head, kept
        parts = [value for value in head.values() if isinstance(value, list)]
        self._numbers = numbers = array("q", bytes(8 * (len(HEAD) + sum(map(len, parts)))))
        #: Where the table lies.
        self.address, _ = numbers.buffer_info()
        place = len(HEAD)
        for name, value in {"owner": self, **head}.items():
            if isinstance(value, list):
                number = self.address + 8 * place
                numbers[place : place + len(value)] = array("q", [functions.get(one, one) for one in value])
                place += len(value)
            elif isinstance(value, array):
                number, _ = value.buffer_info()
            else:
                number = value if isinstance(value, int) else id(value)
            numbers[HEAD.index(name)] = number
