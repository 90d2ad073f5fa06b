"""The backend ``cuda``: problems on NVIDIA GPUs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from normgrad.contract.plan import Problem
from normgrad.contract.view import Memory, View
from normgrad.cuda import batch_norm, group_norm, layer_norm
from normgrad.cuda.configurations import Chip
from normgrad.cuda.launch import Launcher, launcher, multiprocessors
from normgrad.cuda.problem import ALIGNMENT, Steps

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
    device: int
    launchers: list[Launcher]
    lent: Mapping[int, torch.Tensor]

    def launch(self, views: Mapping[str, View], workspace: int, stream: Any) -> None:
        """Put the launches on a stream: a PyTorch stream, a raw handle, or by default the device's current one."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream(self.device)
            if stream is None:
                handle = current.cuda_stream
            else:
                handle = getattr(stream, "cuda_stream", stream)
                self._keep_until_done(workspace, handle, current.cuda_stream)
            first = aligned(workspace)
            for launch in self.launchers:
                launch(views, first, handle)

    def _keep_until_done(self, workspace: int, handle: int, current: int) -> None:
        """Memory that we brought goes back to the current stream's pool, but not before this stream is done with it."""
        memory = self.lent.get(workspace)
        if memory is not None and handle != current:
            memory.record_stream(torch.cuda.ExternalStream(handle, device=self.device))


class _Cuda:
    name = "cuda"

    def __init__(self) -> None:
        self._lent: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def prepare(self, problem: Problem) -> _Kernel:
        index = int(problem.device.partition(":")[2] or 0)
        steps = OPERATORS[problem.signature.name](problem, Chip(multiprocessors(index)))
        launchers = [launcher(step, index) for step in steps.steps]
        return _Kernel(steps.workspace_size, index, launchers, self._lent)

    def allocate(self, nbytes: int, device: str) -> Memory:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._lent[tensor.data_ptr()] = tensor
        return Memory(tensor.data_ptr(), nbytes, device, owner=tensor)


backend = _Cuda()
