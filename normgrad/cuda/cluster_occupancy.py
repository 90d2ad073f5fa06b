"""How many clusters of CTAs can be resident on a GPU at once; ``backend.chip`` asks.

A cluster needs SMs of one GPC with room for all of its CTAs, so the driver is asked, not computed with.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable
from typing import Any

import torch

from normgrad.cuda.helper_kernels import clear_mailbox
from normgrad.cuda.launch import INT64, Scratch, Step, compiled
from normgrad.cuda.series import CLUSTER, allow_cluster, driver_library

_THREADS = 128
_RESERVED = 1024  # bytes of shared memory that the hardware takes for a CTA


def max_active_clusters(device: int) -> Callable[[int, int], int] | None:
    """Return a function of CTAs per cluster and CTAs per SM; None on GPUs without clusters."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return None
    return functools.partial(_max_active_clusters, device)


@functools.cache
def _max_active_clusters(device: int, cluster: int, ctas_per_sm: int) -> int:
    """Ask for a kernel with so much shared memory that ``ctas_per_sm`` CTAs fit on an SM; 0 if the driver refuses."""
    kernel = compiled(Step(clear_mailbox, (1, 1, 1), [Scratch(0, INT64), 1], {"BLOCK": 1024}), device)
    properties = torch.cuda.get_device_properties(device)
    shared = properties.shared_memory_per_multiprocessor // (ctas_per_sm + 1) + _RESERVED
    with torch.cuda.device(device):
        return _occupancy(driver_library(), kernel.function, cluster, shared)


def _occupancy(driver: Any, function: int, cluster: int, shared: int) -> int:
    attribute = array("q", [CLUSTER, cluster | 1 << 32, 1, *[0] * 6])
    threads = [cluster | 1 << 32, 1 | _THREADS << 32, 1 | 1 << 32]
    configuration = array("q", [*threads, shared, 0, attribute.buffer_info()[0], 1])
    found = ctypes.c_int()
    refused = allow_cluster(driver, function, cluster, shared)
    refused = refused or driver.cuOccupancyMaxActiveClusters(
        ctypes.byref(found), ctypes.c_void_p(function), ctypes.c_void_p(configuration.buffer_info()[0])
    )
    return 0 if refused else found.value
