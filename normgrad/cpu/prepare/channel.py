"""The descriptor of GroupNorm's and BatchNorm's kernels: samples x channels x positions, and how work is split."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.view import Shape, reshaped_strides
from normgrad.cpu import limits
from normgrad.cpu.compile.kernel_lookup import Kernel
from normgrad.cpu.descriptors import Channel, ChannelTensor
from normgrad.cpu.prepare.launch import Step
from normgrad.cpu.prepare.staging import Operands, is_large, padded, strides_of_copy
from normgrad.cpu.tags import COLUMNS, ROWS, TAGS
from normgrad.cpu.threads import pool


class ChannelLayout:
    """The descriptor of one call, while it is built.

    ``tensors`` maps the names of the large tensors to the descriptor's: grad_out, input, result.
    """

    def __init__(self, operands: Operands, sizes: Shape, tensors: dict[str, str]) -> None:
        self.operands = operands
        self.desc = Channel()
        self.tensors = tensors
        self.sizes: Any = sizes
        own = {name: operands.with_layout(name, lambda v: reshaped_strides(v, sizes, (0, 0, 0))) for name in tensors}
        self.strides = {name: list(strides) for name, strides in own.items()}
        self.columns = False

    def choose_layout(self, converted: Collection[str] = ()) -> None:
        """Choose rows or columns, whichever needs fewer copies, and copy the tensors that are neither.

        Those that are ``converted`` get float32 copies in either case.
        """
        _, channels, positions = self.sizes
        if 0 in self.sizes:
            return
        in_place = [
            s for name, s in self.strides.items() if name not in converted and not self.operands.is_copied(name)
        ]
        # A row of one position would be a chunk of its own.
        if channels > 1 and (positions == 1 or sum(s[1] != 1 for s in in_place) < sum(s[2] != 1 for s in in_place)):
            self.columns = self._copy_to((0, 2, 1), converted)
        if not self.columns:
            self._copy_to((0, 1, 2), converted)

    def _copy_to(self, order: Shape, converted: Collection[str]) -> bool:
        """Copy tensors that are converted or not contiguous along the last of the axes; copies have the axes in order.

        Return False, and copy nothing, where the shape of one of them, any in GroupNorm, does not allow this order.
        """
        axis = order[-1]
        copies: dict[str, tuple[Shape, Shape]] = {}
        for name, own in self.strides.items():
            if name in converted or (self.sizes[axis] > 1 and own[axis] != 1):
                found = self._strides_of_copy(name, order, (axis,)) or self._strides_of_copy(name, order, order)
                if found is None:
                    return False
                copies[name] = found
        for name, (of_tensor, of_sizes) in copies.items():
            self.operands.copy(name, FLOAT32 if name in converted else None, of_tensor)
            self.strides[name] = list(of_sizes)
        return True

    def _strides_of_copy(self, name: str, order: Shape, filled: Shape) -> tuple[Shape, Shape] | None:
        """Return the strides of a tensor's copy in its own shape and in ``sizes``; None where its shape has none."""
        view = self.operands.view(name)
        as_sizes = replace(view, shape=self.sizes, strides=tuple(self.strides[name]))
        strides = strides_of_copy(as_sizes, order, filled)
        found = reshaped_strides(replace(as_sizes, strides=strides), view.shape, (1,) * view.rank)
        return None if found is None else (found, strides)

    def merge_samples(self) -> None:
        """Treat samples that are contiguous in columns as one."""
        samples, channels, positions = self.sizes
        strides = self.strides.values()
        if self.columns and positions == 1:
            self.sizes = (1, channels, samples)
            self.strides = {name: [0, 1, s[0]] for name, s in self.strides.items()}
        elif self.columns and all(s[0] == positions * s[2] for s in strides):
            self.sizes = (1, channels, samples * positions)
            self.strides = {name: [0, 1, s[2]] for name, s in self.strides.items()}

    def describe(self, groups: int, phases_above: int | None = None) -> None:
        """Fill in sizes, strides and the split of the work; units of more elements are processed in phases."""
        samples, channels, positions = self.sizes
        desc, chunk = self.desc, limits.COLUMN_CHUNK_POSITIONS if self.columns else limits.ROW_CHUNK
        desc.samples, desc.channels, desc.positions, desc.groups = samples, channels, positions, groups
        desc.chunk_positions, desc.chunks = chunk, -(-positions // chunk)
        desc.group_channels = channels // groups
        desc.unit_groups = groups if self.columns else _groups_together(groups, desc.group_channels * positions)
        desc.units = samples * (groups // desc.unit_groups)
        unit_channels = desc.unit_groups * desc.group_channels
        size, several = unit_channels * positions, 1
        # Short rows make a chunk together: reaching a chunk would be most of the work. A power of two of them: chunks
        # of contiguous rows then begin at cache lines.
        if 0 < positions <= chunk:
            several = max(1, min(unit_channels, 1 << (limits.SHORT_ROWS_CHUNK // positions).bit_length() >> 1))
        desc.chunk_channels = several
        desc.unit_chunks = desc.chunks if self.columns else -(-unit_channels // several) * desc.chunks
        chunk_elements = min(positions, chunk) * (channels if self.columns else several)
        desc.chunks_per_take = max(1, limits.TAKEN_ELEMENTS // max(1, chunk_elements))
        desc.units_per_take = max(1, min(limits.TAKEN_ELEMENTS // max(1, size), desc.units // (8 * pool.slots())))
        # In rows the vector that stores the last coefficients of a group may go on behind the last channel.
        desc.padded_channels, desc.slots = padded(channels if self.columns else channels + 15), pool.slots()
        if phases_above is not None:
            is_few = desc.units < limits.FEW_UNITS and size * desc.units > limits.PHASES_FROM
            desc.in_phases = size > phases_above or is_few
            if not desc.in_phases:
                units = groups // desc.unit_groups
                desc.block_samples = max(1, min(limits.BLOCK // max(size * units, 1), samples // limits.MOST_BLOCKS))
                if desc.block_samples > 1:
                    desc.units_per_take = desc.block_samples * units
        for name, own in self.tensors.items():
            n, c, position = self.strides[name]
            setattr(desc, own, ChannelTensor(self.operands.pointer(name), n, c, position))
        if "result" in self.tensors.values():
            nbytes = samples * channels * positions * self.operands.staged("input").dtype.itemsize
            desc.is_large = is_large(nbytes, len(self.tensors) - 1)

    def add_vectors(self, *names: str, **renamed: str) -> None:
        """Describe small tensors, those that are there; ``field=name`` where the descriptor has another name."""
        for own, name in {**{name: name for name in names}, **renamed}.items():
            setattr(self.desc, own, self.operands.vector(name))

    @property
    def sample_blocks(self) -> int:
        """How many blocks of samples there are."""
        return -(-self.desc.samples // self.desc.block_samples)

    def take_partials(self) -> None:
        """Reserve workspace for the sums of every chunk; the samples of a block share theirs."""
        parts = max(1, self.sample_blocks * self.desc.chunks)
        self.desc.partials = self.operands.workspace.take(parts * 2 * self.desc.padded_channels * 8)

    def take_statistics(self, count: int) -> None:
        """Reserve workspace for so many pairs of float64."""
        self.desc.statistics = self.operands.workspace.take(count * 16)

    def take_coefficients(self, arrays: int) -> None:
        """Reserve workspace for so many arrays of float32, with an element per channel."""
        self.desc.coefficients = self.operands.workspace.take(arrays * self.desc.padded_channels * 4)

    def step(self, kernel: Kernel) -> Step:
        """Return the step that calls a kernel with this descriptor."""
        several = self.desc.units * self.desc.unit_chunks > 1
        shared = pool.shared(math.prod(self.sizes)) if several else 0
        dtype, layout = TAGS[self.operands.staged("input").dtype], COLUMNS if self.columns else ROWS
        return Step(kernel, self.desc, dtype, layout, shared=shared)


def _groups_together(groups: int, size: int) -> int:
    """Return how many groups of so many elements make a unit in rows: a divisor of all of them."""
    most = max(limits.SMALL_GROUPS // max(size, 1), 1)
    return next(n for n in range(min(groups, most), 0, -1) if groups % n == 0)
