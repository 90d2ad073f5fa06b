"""The launches of GroupNorm."""

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
from normgrad.cuda.group_norm import channels_last_launches as channels
from normgrad.cuda.group_norm import rows_launches as flat
from normgrad.cuda.group_norm.channels_last_launches import WeightSums
from normgrad.cuda.group_norm.contiguous_backward_kernel import group_norm_backward
from normgrad.cuda.group_norm.contiguous_forward_kernel import group_norm_forward
from normgrad.cuda.group_norm.tiles import GroupTile, group_tile
from normgrad.cuda.launch import Argument, float64_bits
from normgrad.cuda.layer_norm.tiles import as_rows
from normgrad.cuda.steps import Operand, Steps, begin_with_vectors, paired

_VECTOR = 8  # words: no access has more
_CHAIN = 16  # of a thread's numbers: equal ones may be rounded the same way each time


def _sizes(problem: Problem) -> tuple[int, int, int, int]:
    N, C, HxW, group = (problem.attributes[name] for name in ("N", "C", "HxW", "group"))
    return N, C, HxW, group


def _tile(problem: Problem, chip: Chip, data: Sequence[Operand], pairs: int) -> GroupTile:
    """The tile for data that comes so: where numbers of 16 bits come one by one, a thread has no more than 16 of them.

    Each takes a register, as float32 does, and its address another. Clusters take places that lie side by side.
    """
    _, C, HxW, group = _sizes(problem)
    dtype = problem.views["input"].dtype
    sizes, tensors = (max(C // group, 1), max(HxW, 1), group), len(data)
    if _places_apart(data):
        chip = replace(chip, clusters=None)
    if pairs != SINGLE.value or dtype == FLOAT32:
        return group_tile(*sizes, dtype.itemsize, chip, tensors)
    tile = group_tile(*sizes, FLOAT32.itemsize, chip, tensors)
    warps = max(tile.places * tile.groups * tile.channels // 512, tile.warps)
    return replace(tile, warps=warps, resident=min(tile.resident, max(16 // warps, 1)))


def _places_apart(operands: Sequence[Operand]) -> bool:
    return any(operand.strides[2] != 1 for operand in operands)


def _channels_adjacent(problem: Problem, x: Operand) -> bool:
    _, C, HxW, _ = _sizes(problem)
    _, channel, place = x.strides
    return C > 1 and HxW > 0 and abs(place) > abs(channel)


def _rows_of_groups(problem: Problem, operands: Sequence[Operand], tensors: int) -> list[Operand] | None:
    """The operands as rows, each a group of a sample, where that is faster; None where it is not, or they are none."""
    _, C, HxW, group = _sizes(problem)
    itemsize = problem.views["input"].dtype.itemsize
    if C * HxW == 0 or not as_rows(C // group, HxW, itemsize, tensors):
        return None
    return flat.rows_of(_sizes(problem), operands)


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


def _vector(words: Sequence[int], operands: Sequence[Operand]) -> int:
    """The largest power of two up to a vector's words that divides these numbers of them and the tensors' strides.

    Of arguments the compiler sees only whether 16 divides them.
    """
    present = [operand.strides for operand in operands if operand.pointer is not None]
    if any(place != 1 for _, _, place in present):
        return 1
    return math.gcd(_VECTOR, *words, *(stride for strides in present for stride in strides[:2]))


def _folds(tile: GroupTile, itemsize: int, at_once: int) -> dict[str, int]:
    """How a tile's places are added up, of which every thread loads so many bytes ``at_once``, if it is known.

    As float32, sixteen numbers of a thread are added up one by one at the most. Of more, those of its vectors come
    first, or where it has none, those of stretches in each of which every thread has some.
    """
    threads = tile.warps * 32
    folds = {"STRETCHES": 1, "NEIGHBOURS": 1}
    if tile.places <= _CHAIN * threads:
        return folds
    if at_once >= VECTOR_ACCESS:
        return folds | {"NEIGHBOURS": VECTOR_ACCESS // itemsize}
    return folds | {"STRETCHES": tile.places * itemsize // (threads * VECTOR_ACCESS)}


def _fold(tile: GroupTile, itemsize: int, places_adjacent: bool) -> int:
    """In how many stretches a tile of one group falls, of each of which every thread has a vector; 8 at the most.

    Elsewhere neighbours in a warp may have different channels. Once stretches are added up, the threads with different
    numbers are then not side by side, and Triton sums up over others.
    """
    if not places_adjacent:
        return 1
    stretch = tile.warps * 32 * VECTOR_ACCESS // itemsize
    return max(min(tile.places * tile.channels // stretch, 8), 1) if tile.groups == 1 else 1


def _in_vectors(operands: Sequence[Operand], vector: int) -> list[Shape]:
    strides = (operand.strides for operand in operands)
    return [(sample // vector, channel // vector, place) for sample, channel, place in strides]


def _many(problem: Problem) -> bool:
    """Whether groups or channels are too many to be counted, a round further than there are, in 32 bits."""
    N, C, _, group = _sizes(problem)
    return N * group >= 2**30 or C >= 2**30


def _reach(tile: GroupTile, D: int, operand: Operand) -> int:
    """How far from its first element a tile goes."""
    _, channel, place = operand.strides
    return tile.places * abs(place) + (tile.groups * D + tile.channels) * abs(channel)


def backward(problem: Problem, chip: Chip) -> Steps:
    """Gradients of GroupNorm: launches for groups, one for the weight sums over samples and tiles."""
    N, C, HxW, _ = _sizes(problem)
    wanted = [name for name in ("grad_weight", "grad_bias") if name in problem.views]
    want_input = "grad_input" in problem.views
    steps = Steps(problem, ["grad_input", *wanted])
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
    rows_of_groups = _rows_of_groups(problem, operands, 2)
    if rows_of_groups is not None:
        flat.backward(_sizes(problem), chip, steps, rows_of_groups, want, outputs)
        return steps
    vectors = [steps.vector(name) for name in ("mean", "rstd", "weight")]
    if _channels_adjacent(problem, x):
        weight_sums = channels.backward(_sizes(problem), chip, steps, operands, vectors, want)
    else:
        weight_sums = _backward_places(problem, chip, steps, operands, vectors, want)
    if wanted:
        steps.sum_columns(weight_sums.memory, N * weight_sums.parts, C, outputs)
    return steps


def _backward_places(
    problem: Problem,
    chip: Chip,
    steps: Steps,
    operands: list[Operand],
    vectors: list[Argument],
    want: dict[str, bool],
) -> WeightSums:
    N, _, HxW, group = _sizes(problem)
    pairs, operands = paired(operands, HxW)
    tile = _tile(problem, chip, operands[:2], pairs)
    apart = _places_apart(operands[:2])
    if apart:  # results take the way through shared memory that the data would
        tile = replace(tile, stages=1)
    group_blocks = blocks(group, tile.groups)
    teams = Teams.of(tile.parts if want["WANT_INPUT"] else 1, N * group_blocks, tile, chip)
    # The roundings of few numbers are seen in their sums, and of places that lie apart a thread may have very many.
    few = steps.itemsize == FLOAT32.itemsize and tile.parts == 1 and tile.channels * tile.places <= channels.FEW
    exact = few or apart
    weight_sums = WeightSums.of(steps, _sizes(problem), tile.place_parts, want, exact)
    slots = Slots.of(steps, teams, N * group)
    grad_out, x, grad_input = operands
    tensors = [grad_out.pointer, x.pointer, *vectors, grad_input.pointer, weight_sums.memory, slots.memory]
    in_word = 1 if pairs == SINGLE.value else 2
    vector = _vector([HxW // in_word, tile.places // in_word], operands)
    arguments = [*tensors, N, group, group_blocks, HxW, teams.count, *_in_vectors(operands, vector)]
    constants = _constants(problem, tile, operands) | {"VECTOR": vector, "PAIRS": pairs} | want
    at_once = vector * in_word * steps.itemsize if begin_with_vectors(operands[:2]) else 0
    constants |= _folds(tile, steps.itemsize, at_once) | {"EXACT": exact, "CLUSTER": teams.cluster}
    constants["ALIKE"] = len({operand.strides[1:] for operand in operands if operand.pointer is not None}) == 1
    assemble(steps, teams, slots, group_norm_backward, tile, arguments, constants)
    return weight_sums


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
    eps_bits = float64_bits(problem.attributes["eps"])
    rows_of_groups = _rows_of_groups(problem, [x, output], 1)
    if rows_of_groups is not None:
        flat.forward(_sizes(problem), chip, steps, rows_of_groups, statistics, eps_bits)
    elif _channels_adjacent(problem, x):
        channels.forward(_sizes(problem), chip, steps, [x, output], statistics, eps_bits)
    else:
        _forward_places(problem, chip, steps, [x, output], statistics, eps_bits)
    return steps


def _forward_places(
    problem: Problem, chip: Chip, steps: Steps, operands: list[Operand], statistics: list[Operand], eps_bits: int
) -> None:
    N, _, HxW, group = _sizes(problem)
    pairs, operands = paired(operands, HxW)
    tile = _tile(problem, chip, operands[:1], pairs)
    group_blocks = blocks(group, tile.groups)
    teams = Teams.of(tile.parts, N * group_blocks, tile, chip)
    slots = Slots.of(steps, teams, 2 * N * group)
    vectors = [steps.vector(name) for name in ("weight", "bias")]
    x, output = operands
    tensors = [x.pointer, *vectors, output.pointer, *(statistic.pointer for statistic in statistics), slots.memory]
    counts = N, group, group_blocks, HxW, eps_bits, teams.count
    in_word = 1 if pairs == SINGLE.value else 2
    vector = _vector([HxW // in_word, tile.places // in_word], operands)
    arguments = [*tensors, *counts, *_in_vectors(operands, vector), *(statistic.strides[0] for statistic in statistics)]
    constants = _constants(problem, tile, operands) | {"FOLD": _fold(tile, steps.itemsize, x.strides[2] == 1)}
    constants |= {"CLUSTER": teams.cluster, "VECTOR": vector, "PAIRS": pairs}
    assemble(steps, teams, slots, group_norm_forward, tile, arguments, constants)
