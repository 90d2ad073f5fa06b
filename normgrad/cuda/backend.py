"""The backend ``cuda``: problems on NVIDIA GPUs."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from normgrad.contract.plan import Problem
from normgrad.contract.view import Memory
from normgrad.cuda import batch_norm, group_norm, layer_norm
from normgrad.cuda.configurations import Chip
from normgrad.cuda.launch import Launcher, chip, launcher
from normgrad.cuda.problem import ALIGNMENT, Steps, zero_bits

OPERATORS: dict[str, Callable[[Problem, Chip], Steps]] = {
    "layer_norm_backward": layer_norm.backward,
    "layer_norm": layer_norm.forward,
    "group_norm_backward": group_norm.backward,
    "group_norm": group_norm.forward,
    "batch_norm_elemt_backward": batch_norm.elemt_backward,
    "batch_norm_elemt": batch_norm.elemt,
    "batch_norm_reduce_backward": batch_norm.reduce_backward,
    "batch_norm_stats": batch_norm.stats,
    "batch_norm_gather_stats_with_counts": batch_norm.gather,
}


def aligned(workspace: int) -> int:
    """The first address in the workspace that the kernels use."""
    return -(-workspace // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class _Kernel:
    workspace_size: int
    problem: Problem
    device: int
    counted_on: list[int]  # the bits of each address that the compiled code takes for zero
    launchers: list[Launcher]
    lent: Mapping[int, torch.Tensor]

    def launch(self, addresses: Sequence[int], workspace: int, stream: Any) -> None:
        """Put the launches on a stream: a PyTorch stream, a raw handle, or by default the device's current one."""
        if torch._C._cuda_getDevice() == self.device:
            self._launch_here(addresses, workspace, stream)
        else:
            with torch.cuda.device(self.device):
                self._launch_here(addresses, workspace, stream)

    def _launch_here(self, addresses: Sequence[int], workspace: int, stream: Any) -> None:
        current = torch._C._cuda_getCurrentRawStream(self.device)
        handle = current
        if stream is not None:
            handle = getattr(stream, "cuda_stream", stream)
            self._keep_until_done(workspace, handle, current)
        first = aligned(workspace)
        for launch in self._launchers_for(addresses):
            launch(addresses, first, handle)

    def _launchers_for(self, addresses: Sequence[int]) -> list[Launcher]:
        """The launches, compiled anew where they count on an alignment that these addresses do not have."""
        if any(map(operator.and_, addresses, self.counted_on)):
            views = self.problem.views.items()
            moved = {name: view.at(place) for (name, view), place in zip(views, addresses, strict=True)}
            return _prepared(replace(self.problem, views=moved), self.device)[1]
        return self.launchers

    def _keep_until_done(self, workspace: int, handle: int, current: int) -> None:
        """Memory that we brought goes back to the current stream's pool, but not before this stream is done with it."""
        memory = self.lent.get(workspace)
        if memory is not None and handle != current:
            memory.record_stream(torch.cuda.ExternalStream(handle, device=self.device))


_device = functools.cache(torch.device)


def _prepared(problem: Problem, device: int) -> tuple[int, list[Launcher]]:
    """The size of the workspace, and the launches."""
    steps = OPERATORS[problem.signature.name](problem, chip(device))
    names = list(problem.views)
    return steps.workspace_size, [launcher(step, names, device) for step in steps.steps]


class _Cuda:
    name = "cuda"

    def __init__(self) -> None:
        self._lent: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def prepare(self, problem: Problem) -> _Kernel:
        device = int(problem.device.partition(":")[2] or 0)
        size, launchers = _prepared(problem, device)
        counted_on = [zero_bits(address) for address in problem.addresses]
        return _Kernel(size, problem, device, counted_on, launchers, self._lent)

    def allocate(self, nbytes: int, device: str) -> Memory:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=_device(device))
        address = tensor.data_ptr()
        self._lent[address] = tensor
        return Memory(address, nbytes, device, owner=tensor)


backend = _Cuda()
