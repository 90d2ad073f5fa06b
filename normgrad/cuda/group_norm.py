"""The launches of GroupNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.plan import Problem
from normgrad.contract.view import Shape
from normgrad.cuda import group_norm_channels as channels
from normgrad.cuda.configurations import Chip, GroupTile, blocks, channels_tile, group_tile, power_of_two
from normgrad.cuda.group_norm_channels import Items, Signals
from normgrad.cuda.kernels import group_norm as kernels
from normgrad.cuda.kernels.group_norm_channels import group_norm_backward_channels
from normgrad.cuda.kernels.group_norm_channels_forward import group_norm_forward_channels
from normgrad.cuda.launch import INT64, Scratch, float64_bits
from normgrad.cuda.problem import VECTOR_ACCESS, Operand, Steps, paired
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


def _channels_adjacent(problem: Problem, x: Operand) -> bool:
    _, C, HxW, _ = _sizes(problem)
    return C * HxW > 0 and not _places_adjacent(problem, x)


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


def _strides(operands: Sequence[Operand]) -> list[int]:
    return [stride for operand in operands for stride in operand.strides]


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
    N, C, HxW, _ = _sizes(problem)
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
    operands = [steps.data("grad_out", whole), x, steps.output("grad_input", whole)]
    want = {
        "WANT_INPUT": want_input,
        "WANT_WEIGHT": "grad_weight" in wanted,
        "WANT_BIAS": "grad_bias" in wanted,
    }
    launches = _backward_channels if _channels_adjacent(problem, x) else _backward_places
    partial, rows = launches(problem, chip, steps, operands, want)
    if wanted:
        steps.sum_columns(partial, rows, C, outputs)
    return steps


def _partial(steps: Steps, want: dict[str, bool], rows: int, C: int) -> Scratch:
    """Room for rows of the weight sums that are wanted."""
    return steps.scratch(max((want["WANT_WEIGHT"] + want["WANT_BIAS"]) * rows * C, 1), FLOAT32)


def _backward_places(
    problem: Problem, chip: Chip, steps: Steps, operands: list[Operand], want: dict[str, bool]
) -> tuple[Scratch, int]:
    N, C, HxW, group = _sizes(problem)
    tile = _tile(problem, operands[1], chip, 2)
    group_blocks = blocks(group, tile.groups)
    teams = Teams.of(tile.parts if want["WANT_INPUT"] else 1, N * group_blocks, tile, chip)
    partial = _partial(steps, want, N * tile.place_parts, C)
    slots = Slots.of(steps, teams, N * group)
    vectors = [steps.vector(name) for name in ("mean", "rstd", "weight")]
    pairs, operands = paired(operands, HxW)
    grad_out, x, grad_input = operands
    tensors = [grad_out.pointer, x.pointer, *vectors, grad_input.pointer, partial, slots.memory]
    arguments = [*tensors, N, group, group_blocks, HxW, teams.count, *_strides(operands)]
    constants = _constants(problem, tile, operands) | {"PAIRS": pairs} | want
    assemble(steps, teams, slots, kernels.group_norm_backward, tile, arguments, constants)
    return partial, N * tile.place_parts


def _backward_channels(
    problem: Problem, chip: Chip, steps: Steps, operands: list[Operand], want: dict[str, bool]
) -> tuple[Scratch, int]:
    N, C, HxW, group = _sizes(problem)
    items = Items.of(_sizes(problem), channels_tile(C, HxW, steps.itemsize, chip, 2), chip)
    partial = _partial(steps, want, N * items.parts, C)
    sums = steps.scratch(items.entries, INT64)
    signals = Signals.of(steps, items)
    vectors = [steps.vector(name) for name in ("mean", "rstd", "weight")]
    pairs, operands = paired(operands, C, axis=1)
    grad_out, x, grad_input = operands
    tensors = [grad_out.pointer, x.pointer, *vectors, grad_input.pointer, partial, sums]
    counts = N, group, items.sections, HxW
    arguments = [*tensors, signals.arrivals, signals.totals, *counts, *_strides(operands)]
    constants = items.constants(HxW, operands) | {"PAIRS": pairs} | want
    channels.assemble(
        steps, items, signals, group_norm_backward_channels, arguments, constants, outputs=want["WANT_INPUT"]
    )
    return partial, N * items.parts


def forward(problem: Problem, chip: Chip) -> Steps:
    """GroupNorm and its statistics."""
    N, C, HxW, group = _sizes(problem)
    steps = Steps(problem, ["output", "mean", "rstd"])
    if N == 0:
        return steps
    whole: Shape = (N, C, HxW)
    x = steps.data("input", whole)
    output = steps.output("output", whole)
    statistics = [steps.output(name, (N * group,)) for name in ("mean", "rstd")]
    launches = _forward_channels if _channels_adjacent(problem, x) else _forward_places
    launches(problem, chip, steps, [x, output], statistics)
    return steps


def _forward_places(
    problem: Problem, chip: Chip, steps: Steps, operands: list[Operand], statistics: list[Operand]
) -> None:
    N, _, HxW, group = _sizes(problem)
    tile = _tile(problem, operands[0], chip, 1)
    group_blocks = blocks(group, tile.groups)
    teams = Teams.of(tile.parts, N * group_blocks, tile, chip)
    slots = Slots.of(steps, teams, 2 * N * group)
    vectors = [steps.vector(name) for name in ("weight", "bias")]
    pairs, operands = paired(operands, HxW)
    x, output = operands
    tensors = [x.pointer, *vectors, output.pointer, *(statistic.pointer for statistic in statistics), slots.memory]
    counts = N, group, group_blocks, HxW, float64_bits(problem.attributes["eps"]), teams.count
    arguments = [*tensors, *counts, *_strides(operands), *_strides(statistics)]
    constants = _constants(problem, tile, operands) | {"PAIRS": pairs}
    assemble(steps, teams, slots, kernels.group_norm_forward, tile, arguments, constants)


def _forward_channels(
    problem: Problem, chip: Chip, steps: Steps, operands: list[Operand], statistics: list[Operand]
) -> None:
    N, C, HxW, group = _sizes(problem)
    tile = channels_tile(C, HxW, steps.itemsize, chip, 1)
    items = Items.of(_sizes(problem), tile, chip)
    moments = steps.scratch(2 * items.entries, INT64)
    signals = Signals.of(steps, items)
    vectors = [steps.vector(name) for name in ("weight", "bias")]
    pairs, operands = paired(operands, C, axis=1)
    x, output = operands
    tensors = [x.pointer, *vectors, output.pointer, *(statistic.pointer for statistic in statistics), moments]
    counts = N, group, items.sections, HxW, float64_bits(problem.attributes["eps"])
    arguments = [*tensors, signals.arrivals, signals.totals, *counts, *_strides(operands), *_strides(statistics)]
    rows = min(tile.warps * 32 * (VECTOR_ACCESS // steps.itemsize) // tile.channels, tile.places)
    constants = items.constants(HxW, operands) | {"PAIRS": pairs, "ROWS": rows}
    channels.assemble(steps, items, signals, group_norm_forward_channels, arguments, constants)
