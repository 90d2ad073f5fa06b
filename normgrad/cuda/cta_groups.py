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
class CtaGroups:
    """How many CTA groups there are, how many of their CTAs exchange sums, and in how many launches."""

    tile: RowTile | GroupTile  # that a CTA group holds; tile.parts CTAs share it
    count: int  # CTA groups
    parts: int  # CTAs of a CTA group that exchange sums; 1 if none do, as where grad_input is not wanted
    fused: bool  # one launch computes sums and results; else one launch each

    @classmethod
    def of(cls, parts: int, items: int, tile: RowTile | GroupTile, chip: Chip) -> CtaGroups:
        """Choose how ``parts`` CTAs exchange sums, and how many CTA groups there are.

        There are as many as are resident at once, but no more than work items.
        """
        resident_ctas = chip.multiprocessors * tile.ctas_per_sm
        if parts > 1 and tile.cluster:
            assert chip.max_active_clusters is not None
            resident_clusters = chip.max_active_clusters(parts, tile.ctas_per_sm)
            return cls(tile, max(min(items, resident_clusters), 1), parts, True)
        fused = parts == 1 or (chip.cooperative_launch and parts <= resident_ctas)
        return cls(tile, max(min(items, resident_ctas // tile.parts), 1), parts, fused)

    @property
    def cluster(self) -> bool:
        """A CTA group is a cluster. Otherwise, if ``parts`` exceeds 1, sums go through a mailbox."""
        return self.parts > 1 and self.tile.cluster

    def mailbox(self, steps: Steps, slots_per_part: int) -> Scratch | None:
        """Allocate a mailbox with ``slots_per_part`` slots for each of the parts; None where none is needed.

        A cooperative launch comes right after the launch that clears the mailbox, which is added here. Before two
        launches there is none: the second starts when the first has written all slots.
        """
        if self.parts == 1 or self.cluster:
            return None
        slots = slots_per_part * self.parts
        mailbox = steps.scratch(slots, INT64)
        if self.fused:
            grid = (cdiv(slots, _CLEAR_BLOCK), 1, 1)
            steps.add(Step(clear_mailbox, grid, [mailbox, slots], {"BLOCK": _CLEAR_BLOCK}))
        return mailbox

    def add_launches(
        self, steps: Steps, kernel: Any, arguments: Sequence[Argument], constants: Mapping[str, Any]
    ) -> None:
        """Add the launches of a kernel whose CTAs work in groups; ``constants`` are all but PHASE."""
        options = Options(self.tile.warps, self.tile.ctas_per_sm)
        if self.cluster:
            options = replace(options, cluster=self.parts)
        elif self.parts > 1 and self.fused:
            options = replace(options, cooperative=True, pdl=True)
        grid = (self.count * self.tile.parts, 1, 1)
        for phase in [FUSED] if self.fused else [REDUCE, APPLY]:
            steps.add(Step(kernel, grid, arguments, {**constants, "PHASE": phase.value}, options))
