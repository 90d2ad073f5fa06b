"""How many clusters of programs a GPU runs side by side: they need multiprocessors that lie together."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable
from typing import Any

import torch

from normgrad.cuda.helper_kernels import empty_slots
from normgrad.cuda.launch import INT64, Scratch, Step, compiled
from normgrad.cuda.series import CLUSTER, allow_cluster, driver_library

_THREADS = 128
_RESERVED = 1024  # bytes of shared memory that the hardware takes for a program


def clusters(device: int) -> Callable[[int, int], int] | None:
    """A function of the programs of a cluster, and how many run on a multiprocessor; None on GPUs without clusters."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return None
    return functools.partial(_side_by_side, device)


@functools.cache
def _side_by_side(device: int, programs: int, resident: int) -> int:
    """Asked for a kernel that takes as much shared memory as leaves room for so many; 0 where there is no answer."""
    kernel = compiled(Step(empty_slots, (1, 1, 1), [Scratch(0, INT64), 1], {"BLOCK": 1024}), device)
    properties = torch.cuda.get_device_properties(device)
    shared = properties.shared_memory_per_multiprocessor // (resident + 1) + _RESERVED
    with torch.cuda.device(device):
        return _asked(driver_library(), kernel.function, programs, shared)


def _asked(driver: Any, function: int, programs: int, shared: int) -> int:
    attribute = array("q", [CLUSTER, programs | 1 << 32, 1, *[0] * 6])
    threads = [programs | 1 << 32, 1 | _THREADS << 32, 1 | 1 << 32]
    configuration = array("q", [*threads, shared, 0, attribute.buffer_info()[0], 1])
    found = ctypes.c_int()
    refused = allow_cluster(driver, function, programs, shared)
    refused = refused or driver.cuOccupancyMaxActiveClusters(
        ctypes.byref(found), ctypes.c_void_p(function), ctypes.c_void_p(configuration.buffer_info()[0])
    )
    return 0 if refused else found.value
