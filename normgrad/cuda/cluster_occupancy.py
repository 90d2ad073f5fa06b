"""How many clusters of CTAs can be resident on a GPU at once; ``backend.chip`` asks.

A cluster needs multiprocessors of one GPC with room for all of its CTAs, so the driver is asked.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import triton

from normgrad.cuda.driver_launch import NotLaunchable, allow_cluster, cluster_attribute, launch_config, load_driver
from normgrad.cuda.helper_kernels import clear_mailbox
from normgrad.cuda.launch import INT64, Scratch, Step, compiled

#: What the kernels that run in clusters were run with. With others they are launched without clusters.
CHECKED_CAPABILITY = (9, 0)
CHECKED_TRITON = "3.6."

_THREADS = 128
_RESERVED = 1024  # bytes of shared memory that the hardware takes for a CTA


def cluster_occupancy(device: int) -> Callable[[int, int], int] | None:
    """Return a function of CTAs per cluster and CTAs per SM to the number of resident clusters.

    None on a GPU without clusters, where cuda-bindings, which launches them, is not installed, and with a GPU or a
    Triton that they were not checked with.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0) or load_driver() is None:
        return None
    problem = unchecked(capability, triton.__version__)
    if problem is not None:
        logging.getLogger("normgrad").warning("kernels are launched without clusters: %s", problem)
        return None
    return functools.partial(_occupancy, device)


def unchecked(capability: tuple[int, int], triton_version: str) -> str | None:
    """Return why clusters are not used with a GPU and a Triton, or None where they were checked."""
    if capability != CHECKED_CAPABILITY:
        found, checked = (".".join(map(str, version)) for version in (capability, CHECKED_CAPABILITY))
        return f"compute capability {found} was not checked with them, {checked} was"
    if not triton_version.startswith(CHECKED_TRITON):
        return f"Triton {triton_version} was not checked with them, {CHECKED_TRITON}x was"
    return None


@functools.cache
def _occupancy(device: int, ctas: int, ctas_per_sm: int) -> int:
    """Ask for a kernel with so much shared memory that ``ctas_per_sm`` CTAs fit on an SM; 0 without an answer."""
    kernel = compiled(Step(clear_mailbox, (1, 1, 1), [Scratch(0, INT64), 1], {"BLOCK": 1024}), device)
    properties = torch.cuda.get_device_properties(device)
    shared = properties.shared_memory_per_multiprocessor // (ctas_per_sm + 1) + _RESERVED
    with torch.cuda.device(device):
        return max_active_clusters(load_driver(), kernel.function, ctas, shared)


def max_active_clusters(driver: Any, function: int, ctas: int, shared: int) -> int:
    """Return how many clusters of a kernel are resident at once; 0 where the driver does not say."""
    handle = driver.CUfunction(function)
    config = launch_config(driver, (ctas, 1, 1), _THREADS, shared, [cluster_attribute(driver, ctas)])
    try:
        allow_cluster(driver, handle, ctas, shared)
    except NotLaunchable:
        return 0
    status, found = driver.cuOccupancyMaxActiveClusters(handle, config)
    return 0 if status else int(found)
