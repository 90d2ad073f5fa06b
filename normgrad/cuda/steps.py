"""From a checked problem to steps: which memory the kernels may use as it is, and what has to be copied first.

A tensor is used in place where its elements form a grid of the kernel's sizes with one stride per dimension. Others,
and inputs that share memory with what the kernels write, are copied into the workspace; odd results out of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from normgrad.contract.dtypes import BFLOAT16, FLOAT16, INT32, DType
from normgrad.contract.overlap import overlap
from normgrad.contract.plan import Problem
from normgrad.contract.view import Shape, View, contiguous_strides
from normgrad.cuda.chip import VECTOR_ACCESS, blocks, power_of_two
from normgrad.cuda.device.common import BFLOAT16_PAIRS, FLOAT16_PAIRS, SINGLE
from normgrad.cuda.helper_kernels import copy_strided, sum_columns
from normgrad.cuda.launch import ALIGNMENT, Argument, Given, Options, Scratch, Step

_COPY_BLOCK = 1024
# Of the second-stage reductions: elements at a time, how many programs are enough, and elements of a warp. On an H200
# tiles of 4096 and warps of 512 are within 1 % of the best for LayerNorm and for GroupNorm in channels_last (GroupNorm
# 32×512×1024: 82.0 µs, with 8192 and 1024 it takes 84.5).
_SUM_TILE = 4096
_SUM_PROGRAMS = 512
_WARP_SUMS = 512
SEGMENT = 4096
_PAIRS = {BFLOAT16: BFLOAT16_PAIRS.value, FLOAT16: FLOAT16_PAIRS.value}


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor as a kernel sees it; None stands for one that is absent. It begins at a multiple of so many bytes."""

    pointer: Given | Scratch | None
    strides: Shape
    alignment: int = VECTOR_ACCESS


def alignment(address: int) -> int:
    """The largest power of two up to the bytes of a vector of which an address is a multiple."""
    return math.gcd(address, VECTOR_ACCESS)


def zero_bits(address: int) -> int:
    """The bits of an address that the code may take for zero: those below a vector, half of one, a pair, or none."""
    found = alignment(address)
    return found - 1 if found >= INT32.itemsize else 0


def begin_with_vectors(operands: Sequence[Operand]) -> bool:
    """Whether all tensors begin at a multiple of a vector."""
    return all(operand.alignment == VECTOR_ACCESS for operand in operands)


def grid_strides(view: View, sizes: Shape) -> Shape | None:
    """The strides with which the view's elements, in order, form a grid of these sizes; None where they form none."""
    if view.numel == 0:
        return contiguous_strides(sizes)
    axes = [(size, stride) for size, stride in zip(view.shape, view.strides, strict=True) if size != 1]
    strides: list[int] = []
    usual = contiguous_strides(sizes)
    for size, contiguous in zip(reversed(sizes), reversed(usual), strict=True):
        left, stride, following = size, contiguous, None
        while left > 1:
            length, step = axes.pop()
            if following is None:
                stride = step
            elif step != following:
                return None
            if length > left:
                if length % left:
                    return None
                axes.append((length // left, step * left))
                left = 1
            elif left % length:
                return None
            else:
                left, following = left // length, step * length
        strides.append(stride)
    return tuple(reversed(strides))


class Steps:
    """The steps of a problem while they are put together."""

    def __init__(self, problem: Problem, written_early: Sequence[str]) -> None:
        """``written_early`` names the tensors that a kernel writes while others are still to be read."""
        self._problem = problem
        self._early = [problem.views[name] for name in written_early if name in problem.views]
        self._steps: list[Step] = []
        self._last: list[Step] = []
        self._size = 0

    @property
    def dtype(self) -> DType:
        """The data's."""
        return self._problem.views["input"].dtype

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the data."""
        return self.dtype.itemsize

    @property
    def steps(self) -> list[Step]:
        return self._steps + self._last

    @property
    def workspace_size(self) -> int:
        return self._size + ALIGNMENT if self._size else 0

    def add(self, *steps: Step) -> None:
        self._steps.extend(steps)

    def scratch(self, elements: int, dtype: DType) -> Scratch:
        """Fresh memory in the workspace."""
        offset = self._size
        self._size += -(-elements * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return Scratch(offset, dtype)

    def given(self, name: str) -> Given:
        view = self._problem.views[name]
        return Given(name, view.dtype, view.address % VECTOR_ACCESS == 0)

    def data(self, name: str, sizes: Shape) -> Operand:
        """An input that every program reads only where it writes, so that it may be the output's own memory."""
        view = self._problem.views[name]
        strides = grid_strides(view, sizes)
        shared = any(overlap(view, other) and not _same(view, other) for other in self._early)
        if strides is not None and shared:  # in the same order
            strides = grid_strides(_dense(view), sizes)
            if strides is not None:
                return Operand(self._copy_of(name, _dense(view).strides), strides)
        if strides is None:
            return Operand(self._copy_of(name), contiguous_strides(sizes))
        return Operand(self.given(name), strides, alignment(view.address))

    def vector(self, name: str) -> Argument:
        """A small input, side by side in memory; None where it is absent."""
        view = self._problem.views.get(name)
        if view is None:
            return None
        strides = grid_strides(view, (view.numel,))
        if strides != (1,) or any(overlap(view, other) for other in self._early):
            return self._copy_of(name)
        return self.given(name)

    def output(self, name: str, sizes: Shape) -> Operand:
        """Where a kernel writes a result; None where it is not wanted."""
        view = self._problem.views.get(name)
        if view is None:
            return Operand(None, (1,) * len(sizes))
        strides = grid_strides(view, sizes)
        if strides is not None:
            return Operand(self.given(name), strides, alignment(view.address))
        compact = self.scratch(view.numel, view.dtype)
        self._last.append(_copy(view.shape, compact, contiguous_strides(view.shape), self.given(name), view.strides))
        return Operand(compact, contiguous_strides(sizes))

    def _copy_of(self, name: str, strides: Shape | None = None) -> Scratch:
        """A copy with nothing between its elements, in their order or that of these strides."""
        view = self._problem.views[name]
        compact = self.scratch(view.numel, view.dtype)
        copied = contiguous_strides(view.shape) if strides is None else strides
        self.add(_copy(view.shape, self.given(name), view.strides, compact, copied))
        return compact

    def sum_columns(self, partial: Scratch, rows: int, columns: int, outputs: Sequence[Operand]) -> None:
        """Sum float32 or float64 [outputs, rows, columns] over the rows, in float64 and in a fixed order."""
        if rows > SEGMENT:
            segments = -(-rows // SEGMENT)
            shorter = self.scratch(len(outputs) * segments * columns, partial.dtype)
            for place in range(len(outputs)):
                begin = Scratch(partial.offset + place * rows * columns * partial.dtype.itemsize, partial.dtype)
                end = Scratch(shorter.offset + place * segments * columns * partial.dtype.itemsize, partial.dtype)
                self.add(_sums(begin, rows, columns, SEGMENT, [Operand(end, (1,))]))
            self.sum_columns(shorter, segments, columns, outputs)
        else:
            self.add(_sums(partial, rows, columns, max(rows, 1), outputs))


def paired(operands: Sequence[Operand], side_by_side: int, axis: int = -1) -> tuple[int, list[Operand]]:
    """Data of 16 bits as pairs along an axis, where every tensor allows it; and pairs of what.

    ``side_by_side`` numbers at a time must begin and end with a pair. If the first row begins with one, so do all: a
    row is summed in the same order in whatever batch it is.
    """
    present = [operand for operand in operands if operand.pointer is not None]
    kind = next(_PAIRS.get(operand.pointer.dtype, SINGLE.value) for operand in present if operand.pointer is not None)
    even = all(
        stride == 1 if place == axis % len(operand.strides) else stride % 2 == 0
        for operand in present
        for place, stride in enumerate(operand.strides)
    )
    if (
        kind == SINGLE.value
        or side_by_side % 2
        or not (even and all(operand.alignment >= INT32.itemsize for operand in present))
    ):
        return SINGLE.value, list(operands)
    return kind, [_as_pairs(operand) for operand in operands]


def paired_vector(vector: Argument, pairs: int) -> Argument:
    """A vector of 16 bits as pairs too, beside data that comes as pairs, where its memory allows it."""
    if pairs == SINGLE.value or not isinstance(vector, Given | Scratch) or vector.dtype not in _PAIRS:
        return vector
    aligned = isinstance(vector, Scratch) or vector.aligned
    return replace(vector, dtype=INT32) if aligned else vector


def _as_pairs(operand: Operand) -> Operand:
    pointer = None if operand.pointer is None else replace(operand.pointer, dtype=INT32)
    return replace(
        operand, pointer=pointer, strides=tuple(stride if stride == 1 else stride // 2 for stride in operand.strides)
    )


def _dense(view: View) -> View:
    """A view with nothing between its elements, which are in the same order in memory."""
    strides, below = [0] * view.rank, 1
    for axis in sorted(range(view.rank), key=lambda axis: (abs(view.strides[axis]), -axis)):
        strides[axis], below = below, below * view.shape[axis]
    return replace(view, strides=tuple(strides))


def _same(view: View, other: View) -> bool:
    return view.address == other.address and view.same_layout(other)


def sums_tile(rows: int, columns: int, sums: int) -> tuple[int, int, int]:
    """Columns and rows of which a program sums up at a time, for so many sums, and its warps.

    Few columns where there are few, so that all multiprocessors take part; all rows at once where they are not many;
    and few warps, since what they have of a column goes through shared memory.
    """
    width = min(max(power_of_two(blocks(columns * sums, _SUM_PROGRAMS)), 8), 256)
    height = min(power_of_two(max(rows, 1)), _SUM_TILE // width)
    return width, height, min(max(width * height // _WARP_SUMS, 1), 8)


def _sums(partial: Scratch, rows: int, columns: int, segment: int, outputs: Sequence[Operand]) -> Step:
    first, second = (*outputs, Operand(None, (1,)))[:2]
    width, height, warps = sums_tile(segment, columns, len(outputs))
    grid = (blocks(columns, width), max(blocks(rows, segment), 1), len(outputs))
    arguments = [partial, first.pointer, second.pointer, rows, columns, segment, first.strides[0], second.strides[0]]
    return Step(sum_columns, grid, arguments, {"ROWS": height, "COLUMNS": width}, Options(warps, follows=True))


def _copy(
    shape: Shape, source: Given | Scratch, source_strides: Shape, target: Given | Scratch, target_strides: Shape
) -> Step:
    count = math.prod(shape)
    rank = max(len(shape), 1)
    arguments = (source, target, count, shape or (1,), source_strides or (1,), target_strides or (1,))
    return Step(copy_strided, (-(-count // _COPY_BLOCK), 1, 1), arguments, {"RANK": rank, "BLOCK": _COPY_BLOCK})
