"""Programs that share rows or groups, and whether they can wait for each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from normgrad.cuda.chip import Chip, blocks
from normgrad.cuda.device.common import OUTPUTS, SUMS, WHOLE
from normgrad.cuda.group_norm.tiles import GroupTile
from normgrad.cuda.helper_kernels import empty_slots
from normgrad.cuda.launch import INT64, Argument, Options, Scratch, Step
from normgrad.cuda.layer_norm.tiles import RowTile
from normgrad.cuda.steps import Steps

Tile = RowTile | GroupTile
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Teams:
    """How many CTA groups ("teams") there are, of how many CTAs that exchange sums, and in how many launches.

    CTAs that wait for each other are a cluster, which is resident as a whole, or belong to a cooperative launch, which
    starts all of its CTAs or none. Where neither can be had, one launch makes the sums and the next one the results.
    """

    count: int
    parts: int
    together: bool
    cluster: bool = False

    @classmethod
    def of(cls, parts: int, items: int, tile: Tile, chip: Chip) -> Teams:
        """As many teams as run side by side, and no more than there are items of work."""
        room = chip.multiprocessors * tile.resident
        if parts > 1 and tile.cluster:
            assert chip.clusters is not None
            return cls(max(min(items, chip.clusters(parts, tile.resident)), 1), parts, True, cluster=True)
        together = parts == 1 or (chip.concurrent and parts <= room)
        return cls(max(min(items, room // tile.parts), 1), parts, together)


@dataclass(frozen=True, slots=True)
class Slots:
    """Room for the two sums of every part of every row or group; none where there is one part."""

    memory: Scratch | None
    count: int

    @classmethod
    def of(cls, steps: Steps, teams: Teams, items: int) -> Slots:
        if teams.parts == 1 or teams.cluster:
            return cls(None, 0)
        count = items * teams.parts
        return cls(steps.scratch(count, INT64), count)


def assemble(
    steps: Steps,
    teams: Teams,
    slots: Slots,
    kernel: Any,
    tile: Tile,
    arguments: Sequence[Argument],
    constants: Mapping[str, Any],
) -> None:
    """Add the launches of a kernel whose programs work in teams; its last constant is the phase."""
    options = Options(tile.warps, tile.resident)
    grid = (teams.count * tile.parts, 1, 1)
    whole = {**constants, "PHASE": WHOLE.value}
    if teams.parts == 1:
        steps.add(Step(kernel, grid, arguments, whole, options))
    elif teams.cluster:
        steps.add(Step(kernel, grid, arguments, whole, replace(options, cluster=teams.parts)))
    elif teams.together:
        steps.add(
            Step(empty_slots, (blocks(slots.count, _BLOCK), 1, 1), [slots.memory, slots.count], {"BLOCK": _BLOCK}),
            Step(kernel, grid, arguments, whole, replace(options, cooperative=True, follows=True)),
        )
    else:
        for phase in (SUMS.value, OUTPUTS.value):
            steps.add(Step(kernel, grid, arguments, {**constants, "PHASE": phase}, options))
