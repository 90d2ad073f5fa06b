"""Synchronised BatchNorm on one NVIDIA GPU: checks first, then times.

    python benchmarks/sync_batch_norm_on_gpu.py

1. One rank over NCCL, made to exchange with itself: results against float64, no wait of the host for the device, a CUDA
   graph, torch.compile without a graph break, and the time of a step beside BatchNorm and PyTorch's SyncBatchNorm.
2. Two ranks that share the GPU, over gloo: every case of the tests against float64 and nn.BatchNorm, and the same bits
   on both; PyTorch's SyncBatchNorm on the cases that it can do; the time of a step.
3. Two ranks that share the GPU, over NCCL, where NCCL allows it.

The exit status is 1 if a check of normgrad's fails. ``--device cpu`` tries the script itself, over gloo throughout.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import normgrad
from normgrad.torch import SyncBatchNorm
from normgrad.torch.sync_batch_norm_function import Running, batch_norm_over_ranks

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.sync_cases import Case, cases, train_on_rank
from support.sync_checks import assert_one_batch_norm

SHAPES = [((64, 64, 56, 56), torch.float32), ((64, 64, 56, 56), torch.bfloat16), ((64, 1024, 14, 14), torch.float16)]
COMPILED = ["uneven", "an empty rank", "bfloat16", "channels last", "cumulative", "not affine", "no running statistics"]


class Exchanging(SyncBatchNorm):
    """Exchanges even in a group of one."""

    def _group_of_several(self) -> Any:
        return dist.group.WORLD if self.training else None


class TorchExchanging(torch.nn.SyncBatchNorm):
    """PyTorch's, doing the same."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """In training only."""
        self.num_batches_tracked.add_(1)
        group = dist.group.WORLD
        function = torch.nn.modules._functions.SyncBatchNorm
        parameters = self.weight, self.bias, self.running_mean, self.running_var
        return function.apply(input, *parameters, self.eps, self.momentum, group, dist.get_world_size())


def main() -> int:
    """Run the three parts, each in processes of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    device = parser.parse_args().device
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    print(f"PyTorch {torch.__version__}, normgrad {normgrad.__version__}, {where}")
    nccl = "nccl" if device == "cuda" else "gloo"
    failures = [
        part(f"one rank over {nccl}", nccl, device, 1, one_rank),
        part("two ranks over gloo", "gloo", device, 2, two_ranks),
    ]
    if device == "cuda":
        part("two ranks over nccl, which may refuse to share a GPU", "nccl", device, 2, two_ranks)
    print("\nall checks passed" if not any(failures) else "\nFAILED")
    return int(any(failures))


Report = Callable[[str, Callable[[], Any]], None]


def part(title: str, backend: str, device: str, ranks: int, job: Callable[[str, Report], None]) -> bool:
    """Whether something failed in a part."""
    print(f"\n== {title}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(run, (folder, backend, device, ranks, job), nprocs=ranks, join=False)
        try:
            while not context.join(timeout=5):
                pass
        except Exception as error:
            print(f"FAILED: {error}".strip()[-1500:], flush=True)
            return True
        return any(Path(folder, f"failed {rank}").exists() for rank in range(ranks))


def run(rank: int, folder: str, backend: str, device: str, ranks: int, job: Callable[[str, Report], None]) -> None:
    """A part on one rank."""
    if device == "cuda":
        torch.cuda.set_device(0)
    meeting, patience = Path(folder, "meeting").as_uri(), datetime.timedelta(seconds=60)
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks, timeout=patience)
    try:
        dist.all_reduce(torch.ones(1, device=device))
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        print(f"[{rank}] not possible here: {str(error)[-300:]}", flush=True)
        Path(folder, f"failed {rank}").write_text(str(error))
        os._exit(0)  # a communicator that never came about may not be taken down in good order

    def check(name: str, test: Callable[[], Any]) -> None:
        try:
            found, good = test(), True
        except Exception as error:
            found, good = f"FAILED: {type(error).__name__}: {str(error)[-600:]}", False
            Path(folder, f"failed {rank}").write_text(traceback.format_exc())
        if rank == 0 or not good:
            print(f"[{rank}] {name}: {'ok' if found is None else found}", flush=True)

    job(device, check)
    dist.destroy_process_group()


def one_rank(device: str, check: Report) -> None:
    """The exchange with oneself."""
    for name in ("uneven", "bfloat16", "channels last", "cumulative", "not affine", "float16"):
        check(f"float64 says: {name}", lambda name=name: against_float64(name, device, Exchanging))
        check(f"compiled: {name}", lambda name=name: against_float64(name, device, Exchanging, compiled))
    if device == "cuda":
        check("the host does not wait", host_does_not_wait)
        check("CUDA graph", cuda_graph)
    for shape, dtype in SHAPES:
        check(f"ms per step {shape} {dtype}", lambda shape=shape, dtype=dtype: times(shape, dtype, device))


def against_float64(name: str, device: str, cls: Any, wrap: Any = lambda norm: norm) -> None:
    """A case on this rank alone."""
    case = cases(2)[name]
    whole = Case(**{**vars(case), "split": (sum(case.split),)})
    assert_one_batch_norm(name, whole, [train_on_rank(whole, None, wrap, device, cls)])


def compiled(norm: torch.nn.Module) -> Any:
    """Without a graph break."""
    torch.compiler.reset()
    return torch.compile(norm, fullgraph=True)


def step(norm: Any, x: torch.Tensor, grad_out: torch.Tensor) -> None:
    """Forward and backward."""
    norm.zero_grad(set_to_none=True)
    x.grad = None
    norm(x).backward(grad_out)


def host_does_not_wait() -> None:
    """Not in a step with a batch, nor in one without."""
    for samples in (4, 0):
        for momentum in (0.1, None):
            norm = Exchanging(64, momentum=momentum).cuda()
            x = torch.randn(samples, 64, 8, 8, device="cuda", requires_grad=True)
            grad_out = torch.randn_like(x)
            step(norm, x, grad_out)
            torch.cuda.set_sync_debug_mode("error")
            try:
                step(norm, x, grad_out)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def cuda_graph() -> None:
    """A captured step gives what it gives outside."""
    torch.manual_seed(0)
    x = torch.randn(8, 64, 8, 8, device="cuda", requires_grad=True)
    grad_out = torch.randn_like(x)
    weight, bias = torch.randn(64, device="cuda", requires_grad=True), torch.randn(64, device="cuda")
    mean, var = torch.zeros(64, device="cuda"), torch.ones(64, device="cuda")

    def whole() -> tuple[torch.Tensor, ...]:
        output = batch_norm_over_ranks(x, weight, bias, Running(mean, var, 0.1), 1e-5, dist.group.WORLD)
        return output, *torch.autograd.grad(output, (x, weight), grad_out)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            expected = whole()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = whole()
    for tensor in found:
        tensor.detach().zero_()
    graph.replay()
    torch.cuda.synchronize()
    for ours, before in zip(found, expected, strict=True):
        assert torch.equal(ours, before)


def two_ranks(device: str, check: Report) -> None:
    """The cases of the tests."""
    for name, case in cases(2).items():
        check(f"float64 says: {name}", lambda name=name, case=case: together(name, case, device))
    for name in COMPILED:
        check(f"compiled: {name}", lambda name=name: together(name, cases(2)[name], device, compiled))
    for shape, dtype in SHAPES:
        check(f"ms per step {shape} {dtype}", lambda shape=shape, dtype=dtype: times(shape, dtype, device))
    if device == "cuda":
        check("nn.SyncBatchNorm, for comparison", lambda: peer(device))


def together(name: str, case: Case, device: str, wrap: Any = lambda norm: norm, cls: Any = None) -> None:
    """A case on both ranks, judged on each."""
    found: list[Any] = [None, None]
    dist.all_gather_object(found, train_on_rank(case, None, wrap, device, cls))
    assert_one_batch_norm(name, case, found)


def peer(device: str) -> str:
    """How many of the cases without an empty rank PyTorch's own passes, and what it says to the others."""
    verdicts = {name: verdict(name, case, device) for name, case in cases(2).items() if 0 not in case.split}
    failed = {name: text for name, text in verdicts.items() if text}
    return f"{len(verdicts) - len(failed)} of {len(verdicts)} cases{', not ' if failed else ''}{failed or ''}"


def verdict(name: str, case: Case, device: str) -> str:
    """What is wrong with PyTorch's results, if something is."""
    try:
        together(name, case, device, cls=torch.nn.SyncBatchNorm)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    return ""


def times(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> str:
    """Medians of three layers."""
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    grad_out = torch.randn_like(x)
    channels = shape[1]
    norms = {"BatchNorm": torch.nn.BatchNorm2d(channels), "normgrad": Exchanging(channels)}
    if device == "cuda":
        norms["nn.SyncBatchNorm"] = TorchExchanging(channels)
    return ", ".join(f"{name} {median(norm.to(device), x, grad_out):.3f}" for name, norm in norms.items())


def median(norm: Any, x: torch.Tensor, grad_out: torch.Tensor, calls: int = 30) -> float:
    """Milliseconds of a step, the device's work included."""
    found = []
    for _ in range(calls + 5):
        start = time.perf_counter()
        step(norm, x, grad_out)
        if x.is_cuda:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return 1e3 * statistics.median(found[5:])


if __name__ == "__main__":
    sys.exit(main())
