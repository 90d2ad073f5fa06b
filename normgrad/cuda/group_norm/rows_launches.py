"""The launches of GroupNorm where a group of a sample is one contiguous row, as in LayerNorm.

CTA groups stay with one group and walk over the samples: so the weights of a row's columns are loaded once, and their
gradients are summed column by column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.view import Shape
from normgrad.cuda.chip import Chip, cdiv, next_power_of_2
from normgrad.cuda.cta_groups import CtaGroups, Mailbox, add_launches
from normgrad.cuda.device.pack16 import UNPACKED
from normgrad.cuda.group_norm.rows_kernels import (
    group_norm_backward_rows,
    group_norm_backward_rows_sum_partials,
    group_norm_forward_rows,
)
from normgrad.cuda.group_norm.tiles import FEW_ELEMENTS, Sizes, forward_group_row_tile, group_row_tile
from normgrad.cuda.launch import Options, Scratch, Step
from normgrad.cuda.layer_norm.tiles import RowTile, RowTileSpec, forward_segments
from normgrad.cuda.operands import Operand, pack_operands, row_vector, strides_in_vectors
from normgrad.cuda.steps import Steps

_MIN_SAMPLES = 8  # of a CTA group: with fewer, its partial sums, written and read again, are much of the traffic
# Of the second-stage reduction over CTA groups and positions: elements of a tile, elements of a channel that a program
# adds up, and warps.
_SUM_TILE = 2048
_SUM_SEGMENT = 16384
_SUM_WARPS = 4


def as_rows(sizes: Sizes, operands: Sequence[Operand]) -> list[Operand] | None:
    """Return the operands as rows with strides (sample, 1); None where the elements of a group are not contiguous."""
    _, C, HxW, _ = sizes
    found = []
    for operand in operands:
        sample, channel, position = operand.strides
        if operand.pointer is not None and ((HxW > 1 and position != 1) or (C > 1 and channel != HxW)):
            return None
        found.append(replace(operand, strides=(sample, 1)))
    return found


def _register_bytes(steps: Steps, operands: Sequence[Operand], columns: int) -> int:
    """Return the bytes of registers that an element takes: an unpacked 16-bit one takes as many as float32."""
    return FLOAT32.itemsize if pack_operands(operands, columns)[0] == UNPACKED.value else steps.itemsize


class RowWork:
    """What both passes have in common: how groups and samples are shared out to CTA groups, packing and strides."""

    groups_at_once: int  # groups that have CTA groups at the same time
    per_group: int  # CTA groups of a group, which share its samples
    cta_groups: CtaGroups
    operands: list[Operand]  # packed
    strides: list[Shape]  # in vectors
    spec: RowTileSpec

    def __init__(
        self, sizes: Sizes, tile: RowTile, chip: Chip, operands: Sequence[Operand], parts: int, partial_sums: bool
    ) -> None:
        """``parts``: CTAs of a group that exchange sums. ``partial_sums``: each CTA group writes a row of them."""
        N, _, HxW, group = sizes
        columns = sizes.D * HxW
        room = chip.multiprocessors * tile.ctas_per_sm // tile.parts
        self.groups_at_once = cdiv(group, cdiv(group, max(room, 1)))
        tiles = cdiv(N, tile.rows)
        self.per_group = min(max(room // self.groups_at_once, 1), tiles)
        if partial_sums and tile.parts == 1:  # no more than leave no SM idle, or have enough samples each
            needed = min(max(chip.multiprocessors // self.groups_at_once, 1), tiles)
            self.per_group = min(self.per_group, max(cdiv(N, _MIN_SAMPLES), needed))
        self.per_group = cdiv(tiles, cdiv(tiles, self.per_group))
        count = self.groups_at_once * self.per_group
        self.cta_groups = replace(CtaGroups.of(parts, N, tile, chip), count=count)
        packing, self.operands = pack_operands(operands, columns)
        vector = row_vector(columns, packing, self.operands)
        self.strides = strides_in_vectors(self.operands, vector)
        extent = max(tile.rows * abs(operand.strides[0]) for operand in self.operands) + columns
        self.spec = RowTileSpec.of(tile, columns, vector, packing, extent >= 2**31)


def backward(sizes: Sizes, chip: Chip, steps: Steps, operands: Sequence[Operand], outputs: Sequence[Operand]) -> None:
    """Add one launch over the rows, and one that adds up the weight gradients over CTA groups and positions.

    ``operands``: grad_out, input, grad_input as rows; ``outputs``: the weight gradients that are wanted.
    """
    N, C, HxW, group = sizes
    columns = sizes.D * HxW
    tile = group_row_tile(columns, _register_bytes(steps, operands, columns), chip)
    parts = tile.parts if steps.wants("grad_input") else 1
    work = RowWork(sizes, tile, chip, operands, parts, partial_sums=bool(outputs))
    # Results of float32 data are computed in float64, so its sums take no conversions more.
    float64 = steps.itemsize == FLOAT32.itemsize
    partial = steps.partial_sums(len(outputs), work.per_group, C * HxW, float64)
    mailbox = Mailbox.of(steps, work.cta_groups, 2 * N * group if float64 else N * group)
    parameters = [steps.contiguous_input(name) for name in ("mean", "rstd", "weight")]
    grad_out, x, grad_input = (operand.pointer for operand in work.operands)
    tensors = [grad_out, x, *parameters, grad_input, partial, mailbox.memory]
    arguments = [*tensors, N, group, HxW, columns, work.groups_at_once, work.per_group, *work.strides]
    constants = {"TILE": work.spec, "D": sizes.D, "FLOAT64": float64, "WANT": steps.wanted_gradients}
    add_launches(steps, work.cta_groups, mailbox, tile, group_norm_backward_rows, arguments, constants)
    if outputs:
        _add_sums(steps, partial, work.per_group, sizes, outputs)


def _add_sums(steps: Steps, partial: Scratch, cta_groups: int, sizes: Sizes, outputs: Sequence[Operand]) -> None:
    """Sum [outputs, cta_groups, C, HxW] over CTA groups and positions, in float64 and in a fixed order."""
    C, HxW = sizes.C, sizes.HxW
    positions = min(next_power_of_2(HxW), _SUM_TILE // 2)
    at_once = min(next_power_of_2(cta_groups), _SUM_TILE // positions)
    channels = max(min(_SUM_TILE // (positions * at_once), next_power_of_2(C) // 64), 1)
    segment = cdiv(_SUM_SEGMENT, cta_groups * positions) * positions
    segments = cdiv(HxW, segment)
    targets = outputs
    if segments > 1:
        shorter = steps.scratch(len(outputs) * segments * C, partial.dtype)
        size = segments * C * partial.dtype.itemsize
        targets = [Operand(replace(shorter, offset=shorter.offset + i * size), (1,)) for i in range(len(outputs))]
    first, second = (*targets, Operand(None, (1,)))[:2]
    arguments = [partial, first.pointer, second.pointer, *first.strides, *second.strides, cta_groups, C, HxW, segment]
    constants = {"CTA_GROUPS": at_once, "CHANNELS": channels, "POSITIONS": positions}
    grid = (cdiv(C, channels), segments, len(outputs))
    options = Options(_SUM_WARPS, ctas_per_sm=4, pdl=True)
    steps.add(Step(group_norm_backward_rows_sum_partials, grid, arguments, constants, options))
    if segments > 1:
        steps.sum_partials(shorter, segments, C, outputs)


def forward(
    sizes: Sizes, chip: Chip, steps: Steps, operands: Sequence[Operand], statistics: list[Operand], eps_bits: int
) -> None:
    """Add one launch over the rows. ``operands``: input, output as rows; ``statistics``: mean, rstd."""
    N, _, HxW, group = sizes
    columns = sizes.D * HxW
    tile = forward_group_row_tile(columns, _register_bytes(steps, operands, columns), chip)
    work = RowWork(sizes, tile, chip, operands, tile.parts, partial_sums=False)
    mailbox = Mailbox.of(steps, work.cta_groups, 2 * N * group)
    parameters = [steps.contiguous_input(name) for name in ("weight", "bias")]
    x, output = (operand.pointer for operand in work.operands)
    mean, rstd = statistics
    tensors = [x, *parameters, output, mean.pointer, rstd.pointer, mailbox.memory]
    counts = [N, group, HxW, columns, eps_bits, work.groups_at_once, work.per_group]
    arguments = [*tensors, *counts, *work.strides, mean.strides[0], rstd.strides[0]]
    few = steps.itemsize == FLOAT32.itemsize and tile.parts == 1 and tile.columns <= FEW_ELEMENTS
    constants = {
        "TILE": work.spec,
        "D": sizes.D,
        "FLOAT64": few,
        "SEGMENTS": forward_segments(tile, steps.itemsize),
    }
    add_launches(steps, work.cta_groups, mailbox, tile, group_norm_forward_rows, arguments, constants)
