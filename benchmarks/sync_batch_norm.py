"""What synchronised BatchNorm costs: a training step in two processes over gloo, against BatchNorm without exchange.

    python benchmarks/sync_batch_norm.py

prints the table of docs/guides/sync_batch_norm.md. A step is the forward pass and all gradients; every process has its
own batch of the given shape and one thread. "exchange" are the two collectives alone, on buffers of the same size.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import normgrad
from normgrad.torch import SyncBatchNorm

RANKS = 2
SECONDS = 1.0  # per contender and case
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


def median(function: Callable[..., None], *args: Any) -> float:
    """Milliseconds of a call, on all ranks as many times."""
    times = []
    for _ in range(3):
        function(*args)
    start = time.perf_counter()
    function(*args)
    calls = torch.tensor([max(5, min(2000, int(SECONDS / (time.perf_counter() - start))))])
    dist.broadcast(calls, 0)
    for _ in range(int(calls)):
        start = time.perf_counter()
        function(*args)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def run(rank: int, folder: str) -> None:
    """Measure every case on a rank; the first prints."""
    torch.set_num_threads(1)
    normgrad.set_num_threads(1)
    dist.init_process_group("gloo", init_method=Path(folder, "meeting").as_uri(), rank=rank, world_size=RANKS)
    if rank == 0:
        print(f"PyTorch {torch.__version__}, {RANKS} processes, one thread each; medians in ms\n")
        print("| batch per process | dtype | BatchNorm | SyncBatchNorm | exchange | bytes sent per step |")
        print("|---|---|---:|---:|---:|---:|")
    torch.manual_seed(rank)
    for shape, dtype in CASES:
        x, grad_out = torch.randn(shape).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)
        channels = shape[1]
        plain = torch.nn.BatchNorm1d(channels) if len(shape) == 2 else torch.nn.BatchNorm2d(channels)
        buffers = torch.ones(2 * channels + 1), torch.ones(2 * channels)
        times = [
            median(step, plain, x, grad_out),
            median(step, SyncBatchNorm(channels), x, grad_out),
            median(exchange, *buffers),
        ]
        sent = sum(buffer.nbytes for buffer in buffers)
        if rank == 0:
            cells = " | ".join(f"{value:.2f}" for value in times)
            name = str(dtype).removeprefix("torch.")
            print(f"| {'×'.join(map(str, shape))} | {name} | {cells} | {sent:,} |", flush=True)
    dist.destroy_process_group()


def main() -> int:
    """Start the processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder,), nprocs=RANKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
