"""The launches of GroupNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.plan import Problem
from normgrad.contract.view import Shape
from normgrad.cuda.configurations import ChannelsTile, Chip, GroupTile, blocks, channels_tile, group_tile, power_of_two
from normgrad.cuda.kernels import group_norm as kernels
from normgrad.cuda.kernels.group_norm_channels import group_norm_backward_channels, group_norm_forward_channels
from normgrad.cuda.launch import float64_bits
from normgrad.cuda.problem import Operand, Steps, paired
from normgrad.cuda.teams import Slots, Teams, assemble


def _sizes(problem: Problem) -> tuple[int, int, int, int]:
    N, C, HxW, group = (problem.attributes[name] for name in ("N", "C", "HxW", "group"))
    return N, C, HxW, group


def _places_adjacent(problem: Problem, x: Operand) -> bool:
    _, channel, place = x.strides
    return abs(place) <= abs(channel) or problem.attributes["C"] == 1


def _tile(problem: Problem, x: Operand, chip: Chip, tensors: int) -> GroupTile:
    _, C, HxW, group = _sizes(problem)
    itemsize = problem.views["input"].dtype.itemsize
    return group_tile(max(C // group, 1), max(HxW, 1), group, itemsize, chip, _places_adjacent(problem, x), tensors)


def _channels_tile(problem: Problem, x: Operand, chip: Chip, tensors: int) -> ChannelsTile | None:
    """The tile for channels that lie side by side; None where they do not, or are too many."""
    _, C, HxW, group = _sizes(problem)
    if C * HxW == 0 or _places_adjacent(problem, x):
        return None
    return channels_tile(C // group, HxW, group, problem.views["input"].dtype.itemsize, chip, tensors)


def _channels_constants(problem: Problem, tile: ChannelsTile, operands: Sequence[Operand]) -> dict[str, Any]:
    _, C, HxW, group = _sizes(problem)
    strides = [operand.strides for operand in operands]
    reach = max(tile.places * abs(place) + tile.channels * abs(channel) for _, channel, place in strides)
    return {
        "D": C // group,
        "GROUPS": tile.groups,
        "PADDED_GROUPS": power_of_two(tile.groups),
        "PLACES": tile.places,
        "CHANNELS": tile.channels,
        "STEPS": tile.steps,
        "PARTS": tile.parts,
        "PADDED_PARTS": power_of_two(tile.parts),
        "MASKED": tile.places * tile.steps * tile.parts != HxW,
        "WIDE": reach >= 2**31 or _many(problem),
        "STAGES": tile.stages,
    }


def _constants(problem: Problem, tile: GroupTile, operands: Sequence[Operand]) -> dict[str, Any]:
    _, C, HxW, group = _sizes(problem)
    D = C // group
    reach = max(_reach(tile, D, operand) for operand in operands)
    return {
        "D": D,
        "PLACES": tile.places,
        "GROUPS": tile.groups,
        "CHANNELS": tile.channels,
        "PLACE_PARTS": tile.place_parts,
        "PARTS": tile.parts,
        "PADDED_PARTS": power_of_two(tile.parts),
        "MASKED": tile.places * tile.place_parts != HxW or tile.channels * tile.channel_parts != D,
        "WIDE": reach >= 2**31 or _many(problem),
        "STAGES": tile.stages,
    }


def _paired(problem: Problem, tile: ChannelsTile | GroupTile, operands: Sequence[Operand]) -> tuple[int, list[Operand]]:
    """16-bit data as pairs of channels or of places, where they lie side by side."""
    _, C, HxW, group = _sizes(problem)
    if isinstance(tile, ChannelsTile):
        return paired(operands, tile.groups * (C // group) | C, axis=1)
    return paired(operands, HxW)


def _many(problem: Problem) -> bool:
    """Whether groups or channels are too many to be counted, a round further than there are, in 32 bits."""
    N, C, _, group = _sizes(problem)
    return N * group >= 2**30 or C >= 2**30


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
    x = steps.data("input", whole)
    tile = _channels_tile(problem, x, chip, 2) or _tile(problem, x, chip, 2)
    place_parts = tile.parts if isinstance(tile, ChannelsTile) else tile.place_parts
    group_blocks = blocks(group, tile.groups)
    teams = Teams.of(tile.parts if want_input else 1, N * group_blocks, tile, chip)
    partial = steps.scratch(max(len(wanted) * N * place_parts * C, 1), FLOAT32)
    slots = Slots.of(steps, teams, N * group)
    vectors = [steps.vector(name) for name in ("mean", "rstd", "weight")]
    operands = [steps.data("grad_out", whole), x, steps.output("grad_input", whole)]
    pairs, (grad_out, x, grad_input) = _paired(problem, tile, operands)
    tensors = [grad_out.pointer, x.pointer, *vectors, grad_input.pointer, partial, slots.memory]
    counts = N, group, group_blocks, HxW, teams.count
    arguments = [*tensors, *counts, *grad_out.strides, *x.strides, *grad_input.strides]
    want = {
        "PAIRS": pairs,
        "WANT_INPUT": want_input,
        "WANT_WEIGHT": "grad_weight" in wanted,
        "WANT_BIAS": "grad_bias" in wanted,
    }
    operands = [grad_out, x, grad_input]
    if isinstance(tile, ChannelsTile):
        constants = _channels_constants(problem, tile, operands) | want
        assemble(steps, teams, slots, group_norm_backward_channels, tile, arguments, constants)
    else:
        constants = _constants(problem, tile, operands) | want
        assemble(steps, teams, slots, kernels.group_norm_backward, tile, arguments, constants)
    if wanted:
        steps.sum_columns(partial, N * place_parts, C, outputs)
    return steps


def forward(problem: Problem, chip: Chip) -> Steps:
    """GroupNorm and its statistics."""
    N, C, HxW, group = _sizes(problem)
    steps = Steps(problem, ["output", "mean", "rstd"])
    if N == 0:
        return steps
    whole: Shape = (N, C, HxW)
    x = steps.data("input", whole)
    tile = _channels_tile(problem, x, chip, 1) or _tile(problem, x, chip, 1)
    group_blocks = blocks(group, tile.groups)
    teams = Teams.of(tile.parts, N * group_blocks, tile, chip)
    slots = Slots.of(steps, teams, 2 * N * group)
    vectors = [steps.vector(name) for name in ("weight", "bias")]
    pairs, (x, output) = _paired(problem, tile, [x, steps.output("output", whole)])
    mean, rstd = steps.output("mean", (N * group,)), steps.output("rstd", (N * group,))
    tensors = [x.pointer, *vectors, output.pointer, mean.pointer, rstd.pointer, slots.memory]
    counts = N, group, group_blocks, HxW, float64_bits(problem.attributes["eps"]), teams.count
    arguments = [*tensors, *counts, *x.strides, *output.strides, *mean.strides, *rstd.strides]
    if isinstance(tile, ChannelsTile):
        constants = _channels_constants(problem, tile, [x, output]) | {"PAIRS": pairs}
        assemble(steps, teams, slots, group_norm_forward_channels, tile, arguments, constants)
    else:
        constants = _constants(problem, tile, [x, output]) | {"PAIRS": pairs}
        assemble(steps, teams, slots, kernels.group_norm_forward, tile, arguments, constants)
    return steps
