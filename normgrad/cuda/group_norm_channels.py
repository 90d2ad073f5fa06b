"""The launches of GroupNorm where the channels of a place lie side by side in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from normgrad.cuda.configurations import ChannelsTile, Chip, blocks, power_of_two
from normgrad.cuda.kernels.common import OUTPUTS, SUMS, WHOLE, empty_slots
from normgrad.cuda.launch import FLOAT64, INT64, Argument, Options, Scratch, Step
from normgrad.cuda.problem import Operand, Steps

_BLOCK = 1024
_ENTRIES = 1024


@dataclass(frozen=True)
class Items:
    """The items of work of a problem, and the programs that share them; in words of ``kernels.group_norm_blocks``."""

    tile: ChannelsTile
    D: int
    group: int
    samples: int
    parts: int
    section: int
    sections: int
    programs: int
    concurrent: bool

    @classmethod
    def of(cls, sizes: tuple[int, int, int, int], tile: ChannelsTile, chip: Chip) -> Items:
        N, C, HxW, group = sizes
        D, parts = C // group, blocks(HxW, tile.places)
        channel_blocks = blocks(C, tile.channels)
        section = min(D // math.gcd(tile.channels, D), channel_blocks)
        sections = blocks(channel_blocks, section)
        count = N * sections * section * parts
        rounds = blocks(count, chip.multiprocessors * tile.resident)
        return cls(tile, D, group, N, parts, section, sections, blocks(count, rounds), chip.concurrent)

    @property
    def alone(self) -> bool:
        """Whether no group has several items."""
        return self.parts * self.section == 1

    @property
    def lag(self) -> int:
        """After how many rounds all items of an item's section have been begun."""
        return blocks(self.parts * self.section - 1, self.programs)

    @property
    def overlap(self) -> int:
        """How many blocks may have channels of a group."""
        if self.tile.channels % self.D == 0 or self.D % self.tile.channels == 0:
            return blocks(self.D, self.tile.channels)
        return min(blocks(self.D - 1, self.tile.channels) + 1, self.section)

    @property
    def entries(self) -> int:
        """How many sums of groups there are."""
        return 1 if self.alone else self.samples * self.group * self.parts * self.overlap

    def constants(self, HxW: int, operands: Sequence[Operand]) -> dict[str, Any]:
        """The kernels' constants, but for what is wanted and the phase."""
        tile, D = self.tile, self.D
        strides = [operand.strides for operand in operands]
        reach = max(tile.places * abs(place) + tile.channels * abs(channel) for _, channel, place in strides)
        count = self.samples * self.sections * self.section * self.parts
        groups = tile.channels // D if tile.channels % D == 0 else (tile.channels - 1) // D + 2
        section_groups = power_of_two(min(self.group, blocks(self.section * tile.channels, D)))
        return {
            "D": D,
            "PLACES": tile.places,
            "CHANNELS": tile.channels,
            "GROUPS": power_of_two(groups),
            "PARTS": self.parts,
            "SECTION": self.section,
            "SECTION_GROUPS": section_groups,
            "OVER": self.overlap,
            "ENTRIES": min(max(_ENTRIES // section_groups, 16), power_of_two(self.parts * self.overlap)),
            "MASKED": HxW % tile.places != 0 or self.group * D % tile.channels != 0,
            "WIDE": max(reach, count + (self.lag + 1) * self.programs, self.group * D) >= 2**31,
            "STAGES": tile.stages,
        }


@dataclass(frozen=True)
class Signals:
    """How many items of each section are done, and what its groups' sums have come to."""

    arrivals: Scratch
    totals: Scratch

    @classmethod
    def of(cls, steps: Steps, items: Items) -> Signals:
        arrivals = steps.scratch(items.samples * items.sections, INT64)
        return cls(arrivals, steps.scratch(2 * items.samples * items.group, FLOAT64))


def assemble(
    steps: Steps,
    items: Items,
    signals: Signals,
    kernel: Any,
    arguments: Sequence[Argument],
    constants: Mapping[str, Any],
    outputs: bool = True,
) -> None:
    """Add the launches: one if the programs can wait for each other or need not, otherwise one for each phase."""
    tile = items.tile
    options = Options(tile.warps, tile.resident)
    grid = items.programs, 1, 1

    def launch(phase: int, options: Options, lag: int = 0) -> Step:
        held = tile.held and lag == 1
        return Step(kernel, grid, arguments, {**constants, "LAG": lag, "HELD": held, "PHASE": phase}, options)

    if items.alone or not outputs:
        steps.add(launch(WHOLE.value, options))
        return
    count = items.samples * items.sections
    steps.add(Step(empty_slots, (blocks(count, _BLOCK), 1, 1), [signals.arrivals, count], {"BLOCK": _BLOCK}))
    if items.concurrent:
        steps.add(launch(WHOLE.value, replace(options, cooperative=True, follows=True), items.lag))
    else:
        steps.add(launch(SUMS.value, options), launch(OUTPUTS.value, options))
