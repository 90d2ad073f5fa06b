"""One block of memory that a call's arrays lie in, so that every byte they must not touch can be watched.

All of it starts as 0xFF, which is NaN in every floating-point dtype of the contract: whoever reads what nobody
wrote, or leaves an output unwritten, is found out.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from support.dtypes import NUMPY, TORCH

POISON = 0xFF
_GUARD = 16  # elements before and behind every array

#: How an array lies in memory. PyTorch has no negative strides; "broadcast" is for inputs alone.
LAYOUTS = ("contiguous", "permuted", "sliced", "reversed", "mixed", "broadcast")


@dataclass(frozen=True)
class Place:
    """Where an array lies: byte offset of its first element, shape, strides in elements, dtype by name."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    def at(self, memory: np.ndarray) -> np.ndarray:
        """The place as a NumPy array in a block of bytes."""
        dtype = NUMPY[self.dtype]
        strides = tuple(stride * dtype.itemsize for stride in self.strides)
        return np.ndarray(self.shape, dtype, memory, self.offset, strides)

    def bytes_in(self, memory: np.ndarray) -> np.ndarray:
        """The bytes of every element, along one more axis."""
        itemsize = NUMPY[self.dtype].itemsize
        strides = (*(stride * itemsize for stride in self.strides), 1)
        return np.ndarray((*self.shape, itemsize), np.uint8, memory, self.offset, strides)

    def moved(self, offset: int) -> Place:
        return Place(offset, self.shape, self.strides, self.dtype)


def laid_out(shape: tuple[int, ...], dtype: str, layout: str, rng: random.Random) -> tuple[Place, int]:
    """A place relative to the start of a block that holds it, and the bytes of that block, guards included."""
    rank = len(shape)
    order = list(range(rank))
    if layout in ("permuted", "mixed"):
        rng.shuffle(order)
    steps = [1] * rank
    if layout in ("sliced", "mixed"):
        steps = [rng.choice((1, 1, 2, 3)) for _ in shape]
    if layout in ("reversed", "mixed"):
        steps = [rng.choice((-1, 1)) * step for step in steps]
    strides, first, extent = [0] * rank, 0, 1
    for axis in reversed(order):
        if layout == "broadcast" and rng.random() < 0.5:
            continue
        strides[axis] = steps[axis] * extent
        reach = max(shape[axis] - 1, 0) * abs(steps[axis])
        if steps[axis] < 0:
            first += reach * extent
        extra = rng.randrange(2) if layout in ("sliced", "mixed") else 0
        extent *= reach + 1 + extra
    itemsize = NUMPY[dtype].itemsize
    return Place((first + _GUARD) * itemsize, shape, tuple(strides), dtype), (extent + 2 * _GUARD) * itemsize


class Arena:
    """Places for arrays one after the other, then the memory behind them."""

    def __init__(self) -> None:
        self.size = 64
        self._memory: np.ndarray | None = None

    def reserve(self, shape: tuple[int, ...], dtype: str, layout: str, rng: random.Random) -> Place:
        """A place behind all those before it."""
        place, size = laid_out(shape, dtype, layout, rng)
        start = self.size
        self.size = math.ceil((start + size) / 8) * 8
        return place.moved(start + place.offset)

    @property
    def memory(self) -> np.ndarray:
        """All bytes, made when first asked for; no place can be reserved after that."""
        if self._memory is None:
            self._memory = np.full(math.ceil(self.size / 64) * 64, POISON, np.uint8)
        return self._memory

    def array(self, place: Place, kind: str) -> Any:
        """The array of that kind ("numpy" or "torch") at a place."""
        if kind == "numpy":
            return place.at(self.memory)
        itemsize = NUMPY[place.dtype].itemsize
        return torch.frombuffer(self.memory, dtype=TORCH[place.dtype]).as_strided(
            place.shape, place.strides, place.offset // itemsize
        )

    def fill(self, place: Place, values: np.ndarray) -> None:
        """Write values, rounded to the place's dtype. Where elements share memory the last one stays."""
        with np.errstate(all="ignore"):
            place.at(self.memory)[...] = np.reshape(values, place.shape).astype(NUMPY[place.dtype])

    def bytes_of(self, places: list[Place]) -> np.ndarray:
        """Which bytes belong to an element of one of the places."""
        inside = np.zeros(self.memory.size, np.uint8)
        for place in places:
            place.bytes_in(inside)[...] = 1
        return inside.astype(bool)


def as_float64(array: Any) -> np.ndarray:
    """A copy of an array of either kind in float64."""
    if isinstance(array, torch.Tensor):
        return array.detach().to(torch.float64).numpy().copy()
    return np.array(array, dtype=np.float64)
