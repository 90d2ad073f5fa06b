"""A tensor as the contract sees it: a view over a storage, at an address, on a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from normgrad.contract.dtypes import DType
from normgrad.contract.formats import Format, format_name

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """A range of bytes on a device. ``owner`` keeps it alive."""

    address: int
    nbytes: int
    device: str = "cpu"
    owner: Any = field(default=None, repr=False, compare=False)

    @property
    def end(self) -> int:
        return self.address + self.nbytes

    def intersects(self, other: Memory) -> bool:
        """Whether the two ranges have a byte in common."""
        both_hold_something = self.nbytes > 0 and other.nbytes > 0
        return (
            both_hold_something
            and self.device == other.device
            and self.address < other.end
            and other.address < self.end
        )


@dataclass(frozen=True, slots=True)
class View:
    """A strided view: ``element[i, j, …]`` lies at ``address + itemsize·(i·strides[0] + j·strides[1] + …)``.

    Strides count elements. ``storage`` is the memory that the view may reach.
    """

    address: int
    shape: Shape
    strides: Shape
    dtype: DType
    storage: Memory
    format: int = Format.ND
    writable: bool = True

    def __repr__(self) -> str:
        notes = [self.device, f"at {self.address:#x}"]
        if self.strides != contiguous_strides(self.shape):
            notes.insert(0, f"strides {self.strides}")
        if self.format != Format.ND:
            notes.append(f"format {format_name(self.format)}")
        if not self.writable:
            notes.append("read-only")
        return f"<View {self.dtype} {self.shape}, {', '.join(notes)}>"

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def device(self) -> str:
        return self.storage.device

    @property
    def reach(self) -> Memory:
        """The smallest range of bytes that holds every element."""
        if self.numel == 0:
            return Memory(self.address, 0, self.device)
        spans = [(size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)]
        lowest = sum(span for span in spans if span < 0)
        highest = sum(span for span in spans if span > 0)
        itemsize = self.dtype.itemsize
        return Memory(self.address + lowest * itemsize, (highest - lowest + 1) * itemsize, self.device)

    @property
    def inside_storage(self) -> bool:
        """Whether every element lies inside the storage."""
        reach = self.reach
        return reach.nbytes == 0 or (self.storage.address <= reach.address and reach.end <= self.storage.end)

    def same_layout(self, other: View) -> bool:
        """Whether the two differ in their memory at most."""
        return (
            self.shape == other.shape
            and self.strides == other.strides
            and self.dtype == other.dtype
            and self.device == other.device
        )

    def disowned(self) -> View:
        """The same view, keeping nothing alive."""
        return replace(self, storage=replace(self.storage, owner=None))

    def at(self, address: int) -> View:
        """The same view at another address."""
        return replace(self, address=address)


def contiguous_strides(shape: Shape) -> Shape:
    """The strides of a row-major array."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def merge_axes(shape: Shape, strides: Sequence[Shape]) -> tuple[Shape, list[Shape]]:
    """Merge the dimensions of one shape into the fewest that several views of it share; return sizes and strides.

    Two neighbouring dimensions merge where in every view the outer stride is the inner one times the inner size.
    Dimensions of size 1 are left out.
    """
    if 0 in shape:
        return (0,), [(1,) for _ in strides]
    sizes: list[int] = []
    kept: list[int] = []  # of each merged dimension the last axis, whose stride it has
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        if kept and all(own[kept[-1]] == own[axis] * size for own in strides):
            sizes[-1], kept[-1] = sizes[-1] * size, axis
        else:
            sizes.append(size)
            kept.append(axis)
    return tuple(sizes), [tuple(own[axis] for axis in kept) for own in strides]


def reshaped_strides(view: View, sizes: Shape, strides_of_one: Shape) -> Shape | None:
    """Return the strides with which a view, reshaped to these sizes, can be read in place; None if it cannot.

    A dimension of size 1 gets its stride from ``strides_of_one``, as all do where the view has no elements.
    """
    if view.numel == 0:
        return strides_of_one
    merged_sizes, (merged_strides,) = merge_axes(view.shape, [view.strides])
    axes = list(zip(merged_sizes, merged_strides, strict=True))
    strides: list[int] = []
    for size, stride_of_one in zip(reversed(sizes), reversed(strides_of_one), strict=True):
        if size == 1:
            strides.append(stride_of_one)
            continue
        whole, stride = axes.pop()
        if whole % size:
            return None
        if whole > size:
            axes.append((whole // size, stride * size))
        strides.append(stride)
    return tuple(reversed(strides))
