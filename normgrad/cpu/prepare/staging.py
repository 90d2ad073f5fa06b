"""Staging: bring a problem's tensors into the form that kernels take, by copies in the workspace where that is needed.

Kernels take some strides only, and outputs that alias inputs in some ways only. Other tensors get a contiguous copy: an
input is copied before the kernel, an output after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from typing import TypeVar

from normgrad.contract.dtypes import DType
from normgrad.contract.plan import Problem
from normgrad.contract.view import Shape, View, contiguous_strides, merge_axes
from normgrad.cpu import limits
from normgrad.cpu.compile.kernel_lookup import Kernel
from normgrad.cpu.descriptors import COPY_RANK, Copy, CopyTensor, Fill, Pointer, Vector
from normgrad.cpu.prepare.launch import Step, SteppedKernel, Workspace
from normgrad.cpu.tags import CODES, TAGS
from normgrad.cpu.threads import pool

Found = TypeVar("Found")

_COPY = Kernel("normgrad.cpu.kernels.copy", "copy")
_FILL = Kernel("normgrad.cpu.kernels.copy", "fill")


def single_stride(shape: Shape, strides: Shape) -> int | None:
    """Return the one stride that goes through all elements in order; None if there is none."""
    sizes, (merged,) = merge_axes(shape, [strides])
    return None if len(sizes) > 1 else merged[0] if merged else 1


def strides_of_copy(view: View, order: Sequence[int], filled: Container[int]) -> Shape:
    """Return the strides of a copy with its axes in this order, outermost first.

    An axis along which the view repeats its elements has a stride of 0 again, unless it is to be ``filled``.
    """
    strides, step = [0] * view.rank, 1
    for axis in reversed(order):
        if view.strides[axis] != 0 or axis in filled:
            strides[axis] = step
            step *= view.shape[axis]
    return tuple(strides)


def padded(size: int) -> int:
    """Return a number of columns or channels rounded up to whole pairs of vectors, as arrays in the workspace have."""
    return -(-size // 32) * 32


def is_large(nbytes: int, read: int) -> bool:
    """Return whether a result of so many bytes is too large for the caches beside ``read`` inputs of its size."""
    return nbytes > limits.LARGE_FROM[read]


class Operands:
    """The tensors of a problem, with the steps that copy them in and out."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.workspace = Workspace()
        self._index = {name: index for index, name in enumerate(problem.views)}
        self._before: dict[str, Step] = {}
        self._after: dict[str, Step] = {}
        self._copies: dict[str, tuple[Pointer, View]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def view(self, name: str) -> View:
        return self.problem.views[name]

    def pointer(self, name: str) -> Pointer:
        """Return a pointer to a tensor, or to its copy where there is one."""
        return self._copies[name][0] if name in self._copies else Pointer(self._index[name])

    def staged(self, name: str) -> View:
        """Return the layout of a tensor, or of its copy where there is one."""
        return self._copies[name][1] if name in self._copies else self.view(name)

    def copy(self, name: str, dtype: DType | None = None, strides: Shape | None = None) -> View:
        """Give a tensor a copy and return its layout: contiguous, or with strides from `strides_of_copy`.

        A second copy replaces the first.
        """
        view = self.view(name)
        layout = View(0, view.shape, strides or contiguous_strides(view.shape), dtype or view.dtype, view.storage)
        copy = self.workspace.take(layout.reach.nbytes)
        ends = (view, Pointer(self._index[name])), (layout, copy)
        if self.problem.signature.is_written(name):
            self._after[name] = _copy_step(*reversed(ends))
        else:
            self._before[name] = _copy_step(*ends)
        self._copies[name] = copy, layout
        return layout

    def is_copied(self, name: str) -> bool:
        """Return whether a tensor has a copy."""
        return name in self._copies

    def with_layout(self, name: str, find: Callable[[View], Found | None]) -> Found:
        """Return what a function finds about a tensor's layout, or about a contiguous copy's where it finds nothing."""
        found = find(self.staged(name))
        if found is None:
            found = find(self.copy(name))
        assert found is not None
        return found

    def vector(self, name: str) -> Vector:
        """Return the description of a small tensor, with one stride; an absent one has no address."""
        if name not in self:
            return Vector()
        stride = self.with_layout(name, lambda view: single_stride(view.shape, view.strides))
        return Vector(self.pointer(name), stride, CODES[self.view(name).dtype])

    def separate(self, output: str, in_place: tuple[str, ...] = ()) -> bool:
        """Give an output that aliases inputs a copy, unless it is the same as inputs that may be overwritten in place.

        Return whether it overwrites one in place.
        """
        if output not in self or output in self._copies:
            return False
        own, is_output = self.view(output), self.problem.signature.is_output
        inputs = {name: view for name, view in self.problem.views.items() if name != output and not is_output(name)}
        aliased = {name: view for name, view in inputs.items() if own.reach.intersects(view.reach)}
        same = (own.address == view.address and own.same_layout(view) for view in aliased.values())
        if aliased.keys() <= set(in_place) and all(same):
            return bool(aliased)
        self.copy(output)
        return False

    def fills(self, value: float, *names: str) -> list[Step]:
        """Return steps that fill small outputs with a value, where they are wanted."""
        wanted = [name for name in names if name in self]
        return [Step(_FILL, Fill(self.vector(name), self.view(name).numel, value)) for name in wanted]

    def kernel(self, *steps: Step) -> SteppedKernel:
        """Return the kernel that copies inputs in, runs these steps and copies outputs out."""
        return SteppedKernel(self.workspace.size, [*self._before.values(), *steps, *self._after.values()])


def _copy_step(source: tuple[View, Pointer], target: tuple[View, Pointer]) -> Step:
    """Return a step that copies a tensor to one of the same shape, in the target's order in memory."""
    (view, _), (other, _) = ends = source, target
    # Axes along which both repeat their elements are left out, but for those that make the tensor empty.
    filled = [axis for axis in range(view.rank) if other.strides[axis] != 0 or not view.shape[axis]]
    axes = sorted(filled, key=lambda axis: -abs(other.strides[axis]))
    shape = tuple(view.shape[axis] for axis in axes)
    sizes, strides = merge_axes(shape, [tuple(end.strides[axis] for axis in axes) for end, _ in ends])
    missing = (0,) * (COPY_RANK - len(sizes))
    tensors = [CopyTensor(pointer, (*missing, *own)) for (_, pointer), own in zip(ends, strides, strict=True)]
    *outer, rows, columns = (*[1] * len(missing), *sizes)
    block_rows, block_columns = max(1, min(rows, limits.COPIED_ROWS)), max(1, min(columns, limits.COPIED_COLUMNS))
    row_blocks, column_blocks = -(-rows // block_rows), -(-columns // block_columns)
    descriptor = Copy(
        blocks=math.prod(outer) * row_blocks * column_blocks,
        blocks_per_take=max(1, limits.COPIED_ELEMENTS // (block_rows * block_columns)),
        row_blocks=row_blocks,
        block_rows=block_rows,
        column_blocks=column_blocks,
        block_columns=block_columns,
        sizes=(*outer, rows, columns),
        source=tensors[0],
        target=tensors[1],
    )
    return Step(_COPY, descriptor, TAGS[view.dtype], TAGS[other.dtype], shared=pool.shared(math.prod(sizes)))
