"""The launches of GroupNorm where the channels of a position are contiguous (channels_last)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.view import Shape
from normgrad.cuda.chip import VECTOR_BYTES, Chip, cdiv, next_power_of_2
from normgrad.cuda.device.pack16 import UNPACKED
from normgrad.cuda.group_norm import channels_last_kernels as kernels
from normgrad.cuda.group_norm.tiles import (
    FEW_ELEMENTS,
    ChannelsLastTile,
    ChannelsLastTileSpec,
    EntrySpec,
    Sizes,
    channels_last_tile,
)
from normgrad.cuda.launch import FLOAT64, INT64, Argument, Options, Step
from normgrad.cuda.operands import Operand, pack_operands, present
from normgrad.cuda.steps import Steps

_ENTRY_TILE = 1024  # entries of all groups of a program that are added up at a time
_STATISTICS_GROUPS = 4  # of a program of the statistics kernel


@dataclass(frozen=True)
class ChannelBlocks:
    """How the data is split into blocks of channels, parts of positions and tiles; see ``channels_last_kernels``."""

    sizes: Sizes
    itemsize: int
    tile: ChannelsLastTile

    @property
    def blocks(self) -> int:
        """Blocks of channels."""
        return cdiv(self.sizes.C, self.tile.channels)

    @property
    def part_positions(self) -> int:
        """Positions of a part, which one program reduces."""
        return self.tile.positions * self.tile.steps

    @property
    def parts(self) -> int:
        """Parts of a sample's positions."""
        return cdiv(self.sizes.HxW, self.part_positions)

    @property
    def apply_tiles(self) -> int:
        """Tiles of results of a block."""
        return cdiv(self.sizes.HxW, self.tile.apply_positions)

    @property
    def blocks_per_group(self) -> int:
        """Blocks in which a group may have channels."""
        D, channels = self.sizes.D, self.tile.channels
        if channels % D == 0 or D % channels == 0:
            return cdiv(D, channels)
        return min(cdiv(D - 1, channels) + 1, self.blocks)

    @property
    def groups(self) -> int:
        """Groups that may have channels in a block; a power of two."""
        D, channels = self.sizes.D, self.tile.channels
        return channels // D if channels % D == 0 else next_power_of_2((channels - 1) // D + 2)

    @property
    def entries(self) -> EntrySpec:
        """The partial sums of a group."""
        return EntrySpec(self.sizes.D, self.tile.channels, self.parts, self.blocks_per_group)

    @property
    def entry_count(self) -> int:
        """Partial sums of all groups."""
        return self.sizes.N * self.sizes.group * self.parts * self.blocks_per_group

    def entries_at_once(self, groups: int, smallest: int = 1) -> int:
        """Return how many entries of each group a program with ``groups`` groups adds up at a time."""
        return min(max(_ENTRY_TILE // groups, smallest), next_power_of_2(self.parts * self.blocks_per_group))

    def _tile_spec(self, positions: int, steps: int, packing: int, operands: Sequence[Operand]) -> ChannelsLastTileSpec:
        """Describe tiles of ``positions``, of which a program has so many; ``operands`` are packed."""
        channels = self.tile.channels
        rows = self.tile.warps * 32 * (VECTOR_BYTES // self.itemsize) // channels
        strides = [operand.strides for operand in present(operands)]
        extent = max(positions * abs(position) + channels * abs(channel) for _, channel, position in strides)
        return ChannelsLastTileSpec(
            D=self.sizes.D,
            channels=channels,
            words=channels if packing == UNPACKED.value else channels // 2,
            positions=positions,
            groups=self.groups,
            rows=min(max(rows, 1), positions),
            steps=steps,
            stages=self.tile.stages,
            packing=packing,
            masked=self.sizes.HxW % (positions * steps) != 0 or self.sizes.C % channels != 0,
            offset64=max(extent, 2 * self.sizes.C) >= 2**31,
        )

    def reduce_step(
        self, kernel: Any, arguments: Sequence[Argument], packing: int, operands: Sequence[Operand], **constants: Any
    ) -> Step:
        """Return the launch that computes the entries; ``operands`` are packed."""
        tile = self.tile
        spec = self._tile_spec(tile.positions, tile.steps, packing, operands)
        every = {"TILE": spec, "ENTRIES": self.entries, **constants}
        grid = self.sizes.N * self.parts * self.blocks, 1, 1
        return Step(kernel, grid, [*arguments, *_strides(operands)], every, Options(tile.warps, tile.ctas_per_sm))

    def apply_step(
        self, kernel: Any, arguments: Sequence[Argument], packing: int, operands: Sequence[Operand], **constants: Any
    ) -> Step:
        """Return the launch that computes the results; ``operands`` are packed."""
        tile = self.tile
        every = {"TILE": self._tile_spec(tile.apply_positions, 1, packing, operands), **constants}
        grid = self.sizes.N * self.apply_tiles * self.blocks, 1, 1
        options = Options(tile.apply_warps, tile.apply_ctas_per_sm, pdl=True)
        return Step(kernel, grid, [*arguments, *_strides(operands)], every, options)


def _strides(operands: Sequence[Operand]) -> list[Shape]:
    return [operand.strides for operand in operands]


def backward(sizes: Sizes, chip: Chip, steps: Steps, operands: list[Operand], outputs: list[Operand]) -> None:
    """Add a launch that reduces, one that computes grad_input, and one that adds up the weight gradients' partial sums.

    ``operands``: grad_out, input, grad_input over (N, C, HxW); ``outputs``: the weight gradients that are wanted.
    """
    N, C, HxW, group = sizes
    itemsize = steps.narrowest_itemsize
    work = ChannelBlocks(sizes, itemsize, channels_last_tile(C, HxW, group, itemsize, chip, 2))
    one_entry = work.parts * work.blocks_per_group == 1
    few = steps.itemsize == FLOAT32.itemsize and one_entry and sizes.D * work.part_positions <= FEW_ELEMENTS
    parameters = [steps.contiguous_input(name) for name in ("mean", "rstd", "weight")]
    partial = steps.partial_sums(len(outputs), N * work.parts, C, float64=few)
    sums = steps.scratch(work.entry_count * (2 if few else 1), INT64)
    packing, operands = pack_operands(operands, C, axis=1)
    grad_out, x, grad_input = operands
    inputs = [grad_out.pointer, x.pointer, *parameters]
    arguments = [*inputs, partial, sums, N, group, work.blocks, HxW]
    kernel = kernels.group_norm_backward_channels_last_reduce
    steps.add(work.reduce_step(kernel, arguments, packing, [grad_out, x], FLOAT64=few, WANT=steps.wanted_gradients))
    if steps.wants("grad_input"):
        arguments = [*inputs, grad_input.pointer, sums, group, work.blocks, work.apply_tiles, HxW]
        at_once = work.entries_at_once(work.groups, smallest=16)
        constants = {"ENTRIES": work.entries, "ENTRIES_AT_ONCE": at_once, "FLOAT64": few}
        kernel = kernels.group_norm_backward_channels_last_apply
        steps.add(work.apply_step(kernel, arguments, packing, operands, **constants))
    if outputs:
        steps.sum_partials(partial, N * work.parts, C, outputs)


def forward(
    sizes: Sizes, chip: Chip, steps: Steps, operands: list[Operand], statistics: list[Operand], eps_bits: int
) -> None:
    """Add launches for the moments of blocks, the statistics of groups, and the output.

    ``operands``: input, output over (N, C, HxW); ``statistics``: mean, rstd.
    """
    N, C, HxW, group = sizes
    itemsize = steps.narrowest_itemsize
    work = ChannelBlocks(sizes, itemsize, channels_last_tile(C, HxW, group, itemsize, chip, 1))
    moments = steps.scratch(2 * work.entry_count, INT64)
    statistics64 = steps.scratch(2 * N * group, FLOAT64)
    parameters = [steps.contiguous_input(name) for name in ("weight", "bias")]
    packing, operands = pack_operands(operands, C, axis=1)
    x, output = operands
    arguments: list[Argument] = [x.pointer, moments, group, work.blocks, HxW]
    steps.add(work.reduce_step(kernels.group_norm_forward_channels_last_moments, arguments, packing, [x]))
    mean, rstd = statistics
    arguments = [moments, statistics64, mean.pointer, rstd.pointer, group, HxW, eps_bits]
    constants = {
        "ENTRIES": work.entries,
        "GROUPS": _STATISTICS_GROUPS,
        "PART_POSITIONS": work.part_positions,
        "ENTRIES_AT_ONCE": work.entries_at_once(_STATISTICS_GROUPS),
    }
    grid = N * cdiv(group, _STATISTICS_GROUPS), 1, 1
    kernel = kernels.group_norm_forward_channels_last_statistics
    steps.add(Step(kernel, grid, [*arguments, mean.strides[0], rstd.strides[0]], constants, Options(pdl=True)))
    arguments = [x.pointer, *parameters, output.pointer, statistics64, group, work.blocks, work.apply_tiles, HxW]
    steps.add(work.apply_step(kernels.group_norm_forward_channels_last_apply, arguments, packing, operands))
