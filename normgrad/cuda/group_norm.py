"""The launches of GroupNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.plan import Problem
from normgrad.contract.view import Shape
from normgrad.cuda.configurations import Chip, GroupTile, blocks, group_tile, power_of_two
from normgrad.cuda.kernels import group_norm as kernels
from normgrad.cuda.launch import float64_bits
from normgrad.cuda.problem import Operand, Steps
from normgrad.cuda.teams import Slots, Teams, assemble


def _sizes(problem: Problem) -> tuple[int, int, int, int]:
    N, C, HxW, group = (problem.attributes[name] for name in ("N", "C", "HxW", "group"))
    return N, C, HxW, group


def _tile(problem: Problem, x: Operand, chip: Chip) -> GroupTile:
    _, C, HxW, group = _sizes(problem)
    _, channel, place = x.strides
    places_adjacent = abs(place) <= abs(channel) or C == 1
    return group_tile(
        max(C // group, 1), max(HxW, 1), group, problem.views["input"].dtype.itemsize, chip, places_adjacent
    )


def _constants(tile: GroupTile, D: int, operands: Sequence[Operand]) -> dict[str, Any]:
    reach = max(_reach(tile, D, operand) for operand in operands)
    return {
        "D": D,
        "PLACES": tile.places,
        "GROUPS": tile.groups,
        "CHANNELS": tile.channels,
        "PLACE_PARTS": tile.place_parts,
        "PARTS": tile.parts,
        "PADDED_PARTS": power_of_two(tile.parts),
        "WIDE": reach >= 2**31,
    }


def _reach(tile: GroupTile, D: int, operand: Operand) -> int:
    """How far from its first element a tile goes."""
    _, channel, place = operand.strides
    return tile.places * abs(place) + (tile.groups * D + tile.channels) * abs(channel)


def backward(problem: Problem, chip: Chip) -> Steps:
    """Gradients of GroupNorm: one launch for groups, one for the sums over samples and tiles."""
    N, C, HxW, group = _sizes(problem)
    wanted = [name for name in ("grad_weight", "grad_bias") if name in problem.views]
    want_input = "grad_input" in problem.views
    steps = Steps(problem, ["grad_input"])
    outputs = [steps.output(name, (C,)) for name in wanted]
    whole: Shape = (N, C, HxW)
    if N * C * HxW == 0:
        if wanted and C:
            steps.sum_columns(steps.scratch(1, FLOAT32), 0, C, outputs)
        return steps
    if not (want_input or wanted):
        return steps
    grad_out, x = steps.data("grad_out", whole), steps.data("input", whole)
    tile = _tile(problem, x, chip)
    group_blocks = blocks(group, tile.groups)
    teams = Teams.of(tile.parts if want_input else 1, N * group_blocks, tile, chip)
    partial = steps.scratch(max(len(wanted) * N * tile.place_parts * C, 1), FLOAT32)
    slots = Slots.of(steps, teams, N * group)
    vectors = [steps.vector(name) for name in ("mean", "rstd", "weight")]
    grad_input = steps.output("grad_input", whole)
    tensors = [grad_out.pointer, x.pointer, *vectors, grad_input.pointer, partial, slots.memory]
    counts = N, group, group_blocks, HxW, teams.count
    assemble(
        steps,
        teams,
        slots,
        kernels.group_norm_backward,
        tile,
        [*tensors, *counts, *grad_out.strides, *x.strides, *grad_input.strides],
        {
            **_constants(tile, C // group, [grad_out, x, grad_input]),
            "PREFETCH": tile.prefetch,
            "WANT_INPUT": want_input,
            "WANT_WEIGHT": "grad_weight" in wanted,
            "WANT_BIAS": "grad_bias" in wanted,
        },
    )
    if wanted:
        steps.sum_columns(partial, N * tile.place_parts, C, outputs)
    return steps


def forward(problem: Problem, chip: Chip) -> Steps:
    """GroupNorm and its statistics."""
    N, C, HxW, group = _sizes(problem)
    steps = Steps(problem, ["output", "mean", "rstd"])
    if N == 0:
        return steps
    whole: Shape = (N, C, HxW)
    x = steps.data("input", whole)
    tile = _tile(problem, x, chip)
    group_blocks = blocks(group, tile.groups)
    teams = Teams.of(tile.parts, N * group_blocks, tile, chip)
    slots = Slots.of(steps, teams, 2 * N * group)
    vectors = [steps.vector(name) for name in ("weight", "bias")]
    output = steps.output("output", whole)
    mean, rstd = steps.output("mean", (N * group,)), steps.output("rstd", (N * group,))
    tensors = [x.pointer, *vectors, output.pointer, mean.pointer, rstd.pointer, slots.memory]
    counts = N, group, group_blocks, HxW, float64_bits(problem.attributes["eps"]), teams.count
    assemble(
        steps,
        teams,
        slots,
        kernels.group_norm_forward,
        tile,
        [*tensors, *counts, *x.strides, *output.strides, *mean.strides, *rstd.strides],
        _constants(tile, C // group, [x, output]),
    )
    return steps
