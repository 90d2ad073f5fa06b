"""The backend ``cuda``: problems on NVIDIA GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from normgrad.contract.plan import Problem
from normgrad.cuda.batch_norm import launches as batch_norm
from normgrad.cuda.chip import Chip
from normgrad.cuda.driver_launch import DriverLaunches, NotLaunchable, cluster_occupancy
from normgrad.cuda.group_norm import launches as group_norm
from normgrad.cuda.launch import compiled
from normgrad.cuda.layer_norm import launches as layer_norm
from normgrad.cuda.layout_checks import UnexpectedLayout
from normgrad.cuda.plain import PlainKernel
from normgrad.cuda.steps import Steps
from normgrad.log import warn_once

OPERATORS: dict[str, Callable[[Problem, Chip], Steps]] = {
    "layer_norm_backward": layer_norm.backward,
    "layer_norm": layer_norm.forward,
    "group_norm_backward": group_norm.backward,
    "group_norm": group_norm.forward,
    "batch_norm_elemt_backward": batch_norm.elemt_backward,
    "batch_norm_elemt": batch_norm.elemt,
    "batch_norm_reduce_backward": batch_norm.reduce_backward,
    "batch_norm_stats": batch_norm.stats,
    "batch_norm_gather_stats_with_counts": batch_norm.gather_stats,
}


@dataclass(frozen=True)
class _Kernel:
    workspace_size: int
    device: int
    launches: DriverLaunches

    def launch(self, addresses: Sequence[int], workspace: int, stream: Any) -> None:
        """Put the launches on a stream: a PyTorch stream, a raw handle, or by default the device's current one."""
        handle = _handle(stream, self.device)
        if has_one_device() or torch.cuda.current_device() == self.device:
            self.launches.launch(addresses, workspace, handle)
        else:
            with torch.cuda.device(self.device):
                self.launches.launch(addresses, workspace, handle)


@functools.cache
def has_one_device() -> bool:
    """Return whether there is one GPU, which is then the current one: asking PyTorch takes 0.4 µs of every call."""
    return torch.cuda.device_count() == 1


def _handle_by_object(device: int) -> int:
    handle: int = torch.cuda.current_stream(device).cuda_stream
    return handle


#: The handle of a device's current stream. PyTorch has no public function for it that does not make an object first.
_current_handle: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _handle_by_object)


def _handle(stream: Any, device: int) -> int:
    """Return the handle of a PyTorch stream, a raw handle, or by default the handle of the device's current stream."""
    handle: int = _current_handle(device) if stream is None else getattr(stream, "cuda_stream", stream)
    return handle


class _Workspace(NamedTuple):
    address: int
    tensor: torch.Tensor


_device = functools.cache(torch.device)


@functools.cache
def chip(device: int) -> Chip:
    """Return the properties of a GPU that tile sizes depend on."""
    properties = torch.cuda.get_device_properties(device)
    return Chip(
        properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_multiprocessor,
        max_active_clusters=cluster_occupancy(device),
    )


class _Cuda:
    name = "cuda"

    def prepare(self, problem: Problem) -> _Kernel | PlainKernel:
        """Prepare launches, without clusters if need be, or else the plain path; the log says what is not used."""
        device = int(problem.device.partition(":")[2] or 0)
        for properties in (chip(device), replace(chip(device), max_active_clusters=None)):
            try:
                return self._prepare(problem, device, properties)
            except (UnexpectedLayout, NotLaunchable) as error:  # noqa: PERF203 - of two attempts
                warn_once(f"a kernel of {problem.signature.name} is not used: {error}")
        return PlainKernel(problem)

    def _prepare(self, problem: Problem, device: int, chip: Chip) -> _Kernel:
        with torch.cuda.device(device):
            torch.cuda.set_device(device)  # the driver is asked about kernels, and a new thread has no context
            steps = OPERATORS[problem.signature.name](problem, chip)
            kernels = [compiled(step, device) for step in steps.steps]
            launches = DriverLaunches(steps.steps, kernels, list(problem.views), device)
            return _Kernel(steps.workspace_size, device, launches)

    def allocate(self, nbytes: int, device: str, stream: Any = None) -> _Workspace:
        """Allocate from the current stream's pool; where the work is on another stream, freeing waits for that."""
        where = _device(device)
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=where)
        if stream is not None:
            handle = _handle(stream, where.index)
            if handle != _current_handle(where.index):
                tensor.record_stream(torch.cuda.ExternalStream(handle, device=where))
        return _Workspace(tensor.data_ptr(), tensor)


backend = _Cuda()
