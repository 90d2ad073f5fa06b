"""Real processes that run one function each, as the ranks of a process group over gloo."""

from __future__ import annotations

import datetime
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: Seconds that a rank waits for another in a collective.
PATIENCE = 60.0

Job = Callable[..., Any]


def run_ranks(world: int, job: Job, folder: Path, *args: Any, killed: int | None = None) -> list[Any]:
    """What ``job(*args)`` returns on every rank; the rank that is to be killed returns None."""
    context = mp.get_context("spawn")
    processes = [context.Process(target=_run, args=(rank, world, job, folder, args)) for rank in range(world)]
    for process in processes:
        process.start()
    try:
        _join(processes, 2 * PATIENCE)
    finally:
        for process in processes:
            process.kill()
    results: list[Any] = []
    for rank, process in enumerate(processes):
        if rank == killed:
            assert process.exitcode == -9
            results.append(None)
            continue
        file = folder / f"{rank}.pt"
        assert file.exists(), f"rank {rank} left no result; its exit status is {process.exitcode}"
        good, result = torch.load(file, weights_only=False)
        assert good, f"rank {rank}: {result}"
        results.append(result)
    return results


def _join(processes: list[Any], timeout: float) -> None:
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))


def _run(rank: int, world: int, job: Job, folder: Path, args: tuple[Any, ...]) -> None:
    import normgrad

    warnings.simplefilter("error")
    # Dynamo's own doing, with every autograd function that it traces.
    warnings.filterwarnings("ignore", ".* should not be instantiated", DeprecationWarning)
    torch.set_num_threads(1)
    normgrad.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=(folder / "meeting").as_uri(),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=PATIENCE),
    )
    try:
        result = (True, job(*args))
    except BaseException:
        result = (False, traceback.format_exc())
    torch.save(result, folder / f"{rank}.part")
    (folder / f"{rank}.part").rename(folder / f"{rank}.pt")
    sys.stdout.flush()
    os._exit(0)  # a process group with a dead rank may not be taken down in good order
