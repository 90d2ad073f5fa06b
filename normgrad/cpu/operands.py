"""Brings a problem's tensors into the form that kernels take, by copies through the workspace where that is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from normgrad.contract.dtypes import DType
from normgrad.contract.plan import Problem
from normgrad.contract.view import View, contiguous_strides
from normgrad.cpu.copy_steps import copy_step
from normgrad.cpu.steps import Place, Step, SteppedKernel, Workspace

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
