"""The launches of LayerNorm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.plan import Problem
from normgrad.cuda.configurations import NARROW, Chip, RowTile, blocks, forward_row_tile, power_of_two, row_tile
from normgrad.cuda.kernels import layer_norm as kernels
from normgrad.cuda.kernels.common import SINGLE
from normgrad.cuda.launch import FLOAT64, float64_bits
from normgrad.cuda.problem import Operand, Steps, paired, paired_vector
from normgrad.cuda.teams import Slots, Teams, assemble

# Rows, or columns, of which float32 weight gradients are summed up without a rounding.
_FEW_ROWS = 64
_FEW_COLUMNS = NARROW.columns


def _sizes(problem: Problem) -> tuple[int, int]:
    N = math.prod(problem.attributes["normalized_shape"])
    shape = problem.views["input"].shape
    return math.prod(shape[: len(shape) - len(problem.attributes["normalized_shape"])]), N


def _constants(tile: RowTile, N: int, operands: Sequence[Operand]) -> dict[str, Any]:
    reach = max(tile.rows * abs(row) + tile.columns * abs(column) for row, column in (op.strides for op in operands))
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "PARTS": tile.parts,
        "PADDED_PARTS": power_of_two(tile.parts),
        "MASKED": tile.columns * tile.parts != N,
        "WIDE": reach >= 2**31,
    }


def backward(problem: Problem, chip: Chip) -> Steps:
    """Gradients of LayerNorm: one launch for rows, one for the sums over the teams."""
    M, N = _sizes(problem)
    wanted = [name for name in ("grad_weight", "grad_bias") if name in problem.views]
    steps = Steps(problem, ["grad_input"])
    outputs = [steps.output(name, (N,)) for name in wanted]
    tile = row_tile(max(N, 1), problem.views["input"].dtype.itemsize, chip)
    want_input = "grad_input" in problem.views
    teams = Teams.of(tile.parts if want_input else 1, blocks(M, tile.rows), tile, chip)
    few = steps.itemsize == 4 and (M <= _FEW_ROWS or N <= _FEW_COLUMNS)
    partial = steps.scratch(max(len(wanted) * teams.count * N, 1), FLOAT64 if few else FLOAT32)
    if M * N and (want_input or wanted):
        operands = [steps.data("grad_out", (M, N)), steps.data("input", (M, N)), steps.output("grad_input", (M, N))]
        pairs, (grad_out, x, grad_input) = paired(operands, N)
        vectors = [steps.vector(name) for name in ("mean", "rstd", "weight")]
        slots = Slots.of(steps, teams, M)
        tensors = [grad_out.pointer, x.pointer, *vectors, grad_input.pointer, partial, slots.memory]
        assemble(
            steps,
            teams,
            slots,
            kernels.layer_norm_backward,
            tile,
            [*tensors, M, N, teams.count, *grad_out.strides, *x.strides, *grad_input.strides],
            {
                **_constants(tile, N, [grad_out, x, grad_input]),
                "PREFETCH": tile.prefetch,
                "STAGES": tile.stages,
                "LATER": tile.later,
                "PAIRS": pairs,
                "EXACT": tile.exact,
                "FEW": few,
                "WANT_INPUT": want_input,
                "WANT_WEIGHT": "grad_weight" in wanted,
                "WANT_BIAS": "grad_bias" in wanted,
            },
        )
    if wanted and N:
        steps.sum_columns(partial, teams.count if M else 0, N, outputs)
    return steps


def forward(problem: Problem, chip: Chip) -> Steps:
    """LayerNorm and its statistics."""
    M, N = _sizes(problem)
    steps = Steps(problem, ["output", "mean", "rstd"])
    if M == 0:
        return steps
    tile = forward_row_tile(max(N, 1), problem.views["input"].dtype.itemsize, chip)
    teams = Teams.of(tile.parts, blocks(M, tile.rows), tile, chip)
    slots = Slots.of(steps, teams, 2 * M)
    pairs, (x, output) = paired([steps.data("input", (M, N)), steps.output("output", (M, N))], N)
    # In pairs where they share the registers with rows that are still to be written.
    kept_as = pairs if tile.parts > 1 else SINGLE.value
    vectors = [paired_vector(steps.vector(name), kept_as) for name in ("weight", "bias")]
    mean, rstd = steps.output("mean", (M,)), steps.output("rstd", (M,))
    tensors = [x.pointer, *vectors, output.pointer, mean.pointer, rstd.pointer, slots.memory]
    counts = M, N, float64_bits(problem.attributes["eps"]), teams.count
    assemble(
        steps,
        teams,
        slots,
        kernels.layer_norm_forward,
        tile,
        [*tensors, *counts, *x.strides, *output.strides, *mean.strides, *rstd.strides],
        _constants(tile, N, [x, output]) | {"STAGES": tile.stages, "PAIRS": pairs},
    )
    return steps
