"""The launches that follow GroupNorm's gradients: sums over samples and tiles, and what is to be computed once more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from normgrad.contract.dtypes import BFLOAT16, FLOAT16, FLOAT32
from normgrad.cuda.configurations import blocks
from normgrad.cuda.kernels.group_norm_finish import group_norm_finish
from normgrad.cuda.launch import FLOAT64, Argument, Options, Scratch, Step
from normgrad.cuda.problem import SEGMENT, Operand, Steps, sums_tile

CHUNK = 256  # numbers of a warp that are computed once more at a time
_WARPS = 8  # on a multiprocessor, so that a program finds room beside those of the launch before
_PER_WARP = 256  # sums that a warp looks at together
_AT_ONCE = 4096  # sums that a program has at a time

Sizes = tuple[int, int, int, int]


@dataclass(frozen=True)
class WeightSums:
    """The sums that each weight's gradient is made of: [tables, samples·parts, C]."""

    memory: Scratch
    parts: int  # of a sample's places
    tables: tuple[str, ...]  # the gradients that are made of them
    rounded: bool  # products, or results, may have been rounded as subnormals

    @classmethod
    def of(cls, steps: Steps, sizes: Sizes, parts: int, want: Mapping[str, bool], few: bool, exact: bool) -> WeightSums:
        """Room for them, float64 where they are ``exact``. Of ``few`` numbers all is float64.

        Elsewhere both of them tell what is to be computed once more; float16 has no numbers that small.
        """
        rounded = steps.dtype != FLOAT16 and not few and (want["WANT_INPUT"] or want["WANT_WEIGHT"])
        kept = {"grad_weight": want["WANT_WEIGHT"], "grad_bias": want["WANT_BIAS"]}
        tables = tuple(name for name, wanted in kept.items() if wanted or rounded)
        count = len(tables) * sizes[0] * parts * sizes[1]
        return cls(steps.scratch(max(count, 1), FLOAT64 if exact else FLOAT32), parts, tables, rounded)

    @property
    def want(self) -> dict[str, bool]:
        """Which of them a kernel makes."""
        return {"WANT_WEIGHT": "grad_weight" in self.tables, "WANT_BIAS": "grad_bias" in self.tables}


@dataclass(frozen=True)
class Finish:
    """What is left of a problem when all groups are done."""

    sizes: Sizes
    steps: Steps
    operands: Sequence[Operand]  # grad_out, input and grad_input
    vectors: Sequence[Argument]  # mean, rstd and weight
    outputs: Mapping[str, Operand]  # the gradients of weights that are wanted

    @property
    def tensors(self) -> list[Argument]:
        grad_out, x, grad_input = (operand.pointer for operand in self.operands)
        return [grad_out, x, *self.vectors, grad_input]

    def targets(self, tables: tuple[str, ...]) -> list[Operand]:
        """Where the sums of one or two tables belong; None where they are not wanted."""
        return [self.outputs.get(name, Operand(None, (1,))) for name in (*tables, "", "")][:2]

    def shorter(self, sums: WeightSums, rows: int) -> tuple[Scratch, list[Operand]]:
        """Room for so many rows of the same tables, all and each."""
        count = rows * self.sizes[1]
        memory = self.steps.scratch(len(sums.tables) * count, sums.memory.dtype)
        size = count * memory.dtype.itemsize
        return memory, [Operand(replace(memory, offset=memory.offset + place * size), (1,)) for place in range(2)]

    def add(self, sums: WeightSums) -> None:
        """Sum up over the rows, where there are many over stretches of them first, and look after groups."""
        N = self.sizes[0]
        rows = N * sums.parts if sums.tables else 0
        samples = max(SEGMENT // sums.parts, blocks(N, SEGMENT), 1)
        stretches = blocks(rows, samples * sums.parts)
        if stretches > 1 and self.outputs:
            shorter, targets = self.shorter(sums, stretches)
            self._add(sums, rows, samples * sums.parts, targets, groups=True, channels=False)
            self.add_sums(shorter, stretches, sums)
        else:
            segment = samples * sums.parts if stretches > 1 else max(rows, 1)
            self._add(sums, rows, segment, self.targets(sums.tables), groups=True, channels=True)

    def add_sums(self, memory: Scratch, rows: int, sums: WeightSums) -> None:
        """Sum up over rows that are of all samples, for the same tables."""
        sums = replace(sums, memory=memory, parts=1)
        self._add(sums, rows, rows, self.targets(sums.tables), groups=False, channels=True)

    def _add(
        self, sums: WeightSums, rows: int, segment: int, targets: list[Operand], groups: bool, channels: bool
    ) -> None:
        N, C, HxW, group = self.sizes
        width, height, _ = sums_tile(segment, C, max(len(sums.tables), 1))
        height = min(height, _AT_ONCE // width)
        warps = min(max(width * height // _PER_WARP, 1), _WARPS)
        want_input = groups and self.operands[2].pointer is not None
        constants = {
            "D": C // group,
            "PARTS": sums.parts,
            "ROWS": height,
            "COLUMNS": width,
            "CHUNK": CHUNK * warps,
            "NEAR_GROUPS": sums.rounded and want_input,
            "NEAR_CHANNELS": sums.rounded and channels and "grad_weight" in self.outputs,
            "INFINITE": want_input and self.vectors[2] is not None,
            "NARROW": self.steps.dtype == BFLOAT16,
        }
        first, second = targets
        made = [sums.memory, first.pointer, second.pointer, *first.strides, *second.strides]
        counts = [rows, segment, N, group, HxW]
        strides = [operand.strides for operand in self.operands]
        arguments = [*made, *self.tensors, *counts, *strides]
        grid = blocks(C, width), max(len(sums.tables), 1), max(blocks(rows, segment), 1)
        options = Options(warps, _WARPS // warps, follows=True)
        self.steps.add(Step(group_norm_finish, grid, arguments, constants, options))
