"""What synchronised BatchNorm costs: a training step in two processes over gloo, against BatchNorm without exchange.

    python benchmarks/sync_batch_norm.py --json benchmarks/results/sync_batch_norm.json

writes the results of which pages.py makes the table of docs/guides/sync_batch_norm.md: medians in seconds. A step is
the forward pass and all gradients; every process has its own batch of the given shape and one thread. "exchange" are
the two collectives alone, on buffers of the same size. The three take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import normgrad
from normgrad.bench import machine
from normgrad.bench.results import write_json
from normgrad.torch import SyncBatchNorm

RANKS = 2
SECONDS = 1.0  # per implementation and case
ROUNDS = 20
CASES = [
    ((16, 64), torch.float32),
    ((4, 16, 8, 8), torch.float32),
    ((8, 64, 56, 56), torch.float32),
    ((8, 64, 56, 56), torch.bfloat16),
    ((8, 512, 14, 14), torch.float32),
    ((8, 2048, 7, 7), torch.float32),
]


def step(norm: Any, x: torch.Tensor, grad_out: torch.Tensor) -> None:
    """Forward and backward."""
    norm.zero_grad(set_to_none=True)
    x.grad = None
    norm(x).backward(grad_out)


def exchange(forward: torch.Tensor, backward: torch.Tensor) -> None:
    """The collectives of a step."""
    ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    ops.wait_tensor(ops.all_gather_into_tensor(forward, RANKS, group))
    ops.wait_tensor(ops.all_reduce(backward, "sum", group))


def medians(functions: Sequence[Callable[[], None]]) -> list[float]:
    """Return the seconds of a call of each function; they take turns, on all ranks as often."""
    calls = []
    for function in functions:
        for _ in range(3):
            function()
        start = time.perf_counter()
        function()
        calls.append(min(2000, SECONDS / ROUNDS / (time.perf_counter() - start)))
    same = torch.tensor(calls).ceil().int()
    dist.broadcast(same, 0)
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(ROUNDS):
        for function, count, found in zip(functions, same.tolist(), times, strict=True):
            for _ in range(count):
                start = time.perf_counter()
                function()
                found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in times]


def measured(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """Return the record of a case."""
    x, grad_out = torch.randn(shape).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)
    channels = shape[1]
    plain = torch.nn.BatchNorm1d(channels) if len(shape) == 2 else torch.nn.BatchNorm2d(channels)
    buffers = torch.ones(2 * channels + 1), torch.ones(2 * channels)
    steps = [partial(step, norm, x, grad_out) for norm in (plain, SyncBatchNorm(channels))]
    times = medians([*steps, partial(exchange, *buffers)])
    return {
        "shape": "x".join(map(str, shape)),
        "dtype": str(dtype).removeprefix("torch."),
        **dict(zip(("batch_norm", "sync_batch_norm", "exchange"), times, strict=True)),
        "bytes": sum(buffer.nbytes for buffer in buffers),
    }


def run(rank: int, folder: str) -> None:
    """Measure every case on a rank; the first prints and keeps the results."""
    torch.set_num_threads(1)
    normgrad.set_num_threads(1)
    dist.init_process_group("gloo", init_method=Path(folder, "meeting").as_uri(), rank=rank, world_size=RANKS)
    torch.manual_seed(rank)
    results = []
    for case in CASES:
        results.append(measured(*case))
        if rank == 0:
            print(results[-1], flush=True)
    if rank == 0:
        Path(folder, "results").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    """Start the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder,), nprocs=RANKS)
        results = json.loads(Path(folder, "results").read_text(encoding="utf-8"))
    if options.json:
        write_json(options.json, machine.describe("cpu"), results)


if __name__ == "__main__":
    main()
