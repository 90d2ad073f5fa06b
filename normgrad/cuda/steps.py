"""The launches of one operator call while they are collected: operands in place or copied, workspace, partial sums.

The ``launches`` module of an operator family fills a ``Steps``; the backend reads ``steps`` and ``workspace_size``. A
tensor is used in place where one stride per dimension of the kernel reaches its elements, and its columns are
contiguous if the kernel asks for it. Others, and inputs that overlap an output, are copied into the workspace first;
other outputs are copied out of it last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from normgrad.contract.dtypes import FLOAT32, DType
from normgrad.contract.overlap import overlap
from normgrad.contract.plan import Problem
from normgrad.contract.view import Shape, View, contiguous_strides
from normgrad.cuda.chip import VECTOR_BYTES, cdiv, next_power_of_2
from normgrad.cuda.helper_kernels import copy_strided, sum_partials, transpose
from normgrad.cuda.launch import ALIGNMENT, FLOAT64, Argument, Given, Options, Scratch, Step
from normgrad.cuda.operands import Operand, alignment, grid_strides, merge_rows

_DATA = ("input", "grad_out", "output")
_COPY_BLOCK = 1024
_TRANSPOSE_BLOCK = 64
_TRANSPOSE_WARPS = 8
# Of the second-stage reductions: elements of a tile, how many programs are enough, and elements of a warp. On an H200
# tiles of 4096 and warps of 512 are within 1 % of the best for LayerNorm and for GroupNorm in channels_last (GroupNorm
# 32×512×1024: 82.0 µs, with 8192 and 1024 it takes 84.5).
_SUM_TILE = 4096
_SUM_PROGRAMS = 512
_SUM_WARP_ELEMENTS = 512
_SUM_SEGMENT = 4096  # rows of partial sums that a program adds up; of more, the segments' sums are added up again


@dataclass(frozen=True)
class WantedGradients:
    """The constexpr WANT of the backward kernels: which gradients they compute."""

    input: bool
    weight: bool
    bias: bool


class Steps:
    """The launches of an operator call, in order, and the workspace that they share."""

    def __init__(self, problem: Problem, outputs: Sequence[str]) -> None:
        """``outputs`` names the tensors that kernels write while others are still to be read."""
        self._problem = problem
        self._outputs = [problem.views[name] for name in outputs if name in problem.views]
        self._steps: list[Step] = []
        self._copies_out: list[Step] = []
        self._size = 0

    @property
    def dtype(self) -> DType:
        """Dtype of the data, the wider one where two differ, as under autocast; registers hold all data so."""
        return max(self._data_dtypes, key=lambda dtype: dtype.itemsize)

    @property
    def _data_dtypes(self) -> list[DType]:
        return [self._problem.views[name].dtype for name in _DATA if name in self._problem.views]

    @property
    def itemsize(self) -> int:
        """Bytes of an element of that dtype."""
        return self.dtype.itemsize

    @property
    def narrowest_itemsize(self) -> int:
        """Bytes of an element of the narrower dtype where two differ.

        By this GroupNorm chooses tiles of channels, in channels_last: with those of float32 a warp would load 64 bytes
        of 16-bit data at a time (128×256×56×56 in bfloat16 beside float32 on an H200: forward 246 µs, and 734 so).
        """
        return min(dtype.itemsize for dtype in self._data_dtypes)

    @property
    def steps(self) -> list[Step]:
        return self._steps + self._copies_out

    @property
    def workspace_size(self) -> int:
        """Bytes; with room to align the first buffer."""
        return self._size + ALIGNMENT if self._size else 0

    def wants(self, output: str) -> bool:
        """Return whether an output is to be computed."""
        return output in self._problem.views

    @property
    def wanted_gradients(self) -> WantedGradients:
        """Return which gradients are to be computed."""
        return WantedGradients(*(self.wants(name) for name in ("grad_input", "grad_weight", "grad_bias")))

    def add(self, *steps: Step) -> None:
        self._steps.extend(steps)

    def scratch(self, elements: int, dtype: DType) -> Scratch:
        """Allocate a buffer in the workspace."""
        offset = self._size
        self._size += -(-elements * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return Scratch(offset, dtype)

    def partial_sums(self, outputs: int, rows: int, columns: int, float64: bool) -> Scratch:
        """Allocate [outputs, rows, columns] for the partial sums of the weight gradients that are wanted."""
        return self.scratch(max(outputs * rows * columns, 1), FLOAT64 if float64 else FLOAT32)

    def _pointer(self, name: str) -> Given:
        view = self._problem.views[name]
        return Given(name, view.dtype, view.address % VECTOR_BYTES == 0)

    def strided_input(self, name: str, sizes: Shape, contiguous_columns: bool = False) -> Operand:
        """Return an input over these sizes that every CTA reads only where it writes: it may be the output's memory.

        ``contiguous_columns``: the kernel reads a last dimension with stride 1 only.
        """
        view = self._problem.views[name]
        strides = _strides_in_place(view, sizes, contiguous_columns)
        others = (out for out in self._outputs if out.address != view.address or not out.same_layout(view))
        overlapped = any(overlap(view, output) for output in others)
        if strides is not None and overlapped:  # a copy in the same memory order
            strides = _strides_in_place(_dense(view), sizes, contiguous_columns)
            if strides is not None:
                return Operand(self._copy_in(name, _dense(view).strides), strides)
        if strides is None:
            return Operand(self._copy_in(name), contiguous_strides(sizes))
        return Operand(self._pointer(name), strides, alignment(view.address))

    def contiguous_input(self, name: str) -> Argument:
        """Return a one-dimensional input with stride 1, copied if it has another; None if it is absent."""
        view = self._problem.views.get(name)
        if view is None:
            return None
        strides = grid_strides(view, (view.numel,))
        if strides != (1,) or any(overlap(view, output) for output in self._outputs):
            return self._copy_in(name)
        return self._pointer(name)

    def output(self, name: str, sizes: Shape, contiguous_columns: bool = False) -> Operand:
        """Return an output over these sizes; absent where it is not wanted."""
        view = self._problem.views.get(name)
        if view is None:
            return Operand(None, (1,) * len(sizes))
        strides = _strides_in_place(view, sizes, contiguous_columns)
        if strides is not None:
            return Operand(self._pointer(name), strides, alignment(view.address))
        buffer = self.scratch(view.numel, view.dtype)
        source, target = Operand(buffer, contiguous_strides(view.shape)), Operand(self._pointer(name), view.strides)
        self._copies_out.append(_copy(view.shape, source, target))
        return Operand(buffer, contiguous_strides(sizes))

    def _copy_in(self, name: str, strides: Shape | None = None) -> Scratch:
        """Copy an input into the workspace, contiguous or with these strides."""
        view = self._problem.views[name]
        buffer = self.scratch(view.numel, view.dtype)
        target = Operand(buffer, contiguous_strides(view.shape) if strides is None else strides)
        self.add(_copy(view.shape, Operand(self._pointer(name), view.strides), target))
        return buffer

    def sum_partials(self, partial: Scratch, rows: int, columns: int, outputs: Sequence[Operand]) -> None:
        """Sum float32 or float64 [outputs, rows, columns] over the rows, in float64 and in a fixed order."""
        if rows <= _SUM_SEGMENT:
            self.add(_sum_step(partial, rows, columns, max(rows, 1), outputs))
            return
        segments = cdiv(rows, _SUM_SEGMENT)
        shorter = self.scratch(len(outputs) * segments * columns, partial.dtype)
        for index in range(len(outputs)):
            source, target = partial.part(index, rows * columns), shorter.part(index, segments * columns)
            self.add(_sum_step(source, rows, columns, _SUM_SEGMENT, [Operand(target, (1,))]))
        self.sum_partials(shorter, segments, columns, outputs)


def backward_steps(problem: Problem, columns: int) -> tuple[Steps, list[Operand], bool]:
    """Return the steps of a backward pass, its weight gradients that are wanted, and whether there is work to add.

    The weight gradients have ``columns`` elements each. Without data they are zeros, and the steps are complete.
    """
    weight_gradients = [name for name in ("grad_weight", "grad_bias") if name in problem.views]
    steps = Steps(problem, ["grad_input", *weight_gradients])
    outputs = [steps.output(name, (columns,)) for name in weight_gradients]
    has_data = problem.views["input"].numel > 0
    if not has_data and outputs and columns:
        steps.sum_partials(steps.scratch(1, FLOAT32), 0, columns, outputs)
    return steps, outputs, has_data and (bool(outputs) or steps.wants("grad_input"))


def _strides_in_place(view: View, sizes: Shape, contiguous_columns: bool) -> Shape | None:
    """Return the strides over these sizes with which a kernel uses a tensor in place; None if it has to be copied."""
    strides = grid_strides(view, sizes)
    if strides is None or not contiguous_columns or strides[-1] == 1:
        return strides
    return None if sizes[-1] > 1 else (*strides[:-1], 1)


def _dense(view: View) -> View:
    """Return a view of the same shape and order in memory without gaps."""
    strides, below = [0] * view.rank, 1
    for axis in sorted(range(view.rank), key=lambda axis: (abs(view.strides[axis]), -axis)):
        strides[axis], below = below, below * view.shape[axis]
    return replace(view, strides=tuple(strides))


def _sum_step(partial: Scratch, rows: int, columns: int, segment: int, outputs: Sequence[Operand]) -> Step:
    """Return the launch of ``sum_partials`` for segments of the rows.

    Its tiles have few columns where there are few, so that all multiprocessors take part; all rows of a segment at once
    where they are not many; and few warps, since the sums of several warps go through shared memory.
    """
    first, second = (*outputs, Operand(None, (1,)))[:2]
    width = min(max(next_power_of_2(cdiv(columns * len(outputs), _SUM_PROGRAMS)), 8), 256)
    height = min(next_power_of_2(segment), _SUM_TILE // width)
    warps = min(max(width * height // _SUM_WARP_ELEMENTS, 1), 8)
    grid = (cdiv(columns, width), max(cdiv(rows, segment), 1), len(outputs))
    arguments = [partial, first.pointer, second.pointer, rows, columns, segment, first.strides[0], second.strides[0]]
    return Step(sum_partials, grid, arguments, {"ROWS": height, "COLUMNS": width}, Options(warps, pdl=True))


def _copy(shape: Shape, source: Operand, target: Operand) -> Step:
    """Return the launch that copies a tensor: ``transpose`` where source and target have different fastest axes."""
    if not shape:
        shape, source, target = (1,), replace(source, strides=(1,)), replace(target, strides=(1,))
    count = math.prod(shape)
    grid, merged = merge_rows(shape, [source, target])
    sizes = (*grid, shape[-1])
    fastest = {_fastest_axis(sizes, operand.strides) for operand in merged}
    axes = (*(axis for axis in range(len(sizes)) if axis not in fastest), *sorted(fastest))
    sizes, *strides = (tuple(values[axis] for axis in axes) for values in (sizes, *(each.strides for each in merged)))
    pointers = source.pointer, target.pointer
    if len(fastest) == 1:
        arguments = (*pointers, count, sizes, *strides)
        return Step(copy_strided, (cdiv(count, _COPY_BLOCK), 1, 1), arguments, {"BLOCK": _COPY_BLOCK})
    *outer, rows, columns = sizes
    tiles = math.prod(outer) * cdiv(rows, _TRANSPOSE_BLOCK) * cdiv(columns, _TRANSPOSE_BLOCK)
    arguments = (*pointers, tuple(outer), rows, columns, *strides)
    return Step(transpose, (tiles, 1, 1), arguments, {"BLOCK": _TRANSPOSE_BLOCK}, Options(_TRANSPOSE_WARPS))


def _fastest_axis(sizes: Shape, strides: Shape) -> int:
    """Return the axis of more than one element with the smallest stride that is not 0; the last if there is none."""
    axes = [axis for axis, size in enumerate(sizes) if size > 1 and strides[axis]]
    return min(axes, key=lambda axis: (abs(strides[axis]), -axis), default=len(sizes) - 1)
