"""What the launches of all three memory layouts of GroupNorm take: sizes and partial sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.plan import Problem
from normgrad.cuda.launch import FLOAT64, Scratch
from normgrad.cuda.steps import Steps

#: Up to this many elements of a group, sums of float32 data are computed in float64: one float32 rounding would be a
#: visible share of the error bound.
FEW_ELEMENTS = 512


class Sizes(NamedTuple):
    """The sizes of a call, by their names in the contract."""

    N: int
    C: int
    HxW: int
    group: int

    @classmethod
    def of(cls, problem: Problem) -> Sizes:
        """Return a problem's sizes."""
        return cls(*(problem.attributes[name] for name in cls._fields))

    @property
    def D(self) -> int:  # noqa: N802 - the kernels' name
        """Channels of a group."""
        return self.C // self.group


@dataclass(frozen=True)
class PartialSums:
    """The partial sums of the weight gradients: [outputs, N·parts, C] in the workspace."""

    memory: Scratch
    parts: int  # of a sample's positions

    @classmethod
    def of(cls, steps: Steps, sizes: Sizes, parts: int, float64: bool) -> PartialSums:
        """Allocate them."""
        count = (steps.wants("grad_weight") + steps.wants("grad_bias")) * sizes.N * parts * sizes.C
        return cls(steps.scratch(max(count, 1), FLOAT64 if float64 else FLOAT32), parts)
