"""LayerNorm on the CPU: the descriptors of its kernels."""

from __future__ import annotations

import math

import numpy as np

from normgrad.contract.plan import Problem
from normgrad.contract.view import Shape, View
from normgrad.cpu.compile.kernel_lookup import Kernel
from normgrad.cpu.fields import layer_norm_backward as backward
from normgrad.cpu.fields import layer_norm_forward as forward
from normgrad.cpu.fields.row_sizes import GROUP, OUTER_RANK, SEGMENT, STAGED_ROWS, STRETCH, SUMS, TILE
from normgrad.cpu.prepare.axes import collapsed, collapsed_together, is_contiguous
from normgrad.cpu.prepare.launch import Place, Step, SteppedKernel
from normgrad.cpu.prepare.staging import Operands, goes_past_caches
from normgrad.cpu.tags import CODES, TAGS
from normgrad.cpu.threads import pool

_BACKWARD = Kernel("normgrad.cpu.kernels.layer_norm.backward", "layer_norm_backward")
_FORWARD = Kernel("normgrad.cpu.kernels.layer_norm.forward", "layer_norm")
_BLOCK = 1 << 16  # elements of a block of rows, about
_FEWEST = 1 << 15  # elements of a block of rows at least, for several threads to have some
_FIRST_CACHE, _SECOND_CACHE = 16 << 10, 512 << 10  # bytes for rows that are worked on
_PAIR = 32  # columns that are worked on at once
_FEW_ROWS = 48  # up to so many, a float32 rounding of one term shows in the weight gradients


def prepare_backward(problem: Problem) -> SteppedKernel:
    """The kernel of ``layer_norm_backward``."""
    operands = Operands(problem)
    columns = math.prod(problem.attributes["normalized_shape"])
    rows = problem.views["input"].numel // columns if columns else 0
    aliased = _separate_outputs(operands, "grad_input", ("grad_out", "input"))
    data = ["grad_out", "input", *(["grad_input"] if "grad_input" in operands else [])]
    axes = _Rows(operands, data)
    staged = aliased or any(stride != 1 for stride in axes.column_strides.values())
    blocks, block_rows = _split_rows(rows, columns, axes.itemsize)
    wide = not staged and (columns > 2 * SEGMENT or (blocks == 1 and columns > SEGMENT))
    slots = pool.slots()
    padded = -(-columns // _PAIR) * _PAIR
    together = GROUP if wide else _together(columns, axes.itemsize)
    sums_size = 8 * (STRETCH if together == GROUP else padded)
    scratch = SUMS + sums_size + (3 * STAGED_ROWS * _lines(columns * axes.itemsize) if staged else 0)

    desc = np.zeros(backward.DESC_SIZE, np.int64)
    places: list[tuple[int, Place]] = []
    axes.describe(
        desc, places, {"grad_out": backward.GRAD_OUT, "input": backward.INPUT, "grad_input": backward.GRAD_INPUT}
    )
    desc[backward.OUTER_SHAPE : backward.OUTER_SHAPE + OUTER_RANK] = axes.outer
    desc[[backward.ROWS, backward.COLUMNS, backward.SLOTS]] = rows, columns, slots
    desc[[backward.BLOCKS, backward.BLOCK_ROWS, backward.WIDE, backward.STAGED]] = blocks, block_rows, wide, staged
    desc[[backward.TOGETHER, backward.SUMS_SIZE]] = together, sums_size
    wanted = ("grad_input", "grad_weight", "grad_bias")
    desc[[backward.WANT_INPUT, backward.WANT_WEIGHT, backward.WANT_BIAS]] = [name in operands for name in wanted]
    desc[backward.EXACT_SUMS] = rows <= _FEW_ROWS
    desc[backward.STREAM] = not staged and axes.can_stream("grad_input")
    for name, position in (("mean", backward.MEAN), ("rstd", backward.RSTD)):
        desc[backward.STATISTICS_CODE] = _contiguous(operands, name)
        places.append((position, operands.place(name)))
    if "weight" in operands:
        desc[[backward.WEIGHT_STRIDE, backward.WEIGHT_CODE]] = _vector(operands, "weight")
        places.append((backward.WEIGHT, operands.place("weight")))
    for name, position in (("grad_weight", backward.GRAD_WEIGHT), ("grad_bias", backward.GRAD_BIAS)):
        if name in operands:
            _separate_outputs(operands, name)
            desc[[position + 1, backward.GRAD_CODE]] = _vector(operands, name)
            places.append((position, operands.place(name)))
    take = operands.workspace.take
    places += [
        (backward.ORDERED_WEIGHT, take(padded * 4)),
        (backward.PARTIALS, take((1 if wide else blocks) * padded * 16)),
        (backward.ROW_SUMS, take(rows * -(-columns // SEGMENT) * 16 if wide else 0)),
        (backward.SCRATCH, take(slots * scratch)),
    ]
    desc[backward.SCRATCH_SIZE] = scratch
    tags = (TAGS[problem.views["input"].dtype],)
    return operands.kernel(Step(_BACKWARD, desc, tuple(places), tags, pool.shared(rows * columns)))


def prepare_forward(problem: Problem) -> SteppedKernel:
    """The kernel of ``layer_norm``."""
    operands = Operands(problem)
    columns = math.prod(problem.attributes["normalized_shape"])
    rows = math.prod(problem.views["input"].shape[: -len(problem.attributes["normalized_shape"])])
    aliased = _separate_outputs(operands, "output", ("input",))
    axes = _Rows(operands, ["input", "output"])
    staged = aliased or any(stride != 1 for stride in axes.column_strides.values())
    slots = pool.slots()
    padded = -(-columns // _PAIR) * _PAIR
    scratch = 2 * STAGED_ROWS * _lines(columns * axes.itemsize) if staged else 64
    block_rows = max(1, min(rows, -(-32768 // max(columns, 1))))

    desc = np.zeros(forward.DESC_SIZE, np.int64)
    places: list[tuple[int, Place]] = []
    axes.describe(desc, places, {"input": forward.INPUT, "output": forward.OUTPUT})
    desc[forward.OUTER_SHAPE : forward.OUTER_SHAPE + OUTER_RANK] = axes.outer
    desc[[forward.ROWS, forward.COLUMNS, forward.SLOTS, forward.STAGED]] = rows, columns, slots, staged
    desc[[forward.BLOCKS, forward.BLOCK_ROWS, forward.PITCH]] = -(-rows // block_rows), block_rows, padded
    desc[forward.EPS_BITS] = np.float64(problem.attributes["eps"]).view(np.int64)
    desc[forward.STREAM] = not staged and axes.is_large("output")
    for name, position, code in (
        ("mean", forward.MEAN, forward.MEAN_CODE),
        ("rstd", forward.RSTD, forward.RSTD_CODE),
    ):
        if name in operands:
            _separate_outputs(operands, name)
            desc[code] = _contiguous(operands, name)
            places.append((position, operands.place(name)))
    for name, position, stride in (
        ("weight", forward.WEIGHT, forward.WEIGHT_STRIDE),
        ("bias", forward.BIAS, forward.BIAS_STRIDE),
    ):
        if name in operands:
            desc[[stride, forward.VECTORS_CODE]] = _vector(operands, name)
            places.append((position, operands.place(name)))
    take = operands.workspace.take
    places += [
        (forward.ORDERED_WEIGHT, take((padded + _PAIR) * 4)),
        (forward.ORDERED_BIAS, take((padded + _PAIR) * 4)),
        (forward.SCRATCH, take(slots * scratch)),
    ]
    desc[forward.SCRATCH_SIZE] = scratch
    tags = (TAGS[problem.views["input"].dtype],)
    return operands.kernel(Step(_FORWARD, desc, tuple(places), tags, pool.shared(rows * columns)))


def _lines(nbytes: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-nbytes // 64) * 64


def _split_rows(rows: int, columns: int, itemsize: int) -> tuple[int, int]:
    """Blocks of rows with partial weight gradients of their own, and rows per block: by shape alone.

    A block costs 32 bytes a column, here at most about 4 % of the traffic.
    """
    size, affordable = rows * columns, int(0.004 * rows * itemsize)
    # A power of two of them, that two or four threads share evenly, from the size on from which two are faster.
    fewest = min(8, rows // (2 * TILE), 1 << (size // _FEWEST).bit_length() >> 1) if size >= pool.LENT_FROM else 1
    blocks = max(1, min(64, affordable, size // _BLOCK), fewest)
    tiles = -(-rows // (blocks * TILE))
    block_rows = max(1, tiles) * TILE
    return -(-rows // block_rows), block_rows


def _together(columns: int, itemsize: int) -> int:
    """How many rows of two tensors a cache holds: the first-level one, or the second beside the rows that come next."""
    row_bytes = max(2 * columns * itemsize, 1)
    in_first = _FIRST_CACHE // row_bytes
    rows = in_first if 2 * in_first >= TILE else _SECOND_CACHE // row_bytes
    return next((size for size in (GROUP, GROUP // 2) if size <= rows), TILE)


def _separate_outputs(operands: Operands, output: str, in_place: tuple[str, ...] = ()) -> bool:
    """Give an output that shares memory with inputs a copy of its own; True where it may lie on inputs as they are."""
    if output not in operands:
        return False
    sharing = operands.sharing(output)
    if all(name in in_place and operands.lies_on(output, name) for name in sharing):
        return bool(sharing)
    operands.copied(output)
    return False


def _vector(operands: Operands, name: str) -> tuple[int, int]:
    """Stride and dtype code of a small tensor that is walked through with one stride."""

    def single_stride(view: View) -> int | None:
        axes = collapsed(view.shape, view.strides)
        return None if len(axes) > 1 else axes[0][1] if axes else 1

    return operands.laid_out(name, single_stride), CODES[operands.view(name).dtype]


def _contiguous(operands: Operands, name: str) -> int:
    """The dtype code of a small tensor, made contiguous."""
    if not is_contiguous(operands.laid(name)):
        operands.copied(name)
    return CODES[operands.view(name).dtype]


class _Rows:
    """Tensors of one shape as rows: outer axes that they share, and a stride along the row for each."""

    def __init__(self, operands: Operands, names: list[str]) -> None:
        self._operands = operands
        self._inner = len(operands.problem.attributes["normalized_shape"])
        self.itemsize = operands.view("input").dtype.itemsize
        self.column_strides: dict[str, int] = {name: operands.laid_out(name, self._column_stride) for name in names}
        sizes, strides = self._outer(names)
        if len(sizes) > OUTER_RANK:  # rows scattered beyond what a kernel follows
            for name in names:
                if not is_contiguous(operands.laid(name)):
                    operands.copied(name)
                    self.column_strides[name] = 1
            sizes, strides = self._outer(names)
        missing = OUTER_RANK - len(sizes)
        self.outer: Shape = (*[1] * missing, *sizes)
        self._strides = {name: (*[0] * missing, *own) for name, own in zip(names, strides, strict=True)}

    def _column_stride(self, view: View) -> int | None:
        axes = collapsed(view.shape[view.rank - self._inner :], view.strides[view.rank - self._inner :])
        return None if len(axes) > 1 else axes[0][1] if axes else 1

    def _outer(self, names: list[str]) -> tuple[list[int], list[list[int]]]:
        views = [self._operands.laid(name) for name in names]
        outer = views[0].rank - self._inner
        if views[0].numel == 0:  # rows without columns lie nowhere
            return [math.prod(views[0].shape[:outer])], [[0] for _ in names]
        return collapsed_together(views[0].shape[:outer], [view.strides[:outer] for view in views])

    def is_large(self, name: str) -> bool:
        """Whether a result is large enough to go past the caches."""
        if name not in self._strides:
            return False
        nbytes, read = self._operands.view(name).numel * self.itemsize, len(self._strides) - 1
        return goes_past_caches(nbytes, read)

    def can_stream(self, name: str) -> bool:
        """Whether a result is large, and its rows can be aligned to cache lines."""
        if not self.is_large(name):
            return False
        return all(stride * self.itemsize % 64 == 0 for stride in self._strides[name])

    def describe(self, desc: np.ndarray, places: list[tuple[int, Place]], positions: dict[str, int]) -> None:
        """Fill in column strides in elements and outer strides in bytes, and note where the addresses go."""
        for name, strides in self._strides.items():
            position = positions[name]
            desc[position + 1] = self.column_strides[name]
            desc[position + 2 : position + 2 + OUTER_RANK] = [stride * self.itemsize for stride in strides]
            places.append((position, self._operands.place(name)))
