"""The launches of LayerNorm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.plan import Problem
from normgrad.contract.view import Shape
from normgrad.cuda.chip import VECTOR_ACCESS, Chip, blocks, power_of_two
from normgrad.cuda.cta_groups import Slots, Teams, assemble
from normgrad.cuda.device.common import SINGLE
from normgrad.cuda.launch import FLOAT64, float64_bits
from normgrad.cuda.layer_norm.backward_kernel import layer_norm_backward
from normgrad.cuda.layer_norm.forward_kernel import layer_norm_forward
from normgrad.cuda.layer_norm.tiles import NARROW, RowTile, forward_row_tile, row_tile, with_few_rows
from normgrad.cuda.operands import are_apart, fold_apart, fold_of, in_vectors, merged_rows, row_vector
from normgrad.cuda.steps import Operand, Steps, paired, paired_vector

# Rows, or columns, of which float32 weight gradients are summed up without a rounding.
_FEW_ROWS = 64
_FEW_COLUMNS = NARROW.columns
# Below this eps the variance is computed in float64: float32 squares that underflow to 0 would make rstd infinite.
_SMALL_EPS = 2.0**-90


def _sizes(problem: Problem) -> tuple[int, int]:
    N = math.prod(problem.attributes["normalized_shape"])
    shape = problem.views["input"].shape
    return math.prod(shape[: len(shape) - len(problem.attributes["normalized_shape"])]), N


def _rows(problem: Problem) -> Shape:
    """The sizes of a tensor's outer dimensions, and the number of columns."""
    outer = problem.views["input"].rank - len(problem.attributes["normalized_shape"])
    return (*problem.views["input"].shape[:outer], _sizes(problem)[1])


def _constants(tile: RowTile, grid: Shape, N: int, vector: int, operands: Sequence[Operand]) -> dict[str, Any]:
    """Compile-time constants of both passes. WIDE: offsets within a tile, or row indices, need 64 bits."""
    reach = max(tile.columns * abs(operand.strides[-1]) for operand in operands)
    if len(grid) == 1:
        reach += max(tile.rows * abs(operand.strides[0]) for operand in operands)
    else:
        reach = max(reach, 2 * math.prod(grid))
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "VECTOR": vector,
        "PARTS": tile.parts,
        "PADDED_PARTS": power_of_two(tile.parts),
        "MASKED": tile.columns * tile.parts != N,
        "WIDE": reach >= 2**31,
    }


def backward(problem: Problem, chip: Chip) -> Steps:
    """Gradients of LayerNorm: one launch for rows, one for the weight sums over the teams."""
    M, N = _sizes(problem)
    wanted = [name for name in ("grad_weight", "grad_bias") if name in problem.views]
    steps = Steps(problem, ["grad_input", *wanted])
    outputs = [steps.output(name, (N,)) for name in wanted]
    if M * N == 0:
        if wanted and N:
            steps.sum_columns(steps.scratch(1, FLOAT32), 0, N, outputs)
    elif wanted or "grad_input" in problem.views:
        _gradients(problem, chip, steps, wanted, outputs)
    return steps


def _gradients(problem: Problem, chip: Chip, steps: Steps, wanted: Sequence[str], outputs: Sequence[Operand]) -> None:
    M, N = _sizes(problem)
    dtype = problem.views["input"].dtype
    want_input = "grad_input" in problem.views
    sizes = _rows(problem)
    operands = [steps.data("grad_out", sizes), steps.data("input", sizes), steps.output("grad_input", sizes)]
    grid, operands = merged_rows(sizes, operands)
    pairs, data = paired(operands, N)
    apart = are_apart(data)
    if apart:  # a cluster's warps exchange sums of columns that are contiguous
        chip = replace(chip, clusters=None)
    tile = row_tile(N, dtype.itemsize, chip, pairs == SINGLE.value)
    if not apart:
        tile = with_few_rows(tile, M, VECTOR_ACCESS // dtype.itemsize, chip)
    teams = Teams.of(tile.parts if want_input else 1, blocks(M, tile.rows), tile, chip)
    few = dtype == FLOAT32 and (M <= _FEW_ROWS or N <= _FEW_COLUMNS)
    partial = steps.scratch(max(len(wanted) * teams.count * N, 1), FLOAT64 if few else FLOAT32)
    vector = row_vector(N, pairs, data)
    vectors = [steps.vector(name) for name in ("mean", "rstd", "weight")]
    slots = Slots.of(steps, teams, 2 * M if tile.exact else M)
    grad_out, x, grad_input = (operand.pointer for operand in data)
    tensors = [grad_out, x, *vectors, grad_input, partial, slots.memory]
    assemble(
        steps,
        teams,
        slots,
        layer_norm_backward,
        tile,
        [*tensors, M, N, teams.count, grid, *in_vectors(data, vector)],
        {
            **_constants(tile, grid, N, vector, data),
            "PREFETCH": tile.prefetch,
            "STAGES": tile.stages,
            "FOLD": fold_apart(tile) if are_apart(data[:2]) else 1,
            "CLUSTER": teams.cluster,
            "WARPS": tile.warps,
            "PAIRS": pairs,
            "EXACT": tile.exact,
            "FEW": few,
            "WANT_INPUT": want_input,
            "WANT_WEIGHT": "grad_weight" in wanted,
            "WANT_BIAS": "grad_bias" in wanted,
        },
    )
    if wanted:
        steps.sum_columns(partial, teams.count, N, outputs)


def forward(problem: Problem, chip: Chip) -> Steps:
    """LayerNorm and its statistics."""
    M, N = _sizes(problem)
    steps = Steps(problem, ["output", "mean", "rstd"])
    if M == 0:
        return steps
    sizes = _rows(problem)
    grid, operands = merged_rows(sizes, [steps.data("input", sizes), steps.output("output", sizes)])
    itemsize, apart = problem.views["input"].dtype.itemsize, are_apart(operands)
    tile = forward_row_tile(max(N, 1), itemsize, replace(chip, clusters=None) if apart else chip)
    fold = fold_of(tile, itemsize)
    if fold == 1 and not apart:
        tile = with_few_rows(tile, M, VECTOR_ACCESS // itemsize, chip)
    teams = Teams.of(tile.parts, blocks(M, tile.rows), tile, chip)
    slots = Slots.of(steps, teams, 2 * M)
    pairs, data = paired(operands, N)
    vector = row_vector(N, pairs, data)
    # In pairs where they share the registers with rows that are still to be written.
    kept_as = pairs if tile.parts > 1 and not teams.cluster else SINGLE.value
    vectors = [paired_vector(steps.vector(name), kept_as) for name in ("weight", "bias")]
    mean, rstd = steps.output("mean", (M,)), steps.output("rstd", (M,))
    tensors = [data[0].pointer, *vectors, data[1].pointer, mean.pointer, rstd.pointer, slots.memory]
    counts = M, N, float64_bits(problem.attributes["eps"]), teams.count
    assemble(
        steps,
        teams,
        slots,
        layer_norm_forward,
        tile,
        [*tensors, *counts, grid, *in_vectors(data, vector), *mean.strides, *rstd.strides],
        _constants(tile, grid, N, vector, data)
        | {
            "PREFETCH": tile.prefetch,
            "STAGES": tile.stages,
            "CLUSTER": teams.cluster,
            "FOLD": fold,
            "PAIRS": pairs,
            "EXACT": problem.attributes["eps"] < _SMALL_EPS,
        },
    )
    return steps
