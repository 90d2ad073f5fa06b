"""How GroupNorm's and BatchNorm's tensors are described to their kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from normgrad.contract.view import Shape, View
from normgrad.cpu.compile.kernel_lookup import Kernel
from normgrad.cpu.fields import channel as at
from normgrad.cpu.prepare.axes import collapsed, strides_along
from normgrad.cpu.prepare.launch import Place, Step
from normgrad.cpu.prepare.staging import Operands, fill_step, goes_past_caches
from normgrad.cpu.tags import CODES
from normgrad.cpu.threads import pool

_ROW_CHUNK = 2048  # places
_COLUMN_CHUNK = 128  # places
_GRAIN = 32768  # elements that are taken at a time
_APART_FROM = 1 << 18  # elements of few units, whose threads would have nothing to do
_LANES = 32


def single_stride(view: View) -> int | None:
    """The one stride that walks through all of a view's elements in order."""
    axes = collapsed(view.shape, view.strides)
    return None if len(axes) > 1 else axes[0][1] if axes else 1


def separate(operands: Operands, output: str, in_place: tuple[str, ...]) -> None:
    """Give a large output a copy of its own, unless it lies on inputs that are read place by place, or shares none."""
    if not all(name in in_place and operands.lies_on(output, name) for name in operands.sharing(output)):
        operands.copied(output)


class Layout:
    """The descriptor of one call, while it is made: samples × channels × places."""

    def __init__(self, operands: Operands, sizes: Shape, tensors: dict[str, int]) -> None:
        self.operands = operands
        self.desc = np.zeros(at.DESC_SIZE, np.int64)
        self.places: list[tuple[int, Place]] = []
        self.tensors = tensors
        self.sizes: Any = sizes
        found = {name: operands.laid_out(name, lambda view: strides_along(view, sizes)) for name in tensors}
        self.strides = {name: list(strides) for name, strides in found.items()}
        self.columns = False

    def lay(self, *, any_strides: bool = False) -> None:
        """Choose rows or columns, and copy tensors that are neither."""
        _, channels, places = self.sizes
        self.columns = channels > 1 and all(s[1] == 1 for s in self.strides.values())
        self.columns = self.columns and (places == 1 or any(s[2] != 1 for s in self.strides.values()))
        if self.columns or any_strides or places == 1 or 0 in self.sizes:
            return
        for name, strides in self.strides.items():
            if strides[2] != 1:
                self.operands.copied(name)
                self.strides[name] = [channels * places, places, 1]

    def merge_samples(self) -> None:
        """Take samples that follow each other in columns as one."""
        samples, channels, places = self.sizes
        strides = self.strides.values()
        if self.columns and places == 1:
            self.sizes = (1, channels, samples)
            self.strides = {name: [0, 1, s[0]] for name, s in self.strides.items()}
        elif self.columns and all(s[0] == places * s[2] for s in strides):
            self.sizes = (1, channels, samples * places)
            self.strides = {name: [0, 1, s[2]] for name, s in self.strides.items()}

    def describe(self, groups: int, *, apart_from: int | None = None) -> None:
        """Fill in sizes, strides and the split of the work; units of more bytes than ``apart_from`` are taken apart."""
        samples, channels, places = self.sizes
        desc, chunk = self.desc, _COLUMN_CHUNK if self.columns else _ROW_CHUNK
        chunks = -(-places // chunk)
        desc[[at.SAMPLES, at.CHANNELS, at.PLACES, at.GROUPS, at.CHUNK, at.CHUNKS]] = (
            samples, channels, places, groups, chunk, chunks,
        )  # fmt: skip
        units = samples if self.columns else samples * groups
        per_unit = channels // groups
        # Short rows come several at a time: the way to a chunk would be the most of the work. A power of two of them:
        # chunks of rows that follow each other then begin where cache lines do.
        at_once = max(1, min(per_unit, 1 << (chunk // max(places, 1)).bit_length() >> 1))
        desc[at.CHANNELS_AT_ONCE] = at_once
        desc[[at.UNITS, at.UNIT_CHUNKS]] = units, chunks if self.columns else -(-per_unit // at_once) * chunks
        size = samples * channels * places // max(units, 1)
        desc[at.GRAIN] = max(1, _GRAIN // max(1, min(places, chunk) * (channels if self.columns else at_once)))
        desc[at.UNITS_AT_ONCE] = max(1, min(_GRAIN // max(1, size), units // (8 * pool.slots())))
        pitch = -(-channels // _LANES) * _LANES
        desc[[at.PITCH, at.SLOTS]] = pitch, pool.slots()
        if apart_from is not None:
            desc[at.APART] = size > apart_from or (units < 8 and size * units > _APART_FROM)
        for name, position in self.tensors.items():
            desc[position + 1 : position + 4] = self.strides[name]
            desc[position + 4] = CODES[self.operands.laid(name).dtype]
            self.places.append((position, self.operands.place(name)))
        if at.RESULT in self.tensors.values():
            nbytes = samples * channels * places * self.operands.view("input").dtype.itemsize
            desc[at.STREAM] = goes_past_caches(nbytes, len(self.tensors) - 1)

    def vector(self, name: str, position: int) -> None:
        """Describe a small tensor, if it is there."""
        if name in self.operands:
            stride = self.operands.laid_out(name, single_stride)
            self.desc[[position + 1, position + 2]] = stride, CODES[self.operands.view(name).dtype]
            self.places.append((position, self.operands.place(name)))

    def take(self, position: int, nbytes: int) -> None:
        """Take a piece of the workspace."""
        self.places.append((position, self.operands.workspace.take(nbytes)))

    @property
    def pitch(self) -> int:
        return int(self.desc[at.PITCH])

    def take_partials(self) -> None:
        samples, chunks = int(self.desc[at.SAMPLES]), int(self.desc[at.CHUNKS])
        self.take(at.PARTIALS, max(1, samples * chunks) * 2 * self.pitch * 8)

    def take_tables(self, count: int) -> None:
        self.take(at.TABLES, count * (at.PLANES * self.pitch + at.SPARE) * 4)

    def step(self, kernel: Kernel, *tags: Any) -> Step:
        """The step that calls a kernel with this descriptor."""
        samples, channels, places = self.sizes
        several = self.desc[at.UNITS] * self.desc[at.UNIT_CHUNKS] > 1
        shared = pool.shared(samples * channels * places) if several else 0
        return Step(kernel, self.desc, tuple(self.places), tags, shared)


def fills(operands: Operands, value: float, *names: str) -> list[Step]:
    """Steps that fill small outputs with a value, where they are wanted."""
    steps = []
    for name in names:
        if name in operands:
            stride = operands.laid_out(name, single_stride)
            view = operands.view(name)
            steps.append(fill_step(operands.place(name), stride, view.dtype, view.numel, value))
    return steps
