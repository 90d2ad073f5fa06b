"""CTA groups: the CTAs that share rows of LayerNorm or groups of GroupNorm, and how they exchange partial sums.

CTAs that wait for each other are a cluster, which is resident as a whole, or belong to a cooperative launch, which
starts all of its CTAs or none. Where neither is possible, one launch computes the sums and the next one the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from normgrad.cuda.chip import Chip, cdiv
from normgrad.cuda.device.mailbox import APPLY, FUSED, REDUCE
from normgrad.cuda.group_norm.tiles import GroupTile
from normgrad.cuda.helper_kernels import clear_mailbox
from normgrad.cuda.launch import INT64, Argument, Options, Scratch, Step
from normgrad.cuda.layer_norm.tiles import RowTile
from normgrad.cuda.steps import Steps

_CLEAR_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Mailbox:
    """The workspace that ``device.mailbox`` exchanges partial sums through; none where no sums go through it."""

    memory: Scratch | None = None
    slots: int = 0


@dataclass(frozen=True, slots=True)
class CtaGroups:
    """How many CTA groups there are, how many of their CTAs exchange sums, and in how many launches."""

    tile: RowTile | GroupTile  # that a CTA group holds; tile.parts CTAs share it
    count: int  # CTA groups
    parts: int  # CTAs of a CTA group that exchange sums; 1 if none do, as where grad_input is not wanted
    fused: bool  # one launch computes sums and results; else one launch each
    cluster: bool = False  # a CTA group is a cluster; else, if parts > 1, sums go through a mailbox

    @classmethod
    def of(cls, parts: int, items: int, tile: RowTile | GroupTile, chip: Chip) -> CtaGroups:
        """Choose how ``parts`` CTAs exchange sums, and how many CTA groups there are.

        There are as many as are resident at once, but no more than work items.
        """
        resident_ctas = chip.multiprocessors * tile.ctas_per_sm
        if parts > 1 and tile.cluster:
            assert chip.max_active_clusters is not None
            resident_clusters = chip.max_active_clusters(parts, tile.ctas_per_sm)
            return cls(tile, max(min(items, resident_clusters), 1), parts, True, cluster=True)
        fused = parts == 1 or (chip.cooperative_launch and parts <= resident_ctas)
        return cls(tile, max(min(items, resident_ctas // tile.parts), 1), parts, fused)

    def mailbox(self, steps: Steps, slots_per_part: int) -> Mailbox:
        """Allocate a mailbox with ``slots_per_part`` slots for each of the parts, where the CTA groups need one."""
        if self.parts == 1 or self.cluster:
            return Mailbox()
        slots = slots_per_part * self.parts
        return Mailbox(steps.scratch(slots, INT64), slots)

    def add_launches(
        self, steps: Steps, mailbox: Mailbox, kernel: Any, arguments: Sequence[Argument], constants: Mapping[str, Any]
    ) -> None:
        """Add the launches of a kernel whose CTAs work in groups; ``constants`` are all but PHASE, which is set here.

        A launch that clears the mailbox comes before a cooperative one. Before two launches there is none: the second
        starts when the first has written all slots.
        """
        options = Options(self.tile.warps, self.tile.ctas_per_sm)
        grid = (self.count * self.tile.parts, 1, 1)

        def step(phase: Any, options: Options = options) -> Step:
            return Step(kernel, grid, arguments, {**constants, "PHASE": phase.value}, options)

        if self.parts == 1:
            steps.add(step(FUSED))
        elif self.cluster:
            steps.add(step(FUSED, replace(options, cluster=self.parts)))
        elif self.fused:
            clear_grid = (cdiv(mailbox.slots, _CLEAR_BLOCK), 1, 1)
            steps.add(
                Step(clear_mailbox, clear_grid, [mailbox.memory, mailbox.slots], {"BLOCK": _CLEAR_BLOCK}),
                step(FUSED, replace(options, cooperative=True, pdl=True)),
            )
        else:
            steps.add(step(REDUCE), step(APPLY))
