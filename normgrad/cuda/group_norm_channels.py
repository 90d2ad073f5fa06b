"""The launches of GroupNorm where the channels of a place lie side by side in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normgrad.contract.dtypes import FLOAT32
from normgrad.cuda.configurations import ChannelsTile, Chip, blocks, channels_tile, power_of_two
from normgrad.cuda.kernels import group_norm_channels as kernels
from normgrad.cuda.kernels import group_norm_channels_forward as forward_kernels
from normgrad.cuda.launch import INT64, Argument, Options, Scratch, Step
from normgrad.cuda.problem import VECTOR_ACCESS, Operand, Steps, paired

_ENTRIES = 1024

Sizes = tuple[int, int, int, int]


@dataclass(frozen=True)
class Blocks:
    """How the data is cut into blocks, parts and tiles, in words of ``kernels.group_norm_blocks``."""

    sizes: Sizes
    itemsize: int
    tile: ChannelsTile

    @property
    def depth(self) -> int:
        """The channels of a group."""
        return self.sizes[1] // self.sizes[3]

    @property
    def count(self) -> int:
        return blocks(self.sizes[1], self.tile.channels)

    @property
    def part(self) -> int:
        """The places of a part."""
        return self.tile.places * self.tile.steps

    @property
    def parts(self) -> int:
        return blocks(self.sizes[2], self.part)

    @property
    def tiles(self) -> int:
        """How many tiles of results a block has."""
        return blocks(self.sizes[2], self.tile.result_places)

    @property
    def over(self) -> int:
        """How many blocks may have channels of a group."""
        if self.tile.channels % self.depth == 0 or self.depth % self.tile.channels == 0:
            return blocks(self.depth, self.tile.channels)
        return min(blocks(self.depth - 1, self.tile.channels) + 1, self.count)

    @property
    def entries(self) -> int:
        return self.sizes[0] * self.sizes[3] * self.parts * self.over

    def _constants(self, places: int, operands: Sequence[Operand]) -> dict[str, Any]:
        D, channels = self.depth, self.tile.channels
        reach = max(places * abs(place) + channels * abs(channel) for _, channel, place in _strides(operands))
        return {
            "D": D,
            "CHANNELS": channels,
            "GROUPS": channels // D if channels % D == 0 else power_of_two((channels - 1) // D + 2),
            "PARTS": self.parts,
            "OVER": self.over,
            "PLACES": places,
            "MASKED": self.sizes[2] % places != 0 or self.sizes[1] % channels != 0,
            "WIDE": max(reach, self.sizes[1]) >= 2**31,
        }

    def sums(
        self, kernel: Any, arguments: Sequence[Argument], constants: Mapping[str, Any], operands: Sequence[Operand]
    ) -> Step:
        """The launch that makes entries."""
        tile = self.tile
        rows = tile.warps * 32 * (VECTOR_ACCESS // self.itemsize) // tile.channels
        own = {"ROWS": min(max(rows, 1), tile.places), "STEPS": tile.steps}
        if self.sizes[2] % self.part:
            own["MASKED"] = True
        every = self._constants(tile.places, operands) | own | dict(constants)
        grid = self.sizes[0] * self.parts * self.count, 1, 1
        return Step(kernel, grid, [*arguments, *_flat(operands)], every, Options(tile.warps, tile.resident))

    def results(
        self, kernel: Any, arguments: Sequence[Argument], constants: Mapping[str, Any], operands: Sequence[Operand]
    ) -> Step:
        """The launch that makes results of entries."""
        tile = self.tile
        every = self._constants(tile.result_places, operands) | dict(constants)
        every["ENTRIES"] = min(max(_ENTRIES // every["GROUPS"], 16), power_of_two(self.parts * self.over))
        grid = self.sizes[0] * self.tiles * self.count, 1, 1
        return Step(kernel, grid, arguments, every, Options(tile.result_warps, tile.result_resident, follows=True))


def _strides(operands: Sequence[Operand]) -> list[tuple[int, ...]]:
    return [operand.strides for operand in operands if operand.pointer is not None]


def _flat(operands: Sequence[Operand]) -> list[int]:
    return [stride for operand in operands for stride in operand.strides]


def backward(
    sizes: Sizes, chip: Chip, steps: Steps, operands: list[Operand], want: dict[str, bool]
) -> tuple[Scratch, int]:
    """The launches of the backward pass; gives the weight sums of the parts, and how many rows they have."""
    N, C, HxW, group = sizes
    cut = Blocks(sizes, steps.itemsize, channels_tile(C, HxW, steps.itemsize, chip, 2))
    rows = N * cut.parts
    partial = steps.scratch(max((want["WANT_WEIGHT"] + want["WANT_BIAS"]) * rows * C, 1), FLOAT32)
    sums = steps.scratch(cut.entries, INT64)
    vectors = [steps.vector(name) for name in ("mean", "rstd", "weight")]
    pairs, operands = paired(operands, C, axis=1)
    grad_out, x, grad_input = operands
    inputs = [grad_out.pointer, x.pointer, *vectors]
    arguments = [*inputs, partial, sums, N, group, cut.count, HxW]
    steps.add(cut.sums(kernels.group_norm_channel_sums, arguments, {"PAIRS": pairs} | want, [grad_out, x]))
    if want["WANT_INPUT"]:
        arguments = [*inputs, grad_input.pointer, sums, group, cut.count, cut.tiles, HxW, *_flat(operands)]
        steps.add(cut.results(kernels.group_norm_channel_gradients, arguments, {"PAIRS": pairs}, operands))
    return partial, rows


def forward(
    sizes: Sizes, chip: Chip, steps: Steps, operands: list[Operand], statistics: list[Operand], eps_bits: int
) -> None:
    """The launches of the forward pass."""
    _, C, HxW, group = sizes
    cut = Blocks(sizes, steps.itemsize, channels_tile(C, HxW, steps.itemsize, chip, 1))
    moments = steps.scratch(2 * cut.entries, INT64)
    vectors = [steps.vector(name) for name in ("weight", "bias")]
    pairs, operands = paired(operands, C, axis=1)
    x, output = operands
    inputs = [x.pointer, moments, group, cut.count, HxW]
    steps.add(cut.sums(forward_kernels.group_norm_channel_moments, inputs, {"PAIRS": pairs}, [x]))
    pointers = [x.pointer, *vectors, output.pointer, *(statistic.pointer for statistic in statistics), moments]
    counts = group, cut.count, cut.tiles, HxW, eps_bits
    arguments = [*pointers, *counts, *_flat([*operands, *statistics])]
    constants = {"PAIRS": pairs, "PART": cut.part}
    steps.add(cut.results(forward_kernels.group_norm_channel_outputs, arguments, constants, operands))
