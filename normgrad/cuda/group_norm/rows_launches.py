"""The launches of GroupNorm where the channels and places of a group lie side by side, so that it is a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from normgrad.contract.dtypes import FLOAT32
from normgrad.cuda.chip import Chip, blocks, power_of_two
from normgrad.cuda.cta_groups import Slots, Teams, assemble
from normgrad.cuda.device.common import SINGLE
from normgrad.cuda.group_norm.channels_last_launches import FEW, Sizes
from normgrad.cuda.group_norm.rows_kernels import (
    group_norm_flat_backward,
    group_norm_flat_forward,
    group_norm_flat_sums,
)
from normgrad.cuda.launch import FLOAT64, Options, Scratch, Step
from normgrad.cuda.layer_norm.tiles import RowTile, flat_forward_tile, flat_tile
from normgrad.cuda.operands import fold_of, in_vectors, row_vector
from normgrad.cuda.steps import Operand, Steps, paired

_FEW_SAMPLES = 8  # of a team, beside which its sums of columns count: it writes them, and the next launch reads them
# Of the launch that sums up over teams and places: numbers at a time, and numbers of a channel a program.
_SUM_TILE = 2048
_SEGMENT = 16384
_SUM_WARPS = 4


def rows_of(sizes: Sizes, operands: Sequence[Operand]) -> list[Operand] | None:
    """The operands as rows, a group of a sample each; None where the numbers of a group are not side by side."""
    _, C, HxW, _ = sizes
    found = []
    for operand in operands:
        sample, channel, place = operand.strides
        if operand.pointer is not None and ((HxW > 1 and place != 1) or (C > 1 and channel != HxW)):
            return None
        found.append(replace(operand, strides=(sample, 1)))
    return found


def _registers(steps: Steps, operands: Sequence[Operand], row: int) -> int:
    """Bytes of the registers that a number of a row takes: 16 bits that come one by one take as many as float32."""
    return FLOAT32.itemsize if paired(operands, row)[0] == SINGLE.value else steps.itemsize


class _Cut:
    """What both passes have in common: teams that stay with a group, and the kernels' sizes."""

    def __init__(
        self,
        sizes: Sizes,
        tile: RowTile,
        parts: int,
        operands: Sequence[Operand],
        chip: Chip,
        few_teams: bool = False,
    ) -> None:
        N, C, HxW, group = sizes
        row = C // group * HxW
        room = chip.multiprocessors * tile.resident // tile.parts
        self.groups_at_once = blocks(group, blocks(group, max(room, 1)))
        tiles = blocks(N, tile.rows)
        self.of_group = min(max(room // self.groups_at_once, 1), tiles)
        if few_teams and tile.parts == 1:  # as many as leave no multiprocessor idle, or have enough samples each
            needed = min(max(chip.multiprocessors // self.groups_at_once, 1), tiles)
            self.of_group = min(self.of_group, max(blocks(N, _FEW_SAMPLES), needed))
        self.of_group = blocks(tiles, blocks(tiles, self.of_group))
        self.teams = replace(Teams.of(parts, N, tile, chip), count=self.groups_at_once * self.of_group)
        self.pairs, self.operands = paired(operands, row)
        vector = row_vector(row, self.pairs, self.operands)
        self.strides = in_vectors(self.operands, vector)
        reach = max(tile.rows * abs(operand.strides[0]) for operand in self.operands) + row
        self.constants: dict[str, Any] = {
            "D": C // group,
            "ROWS": tile.rows,
            "COLUMNS": tile.columns,
            "PARTS": tile.parts,
            "PADDED_PARTS": power_of_two(tile.parts),
            "MASKED": tile.columns * tile.parts != row,
            "WIDE": reach >= 2**31,
            "STAGES": tile.stages,
            "VECTOR": vector,
            "PAIRS": self.pairs,
        }


def backward(
    sizes: Sizes,
    chip: Chip,
    steps: Steps,
    operands: Sequence[Operand],
    want: dict[str, bool],
    outputs: Sequence[Operand],  # the weight gradients that are wanted
) -> None:
    """Gradients: one launch for rows and the sums over a team's samples, one for those over teams and positions."""
    N, C, HxW, group = sizes
    row = C // group * HxW
    tile = flat_tile(row, _registers(steps, operands, row), chip)
    cut = _Cut(sizes, tile, tile.parts if want["WANT_INPUT"] else 1, operands, chip, few_teams=bool(outputs))
    exact = steps.itemsize == FLOAT32.itemsize  # in no more instructions, as results are computed with as float64
    partial = steps.scratch(max(len(outputs) * cut.of_group * C * HxW, 1), FLOAT64 if exact else FLOAT32)
    slots = Slots.of(steps, cut.teams, 2 * N * group if exact else N * group)
    vectors = [steps.vector(name) for name in ("mean", "rstd", "weight")]
    grad_out, x, grad_input = (operand.pointer for operand in cut.operands)
    tensors = [grad_out, x, *vectors, grad_input, partial, slots.memory]
    arguments = [*tensors, N, group, HxW, row, cut.groups_at_once, cut.of_group, *cut.strides]
    constants = cut.constants | {"EXACT": exact} | want
    assemble(steps, cut.teams, slots, group_norm_flat_backward, tile, arguments, constants)
    if outputs:
        _add_sums(steps, partial, cut.of_group, C, HxW, outputs)


def _add_sums(steps: Steps, partial: Scratch, teams: int, C: int, HxW: int, outputs: Sequence[Operand]) -> None:
    """Sum [outputs, teams, C, HxW] over teams and positions, in float64 and in a fixed order."""
    positions = min(power_of_two(HxW), _SUM_TILE // 2)
    at_once = min(power_of_two(teams), _SUM_TILE // positions)
    channels = max(min(_SUM_TILE // (positions * at_once), power_of_two(C) // 64), 1)
    segment = blocks(_SEGMENT, teams * positions) * positions
    segments = blocks(HxW, segment)
    targets = outputs
    if segments > 1:
        shorter = steps.scratch(len(outputs) * segments * C, partial.dtype)
        size = segments * C * partial.dtype.itemsize
        targets = [Operand(replace(shorter, offset=shorter.offset + i * size), (1,)) for i in range(len(outputs))]
    first, second = (*targets, Operand(None, (1,)))[:2]
    made = [partial, first.pointer, second.pointer, *first.strides, *second.strides]
    constants = {"TEAMS": at_once, "CHANNELS": channels, "POSITIONS": positions}
    grid = (blocks(C, channels), segments, len(outputs))
    options = Options(_SUM_WARPS, resident=4, follows=True)
    steps.add(Step(group_norm_flat_sums, grid, [*made, teams, C, HxW, segment], constants, options))
    if segments > 1:
        steps.sum_columns(shorter, segments, C, outputs)


def forward(
    sizes: Sizes, chip: Chip, steps: Steps, operands: Sequence[Operand], statistics: list[Operand], eps_bits: int
) -> None:
    """The normalised rows and their statistics, in one launch."""
    N, C, HxW, group = sizes
    row = C // group * HxW
    tile = flat_forward_tile(row, _registers(steps, operands, row), chip)
    cut = _Cut(sizes, tile, tile.parts, operands, chip)
    slots = Slots.of(steps, cut.teams, 2 * N * group)
    vectors = [steps.vector(name) for name in ("weight", "bias")]
    x, output = (operand.pointer for operand in cut.operands)
    tensors = [x, *vectors, output, *(statistic.pointer for statistic in statistics), slots.memory]
    counts = [N, group, HxW, row, eps_bits, cut.groups_at_once, cut.of_group]
    arguments = [*tensors, *counts, *cut.strides, *(statistic.strides[0] for statistic in statistics)]
    few = steps.itemsize == FLOAT32.itemsize and tile.parts == 1 and tile.columns <= FEW
    constants = cut.constants | {"EXACT": few, "FOLD": fold_of(tile, steps.itemsize)}
    assemble(steps, cut.teams, slots, group_norm_flat_forward, tile, arguments, constants)
