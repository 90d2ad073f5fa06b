"""Handles: numbers that stand for objects. They are looked up, never followed, and never given out twice."""

from __future__ import annotations

import itertools
from typing import Any, TypeVar

T = TypeVar("T")

_FIRST, _STEP = 0x7AC1_0000_0000_0010, 16  # no memory can lie there, so no pointer is taken for a handle


class Handles:
    """Every object that the program has a handle of."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._numbers = itertools.count(_FIRST, _STEP)

    def add(self, made: Any) -> int:
        """A new handle for an object."""
        handle = next(self._numbers)
        self._objects[handle] = made
        return handle

    def find(self, handle: int, kind: type[T]) -> T | None:
        """The object of a handle, where it lives and is of that kind."""
        found = self._objects.get(handle)
        return found if isinstance(found, kind) else None

    def remove(self, handle: int, kind: type[T]) -> T | None:
        """The same, and the handle is dead from then on. One caller alone gets the object."""
        return self._objects.pop(handle, None) if self.find(handle, kind) is not None else None

    def problem(self, handle: int, name: str) -> str:
        """What is wrong with a handle that was not found."""
        found = self._objects.get(handle)
        if found is not None:
            return f"is {handle:#x}, a handle of another type ({type(found).__name__}), and must be a live {name}"
        if handle >= _FIRST and handle % _STEP == 0:
            return f"is {handle:#x}, a handle that is no longer alive, and must be a live {name}"
        return f"is {handle:#x}, which is not a handle, and must be a live {name}"


handles = Handles()
