"""The launches of LayerNorm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from normgrad.contract.dtypes import FLOAT16, FLOAT32, INT32
from normgrad.contract.overlap import overlap
from normgrad.contract.plan import Problem
from normgrad.cuda.configurations import VECTOR_ACCESS, Chip, blocks, power_of_two
from normgrad.cuda.kernels.common import SINGLE
from normgrad.cuda.kernels.layer_norm import layer_norm_backward
from normgrad.cuda.kernels.layer_norm_finish import layer_norm_finish
from normgrad.cuda.kernels.layer_norm_forward import layer_norm_forward
from normgrad.cuda.launch import FLOAT64, Argument, Given, Options, Step, float64_bits
from normgrad.cuda.problem import Operand, Steps, paired, paired_vector, sums_tile
from normgrad.cuda.row_tiles import NARROW, RowTile, forward_row_tile, row_tile, with_few_rows
from normgrad.cuda.rows import are_apart, fold_apart, fold_of, in_vectors, row_vector
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


def _constants(tile: RowTile, N: int, vector: int, operands: Sequence[Operand]) -> dict[str, Any]:
    reach = max(tile.rows * abs(row) + tile.columns * abs(column) for row, column in (op.strides for op in operands))
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "VECTOR": vector,
        "PARTS": tile.parts,
        "PADDED_PARTS": power_of_two(tile.parts),
        "MASKED": tile.columns * tile.parts != N,
        "WIDE": reach >= 2**31,
    }


def _in_place(problem: Problem, operands: Sequence[Operand], outputs: Sequence[str]) -> bool:
    """Whether outputs are written where these operands, which are the data as the kernels read it, lie."""
    data = [problem.views[operand.pointer.name] for operand in operands if isinstance(operand.pointer, Given)]
    return any(overlap(problem.views[name], view) for name in outputs if name in problem.views for view in data)


def _finish(
    tensors: Sequence[Argument],
    sizes: Sequence[Any],
    outputs: Sequence[Operand],
    tile: RowTile,
    teams: Teams,
    chip: Chip,
    rounded: bool,
) -> Step:
    """The sums over the teams, and what is near zero once more."""
    _, _, N, *_ = sizes
    width, height, warps = sums_tile(teams.count, N, max(len(outputs), 1))
    grid = (blocks(N, width) if outputs else chip.multiprocessors, max(len(outputs), 1), 1)
    first, second = (*outputs, *2 * [Operand(None, (1,))])[:2]
    constants = {
        "ROWS": height,
        "COLUMNS": width,
        "TILE_ROWS": tile.rows,
        "TEAMS": power_of_two(blocks(teams.count, grid[0] * grid[1])),
        "PARTS": teams.parts,
        "PADDED_PARTS": power_of_two(teams.parts),
        "ROUNDED": rounded,
    }
    arguments = [first.pointer, second.pointer, *tensors, *first.strides, *second.strides, *sizes]
    return Step(layer_norm_finish, grid, arguments, constants, Options(warps, follows=True))


def backward(problem: Problem, chip: Chip) -> Steps:
    """Gradients of LayerNorm: one launch for rows, one for the sums over the teams and what is near zero."""
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
    operands = [steps.data("grad_out", (M, N)), steps.data("input", (M, N)), steps.output("grad_input", (M, N))]
    pairs, data = paired(operands, N)
    apart = are_apart(data)
    in_place = dtype != FLOAT16 and _in_place(problem, operands[:2], [*wanted, "grad_input"])
    if apart or in_place:  # a cluster's sums are float32, and of columns that a warp has side by side
        chip = replace(chip, clusters=None)
    tile = row_tile(N, dtype.itemsize, chip, pairs == SINGLE.value)
    if not apart:
        tile = with_few_rows(tile, M, VECTOR_ACCESS // dtype.itemsize, chip)
    if in_place:  # nothing can be computed once more
        tile = replace(tile, exact=True, prefetch=False, later=1)
    teams = Teams.of(tile.parts if want_input else 1, blocks(M, tile.rows), tile, chip)
    few = in_place or (dtype == FLOAT32 and (M <= _FEW_ROWS or N <= _FEW_COLUMNS))
    rounded = not few and "grad_weight" in wanted and problem.views["grad_weight"].dtype != FLOAT16
    sums = {"grad_weight": "grad_weight" in wanted, "grad_bias": "grad_bias" in wanted or rounded}
    partial = steps.scratch(max(sum(sums.values()) * teams.count * N, 1), FLOAT64 if few else FLOAT32)
    vector = row_vector(N, pairs, data)
    pointers = [operand.pointer for operand in data]
    vectors = [steps.vector(name) for name in ("mean", "rstd", "weight")]
    slots = Slots.of(steps, teams, 2 * M if tile.exact else M)
    rounds = want_input and dtype != FLOAT16 and not tile.exact
    doubtful = steps.scratch(teams.count * teams.parts, INT32) if rounds else None
    tensors = [*pointers[:2], *vectors, pointers[2], partial, doubtful, slots.memory]
    assemble(
        steps,
        teams,
        slots,
        layer_norm_backward,
        tile,
        [*tensors, M, N, teams.count, *in_vectors(data, vector)],
        {
            **_constants(tile, N, vector, data),
            "PREFETCH": tile.prefetch,
            "STAGES": tile.stages,
            "FOLD": fold_apart(tile) if are_apart(data[:2]) else 1,
            "LATER": tile.later,
            "CLUSTER": teams.cluster,
            "WARPS": tile.warps,
            "PAIRS": pairs,
            "EXACT": tile.exact,
            "FEW": few,
            "WANT_INPUT": want_input,
            "WANT_WEIGHT": sums["grad_weight"],
            "WANT_BIAS": sums["grad_bias"],
        },
    )
    if rounds or rounded:
        pointers = [operand.pointer for operand in operands]
        tensors = [partial, *pointers[:2], *vectors, pointers[2], doubtful]
        sizes = [teams.count, M, N, *(operand.strides for operand in operands)]
        steps.add(_finish(tensors, sizes, outputs, tile, teams, chip, rounded))
    elif wanted:
        steps.sum_columns(partial, teams.count, N, outputs)


def forward(problem: Problem, chip: Chip) -> Steps:
    """LayerNorm and its statistics."""
    M, N = _sizes(problem)
    steps = Steps(problem, ["output", "mean", "rstd"])
    if M == 0:
        return steps
    operands = [steps.data("input", (M, N)), steps.output("output", (M, N))]
    itemsize, apart = problem.views["input"].dtype.itemsize, are_apart(operands)
    tile = forward_row_tile(max(N, 1), itemsize, replace(chip, clusters=None) if apart else chip)
    fold = fold_of(tile, itemsize)
    if fold == 1 and not apart:
        tile = with_few_rows(tile, M, VECTOR_ACCESS // itemsize, chip)
    teams = Teams.of(tile.parts, blocks(M, tile.rows), tile, chip)
    slots = Slots.of(steps, teams, 2 * M)
    # Beside a small eps squares that are rounded as subnormals count, and in place nothing can be computed once more.
    in_place = problem.views["input"].dtype == FLOAT32 and _in_place(problem, operands[:1], ["output", "mean", "rstd"])
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
        [*tensors, *counts, *in_vectors(data, vector), *mean.strides, *rstd.strides],
        _constants(tile, N, vector, data)
        | {
            "PREFETCH": tile.prefetch,
            "STAGES": tile.stages,
            "CLUSTER": teams.cluster,
            "FOLD": fold,
            "PAIRS": pairs,
            "EXACT": in_place or problem.attributes["eps"] < _SMALL_EPS,
        },
    )
    return steps
