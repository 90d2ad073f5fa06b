"""Compilation of CUDA kernels before a benchmark, in several processes: Triton compiles one at a time in a process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

#: Each process holds a CUDA context, hundreds of megabytes of the device's memory, beside its data.
_MOST_PROCESSES = 12

Item = TypeVar("Item")


def compile_ahead(compile_one: Callable[[Item], None], items: Sequence[Item], most: int = _MOST_PROCESSES) -> None:
    """Call a function for every item, so that the caches on disk have the kernels that it compiles.

    Function and items must be picklable. An error is raised here. ``most`` is the largest number of processes.
    """
    if len(items) < 2:  # the benchmark's own process compiles a single one as quickly
        return
    processes = min(len(items), os.cpu_count() or 1, most)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        list(pool.map(compile_one, items))
