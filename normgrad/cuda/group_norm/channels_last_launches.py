"""The launches of GroupNorm where the channels of a place lie side by side in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.view import Shape
from normgrad.cuda.chip import VECTOR_ACCESS, Chip, blocks, power_of_two
from normgrad.cuda.group_norm import channels_last_backward_kernels as kernels
from normgrad.cuda.group_norm import channels_last_forward_kernels as forward_kernels
from normgrad.cuda.group_norm.tiles import ChannelsTile, channels_tile
from normgrad.cuda.launch import FLOAT64, INT64, Argument, Options, Scratch, Step
from normgrad.cuda.steps import Operand, Steps, paired

_ENTRIES = 1024
_GROUPS = 4  # of a program that makes their statistics
FEW = 512  # numbers of a group: their roundings are seen in its sums, so these are float64


Sizes = tuple[int, int, int, int]


@dataclass(frozen=True)
class WeightSums:
    """The partial sums that the weight gradients are made of: [outputs, samples·parts, C]."""

    memory: Scratch
    parts: int  # of a sample's spatial positions

    @classmethod
    def of(cls, steps: Steps, sizes: Sizes, parts: int, want: Mapping[str, bool], exact: bool) -> WeightSums:
        """Memory for them, float64 where they are ``exact``."""
        outputs = want["WANT_WEIGHT"] + want["WANT_BIAS"]
        count = outputs * sizes[0] * parts * sizes[1]
        return cls(steps.scratch(max(count, 1), FLOAT64 if exact else FLOAT32), parts)


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
        strides = [operand.strides for operand in operands if operand.pointer is not None]
        channels = self.tile.channels
        reach = max(places * abs(place) + channels * abs(channel) for _, channel, place in strides)
        return {
            "D": self.depth,
            "CHANNELS": channels,
            "PLACES": places,
            "MASKED": self.sizes[2] % places != 0 or self.sizes[1] % channels != 0,
            "WIDE": max(reach, 2 * self.sizes[1]) >= 2**31,
        }

    @property
    def grouping(self) -> dict[str, Any]:
        """What the kernels have to know of entries."""
        D, channels = self.depth, self.tile.channels
        groups = channels // D if channels % D == 0 else power_of_two((channels - 1) // D + 2)
        return {"GROUPS": groups, "PARTS": self.parts, "OVER": self.over}

    @property
    def entries_at_a_time(self) -> int:
        return min(max(_ENTRIES // int(self.grouping["GROUPS"]), 16), power_of_two(self.parts * self.over))

    def sums(
        self, kernel: Any, arguments: Sequence[Argument], constants: Mapping[str, Any], operands: Sequence[Operand]
    ) -> Step:
        """The launch that makes entries."""
        tile = self.tile
        rows = tile.warps * 32 * (VECTOR_ACCESS // self.itemsize) // tile.channels
        own = {"ROWS": min(max(rows, 1), tile.places), "STEPS": tile.steps, "STAGES": tile.stages}
        if self.sizes[2] % self.part:
            own["MASKED"] = True
        every = self._constants(tile.places, operands) | self.grouping | own | dict(constants)
        grid = self.sizes[0] * self.parts * self.count, 1, 1
        return Step(kernel, grid, [*arguments, *_strides(operands)], every, Options(tile.warps, tile.resident))

    def results(
        self, kernel: Any, arguments: Sequence[Argument], constants: Mapping[str, Any], operands: Sequence[Operand]
    ) -> Step:
        """The launch that makes results."""
        tile = self.tile
        every = self._constants(tile.result_places, operands) | dict(constants)
        grid = self.sizes[0] * self.tiles * self.count, 1, 1
        return Step(
            kernel,
            grid,
            [*arguments, *_strides(operands)],
            every,
            Options(tile.result_warps, tile.result_resident, follows=True),
        )


def _strides(operands: Sequence[Operand]) -> list[Shape]:
    return [operand.strides for operand in operands]


def backward(
    sizes: Sizes, chip: Chip, steps: Steps, operands: list[Operand], vectors: list[Argument], want: dict[str, bool]
) -> WeightSums:
    """The launches of the backward pass; gives the weight sums of the parts."""
    N, C, HxW, group = sizes
    cut = Blocks(sizes, steps.itemsize, channels_tile(C, HxW, group, steps.itemsize, chip, 2))
    few = steps.itemsize == FLOAT32.itemsize and cut.parts * cut.over == 1 and cut.depth * cut.part <= FEW
    weight_sums = WeightSums.of(steps, sizes, cut.parts, want, exact=few)
    sums = steps.scratch(cut.entries * (2 if few else 1), INT64)
    pairs, operands = paired(operands, C, axis=1)
    grad_out, x, grad_input = operands
    inputs = [grad_out.pointer, x.pointer, *vectors]
    arguments = [*inputs, weight_sums.memory, sums, N, group, cut.count, HxW]
    constants = {"PAIRS": pairs, "EXACT": few} | want
    steps.add(cut.sums(kernels.group_norm_channel_sums, arguments, constants, [grad_out, x]))
    if want["WANT_INPUT"]:
        arguments = [*inputs, grad_input.pointer, sums, group, cut.count, cut.tiles, HxW]
        constants = cut.grouping | {"ENTRIES": cut.entries_at_a_time, "PAIRS": pairs, "EXACT": few}
        steps.add(cut.results(kernels.group_norm_channel_gradients, arguments, constants, operands))
    return weight_sums


def forward(
    sizes: Sizes, chip: Chip, steps: Steps, operands: list[Operand], statistics: list[Operand], eps_bits: int
) -> None:
    """The launches of the forward pass."""
    N, C, HxW, group = sizes
    cut = Blocks(sizes, steps.itemsize, channels_tile(C, HxW, group, steps.itemsize, chip, 1))
    moments = steps.scratch(2 * cut.entries, INT64)
    totals = steps.scratch(2 * N * group, FLOAT64)
    vectors = [steps.vector(name) for name in ("weight", "bias")]
    pairs, operands = paired(operands, C, axis=1)
    x, output = operands
    inputs = [x.pointer, moments, group, cut.count, HxW]
    steps.add(cut.sums(forward_kernels.group_norm_channel_moments, inputs, {"PAIRS": pairs}, [x]))
    mean, rstd = statistics
    constants = cut.grouping | {"D": cut.depth, "CHANNELS": cut.tile.channels, "PART": cut.part}
    constants |= {"GROUPS": _GROUPS, "ENTRIES": min(_ENTRIES // _GROUPS, power_of_two(cut.parts * cut.over))}
    made = [
        moments,
        totals,
        mean.pointer,
        rstd.pointer,
        group,
        HxW,
        eps_bits,
        *(statistic.strides[0] for statistic in statistics),
    ]
    grid = N * blocks(group, _GROUPS), 1, 1
    kernel = forward_kernels.group_norm_channel_statistics
    steps.add(Step(kernel, grid, made, constants, Options(follows=True)))
    normalised = [x.pointer, *vectors, output.pointer, totals, group, cut.count, cut.tiles, HxW]
    steps.add(cut.results(forward_kernels.group_norm_channel_outputs, normalised, {"PAIRS": pairs}, operands))
