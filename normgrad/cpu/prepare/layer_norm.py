"""LayerNorm on the CPU: from a problem to a kernel and its descriptor."""

from __future__ import annotations

import math

from normgrad.contract.plan import Problem
from normgrad.contract.view import Shape, merge_axes
from normgrad.cpu import limits
from normgrad.cpu.compile.kernel_lookup import Kernel
from normgrad.cpu.descriptors import GROUP_SUMS, LayerNormBackward, LayerNormForward, RowAxes, RowTensor
from normgrad.cpu.prepare.launch import Step, SteppedKernel
from normgrad.cpu.prepare.staging import Operands, is_large, padded, single_stride, strides_of_copy
from normgrad.cpu.tags import TAGS
from normgrad.cpu.threads import pool

_BACKWARD = Kernel("normgrad.cpu.kernels.layer_norm.backward", "layer_norm_backward")
_FORWARD = Kernel("normgrad.cpu.kernels.layer_norm.forward", "layer_norm")
_OUTER_RANK = 3  # axes of rows that a kernel follows: those of RowAxes


def prepare_backward(problem: Problem) -> SteppedKernel:
    """Prepare ``layer_norm_backward``."""
    operands = Operands(problem)
    columns = math.prod(problem.attributes["normalized_shape"])
    rows = problem.views["input"].numel // columns if columns else 0
    in_place = operands.separate("grad_input", ("grad_out", "input"))
    layout = _RowLayout(operands, "grad_out", "input", *(["grad_input"] if "grad_input" in operands else []))
    pitch = _staged_pitch(columns, layout) if in_place or layout.has_column_strides else 0
    blocks, block_rows = _split_rows(rows, columns, layout.itemsize)
    splits_columns = not pitch and (columns > 2 * limits.SEGMENT or (blocks == 1 and columns > limits.SEGMENT))
    lanes = padded(columns)
    cached_rows = limits.GROUP if splits_columns else _cached_rows(columns, layout.itemsize)

    desc = LayerNormBackward(rows, columns, blocks, block_rows, splits_columns, pitch)
    desc.is_large = not pitch and layout.is_large("grad_input")
    desc.wants_input, desc.wants_weight, desc.wants_bias = (
        name in operands for name in ("grad_input", "grad_weight", "grad_bias")
    )
    desc.float64_terms, desc.cached_rows = rows <= limits.FLOAT64_ROWS, cached_rows
    desc.group_sums_size = 8 * (limits.STRIP if cached_rows == limits.GROUP else lanes)
    desc.row_axes, desc.grad_out, desc.input = layout.axes, layout.tensor("grad_out"), layout.tensor("input")
    desc.grad_input = layout.tensor("grad_input")
    desc.mean, desc.rstd = operands.vector("mean"), operands.vector("rstd")
    operands.separate("grad_weight")
    operands.separate("grad_bias")
    desc.weight = operands.vector("weight")
    desc.grad_weight, desc.grad_bias = operands.vector("grad_weight"), operands.vector("grad_bias")
    take = operands.workspace.take
    desc.weight_lanes = take(lanes * 4)
    desc.partials = take((1 if splits_columns else max(1, blocks)) * lanes * 16)
    desc.row_sums = take(rows * -(-columns // limits.SEGMENT) * 16 if splits_columns else 0)
    desc.scratch_size = GROUP_SUMS + desc.group_sums_size + 3 * limits.STAGED_ROWS * pitch
    desc.slots = pool.slots()
    desc.scratch = take(desc.slots * desc.scratch_size)
    tag = TAGS[problem.views["input"].dtype]
    return operands.kernel(Step(_BACKWARD, desc, tag, shared=pool.shared(rows * columns)))


def prepare_forward(problem: Problem) -> SteppedKernel:
    """Prepare ``layer_norm``."""
    operands = Operands(problem)
    columns = math.prod(problem.attributes["normalized_shape"])
    rows = math.prod(problem.views["input"].shape[: -len(problem.attributes["normalized_shape"])])
    in_place = operands.separate("output", ("input",))
    layout = _RowLayout(operands, "input", "output")
    pitch = _staged_pitch(columns, layout) if in_place or layout.has_column_strides else 0
    block_rows = max(1, min(rows, -(-limits.FORWARD_BLOCK // max(columns, 1))))
    if pitch:
        block_rows = -(-block_rows // limits.STAGED_ROWS) * limits.STAGED_ROWS

    desc = LayerNormForward(rows, columns, padded(columns), -(-rows // block_rows), block_rows, pitch)
    desc.is_large = not pitch and layout.is_large("output")
    desc.row_axes, desc.input, desc.output = layout.axes, layout.tensor("input"), layout.tensor("output")
    operands.separate("mean")
    operands.separate("rstd")
    desc.mean, desc.rstd = operands.vector("mean"), operands.vector("rstd")
    desc.weight, desc.bias = operands.vector("weight"), operands.vector("bias")
    desc.eps = problem.attributes["eps"]
    take = operands.workspace.take
    lanes = padded(columns) + 32  # a pair from any column on can be loaded
    desc.weight_lanes, desc.bias_lanes = take(lanes * 4), take(lanes * 4)
    desc.slots = pool.slots()
    desc.scratch_size = 2 * limits.STAGED_ROWS * pitch
    desc.scratch = take(desc.slots * desc.scratch_size)
    return operands.kernel(Step(_FORWARD, desc, TAGS[problem.views["input"].dtype], shared=pool.shared(rows * columns)))


def _staged_pitch(columns: int, layout: _RowLayout) -> int:
    """Return the bytes between rows of contiguous copies: an odd number of cache lines, so that they share no sets."""
    return (-(-columns * layout.itemsize // 64) | 1) * 64


def _split_rows(rows: int, columns: int, itemsize: int) -> tuple[int, int]:
    """Choose blocks of rows with partial weight gradients of their own, and rows per block: by shape alone."""
    size, affordable = rows * columns, int(limits.BLOCKS_PER_ROW_BYTE * rows * itemsize)
    fewest = 1
    if size >= limits.LENT_FROM:  # a power of two of them, that two or four threads share evenly
        most = size // limits.SMALLEST_BLOCK
        fewest = min(limits.EVEN_BLOCKS, rows // (2 * limits.TILE), 1 << most.bit_length() >> 1)
    blocks = max(1, min(limits.MOST_BLOCKS, affordable, size // limits.BLOCK), fewest)
    tiles = -(-rows // (blocks * limits.TILE))
    block_rows = max(1, tiles) * limits.TILE
    return -(-rows // block_rows), block_rows


def _cached_rows(columns: int, itemsize: int) -> int:
    """Return how many rows of two tensors the L1 cache holds, or the L2 cache beside the rows that come next."""
    row_bytes = max(2 * columns * itemsize, 1)
    in_l1 = limits.L1_ROWS // row_bytes
    rows = in_l1 if 2 * in_l1 >= limits.TILE else limits.L2_ROWS // row_bytes
    return next((size for size in (limits.GROUP, limits.GROUP // 2) if size <= rows), limits.TILE)


class _RowLayout:
    """Tensors of one shape as rows: outer axes that they share, and a stride along the row for each."""

    def __init__(self, operands: Operands, *names: str) -> None:
        self._operands = operands
        self._inner = len(operands.problem.attributes["normalized_shape"])
        self.itemsize = operands.view("input").dtype.itemsize
        self._column_strides = {name: self._usable_column_stride(name) for name in names}
        sizes, strides = self._outer(names)
        if len(sizes) > _OUTER_RANK:  # rows along more axes than a kernel follows
            for name in names:
                view = operands.staged(name)
                if view.numel > 1 and single_stride(view.shape, view.strides) != 1:
                    operands.copy(name)
                    self._column_strides[name] = 1
            sizes, strides = self._outer(names)
        missing = _OUTER_RANK - len(sizes)
        self.axes = RowAxes(*[1] * missing, *sizes)
        self._strides = {name: (*[0] * missing, *own) for name, own in zip(names, strides, strict=True)}

    def _usable_column_stride(self, name: str) -> int:
        """Return a tensor's column stride, after a copy where it has none that kernels take."""
        view = self._operands.staged(name)
        outer = view.rank - self._inner
        shape, strides = view.shape[outer:], view.strides[outer:]
        stride = single_stride(shape, strides)
        # Rows so long are split where they are contiguous, and staged ones are not. Elements that repeat are few.
        if stride == 1 or (stride and math.prod(shape) <= 2 * limits.SEGMENT):
            return stride
        self._operands.copy(name, strides=strides_of_copy(view, range(view.rank), range(outer, view.rank)))
        return 1

    def _outer(self, names: tuple[str, ...]) -> tuple[Shape, list[Shape]]:
        views = [self._operands.staged(name) for name in names]
        outer = views[0].rank - self._inner
        if views[0].numel == 0:  # rows without columns have no address
            return (math.prod(views[0].shape[:outer]),), [(0,) for _ in names]
        return merge_axes(views[0].shape[:outer], [view.strides[:outer] for view in views])

    @property
    def has_column_strides(self) -> bool:
        """Whether the columns of some tensor are not contiguous."""
        return any(stride != 1 for stride in self._column_strides.values())

    def is_large(self, name: str) -> bool:
        """Return whether a result does not stay in the caches."""
        if name not in self._strides:
            return False
        nbytes, read = self._operands.view(name).numel * self.itemsize, len(self._strides) - 1
        return is_large(nbytes, read)

    def tensor(self, name: str) -> RowTensor:
        """Return the description of a tensor: the column stride in elements, the others in bytes."""
        if name not in self._strides:
            return RowTensor()
        strides = RowAxes(*[stride * self.itemsize for stride in self._strides[name]])
        return RowTensor(self._operands.pointer(name), self._column_strides[name], strides)
