"""The launches of LayerNorm: the backend calls ``backward`` and ``forward``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.plan import Problem
from normgrad.contract.view import Shape
from normgrad.cuda.chip import VECTOR_BYTES, Chip, cdiv
from normgrad.cuda.cta_groups import CtaGroups
from normgrad.cuda.device.pack16 import UNPACKED
from normgrad.cuda.launch import Argument, float64_bits
from normgrad.cuda.layer_norm import tiles
from normgrad.cuda.layer_norm.kernels import layer_norm_backward, layer_norm_forward
from normgrad.cuda.operands import Operand, merge_rows, pack_operands, pack_vector, row_vector, strides_in_vectors
from normgrad.cuda.steps import Steps, backward_steps

# Up to this many rows or columns, the weight gradients of float32 data are summed in float64: one float32 rounding
# would be a visible share of the error bound.
_FEW_ROWS = 64
_FEW_COLUMNS = tiles.NARROW.columns
# Where weight gradients are wanted, few rows are shared by half of the multiprocessors: the second-stage reduction then
# has fewer partial sums (128×768 in float32 on an H200: 8.0 µs, and 10.0 with a CTA for every row).
_FEW_ROWS_SHARE = 2
# Below this eps the variance is computed in float64: float32 squares that underflow to 0 would make rstd infinite.
_SMALL_EPS = 2.0**-90


def _row_shape(problem: Problem) -> Shape:
    """Return the sizes of the outer dimensions of the data, and N."""
    shape, normalized = problem.views["input"].shape, problem.attributes["normalized_shape"]
    return (*shape[: len(shape) - len(normalized)], math.prod(normalized))


def _needs_offset64(tile: tiles.RowTile, row_grid: Shape, operands: Sequence[Operand]) -> bool:
    """Return whether offsets within a tile, or row indices, need 64 bits."""
    extent = max(tile.columns * abs(operand.strides[-1]) for operand in operands)
    if len(row_grid) == 1:
        extent += max(tile.rows * abs(operand.strides[0]) for operand in operands)
    else:
        extent = max(extent, 2 * math.prod(row_grid))
    return extent >= 2**31


def backward(problem: Problem, chip: Chip) -> Steps:
    """Plan LayerNorm backward: one launch over the rows, one that adds up the CTA groups' weight gradients."""
    shape = _row_shape(problem)
    M, N = math.prod(shape[:-1]), shape[-1]
    steps, outputs, has_work = backward_steps(problem, N)
    if not has_work:
        return steps
    operands = [
        steps.strided_input("grad_out", shape, contiguous_columns=True),
        steps.strided_input("input", shape, contiguous_columns=True),
        steps.output("grad_input", shape, contiguous_columns=True),
    ]
    row_grid, operands = merge_rows(shape, operands)
    packing, operands = pack_operands(operands, N)
    tile = tiles.row_tile(N, steps.itemsize, chip, packing == UNPACKED.value)
    share = _FEW_ROWS_SHARE if outputs else 1
    tile = tiles.with_fewer_rows(tile, M, VECTOR_BYTES // steps.itemsize, chip, share)
    cta_groups = CtaGroups.of(tile.parts if steps.wants("grad_input") else 1, cdiv(M, tile.rows), tile, chip)
    weight_float64 = steps.dtype == FLOAT32 and (M <= _FEW_ROWS or N <= _FEW_COLUMNS)
    partial = steps.partial_sums(len(outputs), cta_groups.count, N, weight_float64)
    vector = row_vector(N, packing, operands)
    parameters = [steps.contiguous_input(name) for name in ("mean", "rstd", "weight")]
    mailbox = cta_groups.mailbox(steps, 2 * M if tile.float64 else M)
    grad_out, x, grad_input = (operand.pointer for operand in operands)
    tensors = [grad_out, x, *parameters, grad_input, partial, mailbox]
    arguments = [*tensors, M, N, cta_groups.count, row_grid, *strides_in_vectors(operands, vector)]
    tile = replace(tile, cluster=cta_groups.cluster)
    constants = {
        "TILE": tiles.RowTileSpec.of(tile, N, vector, packing, _needs_offset64(tile, row_grid, operands)),
        "FLOAT64": tile.float64,
        "WEIGHT_FLOAT64": weight_float64,
        "WANT": steps.wanted_gradients,
    }
    cta_groups.add_launches(steps, layer_norm_backward, arguments, constants)
    if outputs:
        steps.sum_partials(partial, cta_groups.count, N, outputs)
    return steps


def forward(problem: Problem, chip: Chip) -> Steps:
    """Plan LayerNorm forward: one launch over the rows."""
    shape = _row_shape(problem)
    M, N = math.prod(shape[:-1]), shape[-1]
    steps = Steps(problem, ["output", "mean", "rstd"])
    if M == 0:
        return steps
    operands = [
        steps.strided_input("input", shape, contiguous_columns=True),
        steps.output("output", shape, contiguous_columns=True),
    ]
    row_grid, operands = merge_rows(shape, operands)
    tile = tiles.forward_row_tile(max(N, 1), steps.itemsize, chip)
    segments = tiles.forward_segments(tile, steps.itemsize)
    if segments == 1:
        tile = tiles.with_fewer_rows(tile, M, VECTOR_BYTES // steps.itemsize, chip)
    cta_groups = CtaGroups.of(tile.parts, cdiv(M, tile.rows), tile, chip)
    packing, operands = pack_operands(operands, N)
    vector = row_vector(N, packing, operands)
    # Packed where weight and bias share the registers with a tile whose results are still to be written.
    parameter_packing = packing if tile.parts > 1 and not tile.cluster else UNPACKED.value
    parameters = [pack_vector(steps.contiguous_input(name), parameter_packing) for name in ("weight", "bias")]
    mean, rstd = steps.output("mean", (M,)), steps.output("rstd", (M,))
    x, output = operands
    mailbox = cta_groups.mailbox(steps, 2 * M)
    tensors = [x.pointer, *parameters, output.pointer, mean.pointer, rstd.pointer, mailbox]
    sizes: list[Argument] = [M, N, float64_bits(problem.attributes["eps"]), cta_groups.count, row_grid]
    arguments = [*tensors, *sizes, *strides_in_vectors(operands, vector), *mean.strides, *rstd.strides]
    constants = {
        "TILE": tiles.RowTileSpec.of(tile, N, vector, packing, _needs_offset64(tile, row_grid, operands)),
        "SEGMENTS": segments,
        "FLOAT64": problem.attributes["eps"] < _SMALL_EPS,
    }
    cta_groups.add_launches(steps, layer_norm_forward, arguments, constants)
    return steps
