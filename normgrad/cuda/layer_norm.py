"""The launches of LayerNorm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from normgrad.contract.dtypes import FLOAT32, INT32
from normgrad.contract.overlap import overlap
from normgrad.contract.plan import Problem
from normgrad.cuda.configurations import NARROW, Chip, RowTile, blocks, forward_row_tile, power_of_two, row_tile
from normgrad.cuda.kernels.common import SINGLE
from normgrad.cuda.kernels.layer_norm import layer_norm_backward
from normgrad.cuda.kernels.layer_norm_finish import layer_norm_finish
from normgrad.cuda.kernels.layer_norm_forward import layer_norm_forward
from normgrad.cuda.launch import FLOAT64, Argument, Options, Step, float64_bits
from normgrad.cuda.problem import Operand, Steps, paired, paired_vector, sums_tile
from normgrad.cuda.teams import Slots, Teams, assemble

# Rows, or columns, of which float32 weight gradients are summed up without a rounding.
_FEW_ROWS = 64
_FEW_COLUMNS = NARROW.columns
# Beside a smaller one the squares that float32 rounds as subnormals count.
_SMALL_EPS = 2.0**-90


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


def _read_again(problem: Problem, outputs: Sequence[str]) -> bool:
    """Whether the data is still there once these outputs have been written."""
    data = [problem.views[name] for name in ("grad_out", "input")]
    return not any(overlap(problem.views[name], view) for name in outputs if name in problem.views for view in data)


def _finish(
    tensors: Sequence[Argument],
    sizes: Sequence[int],
    outputs: Sequence[Operand],
    tile: RowTile,
    chip: Chip,
    rounded: bool,
) -> Step:
    """The sums over the teams, and what is near zero once more."""
    teams, _, N, *_ = sizes
    width, height = sums_tile(teams, N)
    grid = (blocks(N, width) if outputs else chip.multiprocessors, max(len(outputs), 1), 1)
    first, second = (*outputs, *2 * [Operand(None, (1,))])[:2]
    constants = {
        "ROWS": height,
        "COLUMNS": width,
        "TILE_ROWS": tile.rows,
        "FLAGS": power_of_two(blocks(teams, grid[0] * grid[1])),
        "ROUNDED": rounded,
    }
    arguments = [first.pointer, second.pointer, *tensors, *first.strides, *second.strides, *sizes]
    return Step(layer_norm_finish, grid, arguments, constants, Options(warps=8, resident=4, follows=True))


def backward(problem: Problem, chip: Chip) -> Steps:
    """Gradients of LayerNorm: one launch for rows, one for the sums over the teams and what is near zero."""
    M, N = _sizes(problem)
    wanted = [name for name in ("grad_weight", "grad_bias") if name in problem.views]
    steps = Steps(problem, ["grad_input", *wanted])
    outputs = [steps.output(name, (N,)) for name in wanted]
    tile = row_tile(max(N, 1), problem.views["input"].dtype.itemsize, chip)
    want_input = "grad_input" in problem.views
    teams = Teams.of(tile.parts if want_input else 1, blocks(M, tile.rows), tile, chip)
    few = steps.itemsize == 4 and (M <= _FEW_ROWS or N <= _FEW_COLUMNS)
    partial = steps.scratch(max(len(wanted) * teams.count * N, 1), FLOAT64 if few else FLOAT32)
    if M * N == 0:
        if wanted and N:
            steps.sum_columns(partial, 0, N, outputs)
    elif want_input or wanted:
        operands = [steps.data("grad_out", (M, N)), steps.data("input", (M, N)), steps.output("grad_input", (M, N))]
        pairs, (grad_out, x, grad_input) = paired(operands, N)
        vectors = [steps.vector(name) for name in ("mean", "rstd", "weight")]
        slots = Slots.of(steps, teams, M)
        unshared = _read_again(problem, [*wanted, "grad_input"])
        rounds = steps.itemsize == 4 and want_input and not tile.exact
        doubtful = steps.scratch(teams.count, INT32) if rounds and unshared else None
        tensors = [grad_out.pointer, x.pointer, *vectors, grad_input.pointer, partial, doubtful, slots.memory]
        assemble(
            steps,
            teams,
            slots,
            layer_norm_backward,
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
        narrow = "grad_weight" not in wanted or problem.views["grad_weight"].dtype != FLOAT32
        if doubtful is None and (narrow or few or not unshared):
            if wanted:
                steps.sum_columns(partial, teams.count, N, outputs)
        else:
            pointers = [operand.pointer for operand in operands]
            tensors = [partial, *pointers[:2], *vectors, pointers[2], doubtful]
            sizes = [teams.count, M, N, *(stride for operand in operands for stride in operand.strides)]
            steps.add(_finish(tensors, sizes, outputs, tile, chip, not (narrow or few)))
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
        layer_norm_forward,
        tile,
        [*tensors, *counts, *x.strides, *output.strides, *mean.strides, *rstd.strides],
        _constants(tile, N, [x, output])
        | {
            "STAGES": tile.stages,
            "PAIRS": pairs,
            "EXACT": problem.attributes["eps"] < _SMALL_EPS,
        },
    )
    return steps
