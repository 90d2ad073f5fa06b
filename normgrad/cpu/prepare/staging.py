"""Brings a problem's tensors into the form that kernels take, by copies through the workspace where that is needed.

Steps that copy between layouts and dtypes: small vectors to float32, awkward strides to contiguous memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from normgrad.contract.dtypes import INT32, DType
from normgrad.contract.plan import Problem
from normgrad.contract.view import View, contiguous_strides
from normgrad.cpu.compile.kernel_lookup import Kernel
from normgrad.cpu.fields import copy as at
from normgrad.cpu.prepare.axes import collapsed_together
from normgrad.cpu.prepare.launch import Place, Step, SteppedKernel, Workspace
from normgrad.cpu.tags import CODES
from normgrad.cpu.threads import pool

Layout = TypeVar("Layout")


# Bytes up to which a result stays in the caches beside what is read, by how many tensors of its size are.
_KEPT = {1: 16 << 20, 2: 7 << 20}


def goes_past_caches(nbytes: int, read: int) -> bool:
    """Whether a result of so many bytes is too large for the caches, where ``read`` tensors of its size are read."""
    return nbytes > _KEPT[read]


class Operands:
    """The tensors of a problem with the steps that bring them in and out."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.workspace = Workspace()
        self._numbers = {name: number for number, name in enumerate(problem.views)}
        self._before: list[Step] = []
        self._after: list[Step] = []
        self._copies: dict[str, tuple[Place, View]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    def view(self, name: str) -> View:
        return self.problem.views[name]

    def place(self, name: str) -> Place:
        """Where a tensor lies, or its copy where there is one."""
        return self._copies[name][0] if name in self._copies else Place(self._numbers[name])

    def laid(self, name: str) -> View:
        """The layout of a tensor, or of its copy where there is one."""
        return self._copies[name][1] if name in self._copies else self.view(name)

    def copied(self, name: str, dtype: DType | None = None) -> View:
        """A contiguous copy of a tensor: filled before the kernel for an input, emptied after it for an output."""
        view = self.view(name)
        dtype = dtype or view.dtype
        copy = self.workspace.take(view.numel * dtype.itemsize)
        if self.problem.signature.is_written(name):
            self._after.append(copy_step(view, Place(self._numbers[name]), copy, dtype, outwards=True))
        else:
            self._before.append(copy_step(view, Place(self._numbers[name]), copy, dtype))
        layout = View(0, view.shape, contiguous_strides(view.shape), dtype, view.storage)
        self._copies[name] = copy, layout
        return layout

    def laid_out(self, name: str, layout: Callable[[View], Layout | None]) -> Layout:
        """What a function of the view says of its layout, of a contiguous copy where it says None."""
        found = layout(self.laid(name))
        if found is None:
            found = layout(self.copied(name))
        assert found is not None
        return found

    def sharing(self, output: str) -> list[str]:
        """The inputs whose memory an output may reach."""
        reach = self.view(output).reach
        inputs = [name for name in self.problem.views if not self.problem.signature.is_output(name)]
        return [name for name in inputs if name != output and reach.intersects(self.view(name).reach)]

    def lies_on(self, output: str, name: str) -> bool:
        """Whether an output and an input are the same elements of the same memory."""
        one, other = self.view(output), self.view(name)
        return one.address == other.address and one.same_layout(other)

    def kernel(self, *steps: Step) -> SteppedKernel:
        """The kernel that brings the operands in, runs these steps and brings the results out."""
        return SteppedKernel(self.workspace.size, [*self._before, *steps, *self._after])


_COPY = Kernel("normgrad.cpu.kernels.copy", "copy")
_FILL = Kernel("normgrad.cpu.kernels.copy", "fill")
_COPIED = {**CODES, INT32: 0}  # integers are copied to integers alone: bit for bit, as float32 are
_GRAIN = 1 << 16  # elements that are taken at a time


def fill_step(place: Place, stride: int, dtype: DType, count: int, value: float) -> Step:
    """A step that stores one value in all ``count`` elements of a vector."""
    bits = int(np.float64(value).view(np.int64))
    return Step(_FILL, np.array([0, stride, CODES[dtype], count, bits], np.int64), ((at.VECTOR, place),))


def copy_step(view: View, place: Place, copy_place: Place, copy_dtype: DType, *, outwards: bool = False) -> Step:
    """A step that copies a view to a contiguous copy of a dtype, or the copy back out to the view."""
    sizes, (own, dense) = collapsed_together(view.shape, (view.strides, contiguous_strides(view.shape)))
    missing = at.RANK - len(sizes)
    sizes, own, dense = [1] * missing + sizes, [0] * missing + own, [0] * missing + dense
    descriptor = np.zeros(at.DESCRIPTOR_SIZE, np.int64)
    length = sizes[-1]
    lines = view.numel // length if length else 0
    descriptor[[at.LINES, at.LENGTH, at.GRAIN]] = lines, length, max(1, _GRAIN // max(length, 1))
    ends = [(own, _COPIED[view.dtype], place), (dense, _COPIED[copy_dtype], copy_place)]
    (source, source_code, source_place), (target, target_code, target_place) = reversed(ends) if outwards else ends
    descriptor[[at.SOURCE_CODE, at.TARGET_CODE]] = source_code, target_code
    descriptor[at.SIZES : at.SOURCE_STRIDES] = sizes
    descriptor[at.SOURCE_STRIDES : at.TARGET_STRIDES] = source
    descriptor[at.TARGET_STRIDES :] = target
    places = ((at.SOURCE, source_place), (at.TARGET, target_place))
    return Step(_COPY, descriptor, places, shared=pool.shared(view.numel))
