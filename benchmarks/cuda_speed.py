"""The operators on the GPU against other kernels and a copy of the same bytes; writes ``cuda.csv`` and a short table.

Results are judged before they are timed. PyTorch's operators take part; for the backward passes also torch.compile
(with ``compile`` among the arguments), Liger and QuACK, where they are installed. Times are medians of GPU time by
events, the contestants taking turns; data larger than the L2 cache is cold for all, what is smaller rotates among
several sets, and none finds results of another in the cache that are yet to be written to memory. ``call`` is the
host's time for a call, ``graph`` a replayed graph's, the contestants taking turns again. Other arguments: ``grid`` for
other sizes, beginnings of operators' names for these alone.
"""

from __future__ import annotations

import csv
import functools
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from accuracy_peers import liger, quack
from cuda_cases import Case, arguments, compile_case, copying, in_processes, median_time, outputs, planned, tensors
from cuda_verify import problem

import normgrad

COLD = 300_000_000  # bytes: several times the L2 cache

LAYER_NORM = [
    (32768, 1024),
    (16384, 4096),
    (8192, 8192),
    (4096, 16384),
    (131072, 256),
    (2048, 32768),
    (1024, 65536),
    (512, 262144),
    (5000, 1280),
    (4096, 768),
    (64, 1024),
]
GROUP_NORM = [
    (16, 320, 4096, 32),
    (32, 512, 1024, 32),
    (8, 128, 65536, 32),
    (64, 64, 3136, 32),
    (6, 384, 3600, 32),
    (2, 64, 64, 8),
]
BATCH_NORM = [(16, 320, 4096), (64, 64, 3136), (8, 128, 65536), (64, 512, 196)]
# Sizes of models of all kinds, and odd ones, small and large: is anything slower than PyTorch's?
LAYER_NORM_GRID = [
    (max(elements // columns, 1), columns)
    for columns in (16, 100, 768, 1000, 3072, 5120, 10000, 50257)
    for elements in (2**15, 2**25)
]
GROUP_NORM_GRID = [
    (2, 32, 16, 8),
    (1, 512, 64, 32),
    (4, 256, 49, 32),
    (32, 256, 196, 32),
    (8, 320, 1024, 32),
    (64, 2048, 49, 32),
    (1, 128, 262144, 32),
    (16, 64, 3025, 1),
    (128, 96, 784, 96),
    (2, 1280, 256, 32),
]
BATCH_NORM_GRID = [
    (64, 2048, 49),
    (256, 512, 49),
    (32, 64, 12544),
    (8, 3, 50176),
    (4096, 512, 1),
    (64, 96, 3025),
    (16, 256, 81),
    (2, 16, 64),
]
BATCH_NORM_STEPS = ("elemt_backward", "elemt", "stats", "reduce_backward")


def cases() -> list[Case]:
    """Everything that is timed: the sizes of the tables, or with ``grid`` among the arguments those of the grid."""
    found = []
    in_grid = "grid" in sys.argv
    for dtype in ("bfloat16", "float32", "float16"):
        for rows in LAYER_NORM_GRID if in_grid else LAYER_NORM:
            found += [Case("layer_norm_backward", rows, dtype), Case("layer_norm", rows, dtype)]
        for order in ("contiguous", "channels_last"):
            for sizes in GROUP_NORM_GRID if in_grid else GROUP_NORM:
                found += [Case("group_norm_backward", sizes, dtype, order), Case("group_norm", sizes, dtype, order)]
            for batch in BATCH_NORM_GRID if in_grid else BATCH_NORM:
                found += [Case(f"batch_norm_{step}", batch, dtype, order) for step in BATCH_NORM_STEPS]
    names = tuple(name for name in sys.argv[1:] if "norm" in name)
    return [
        case
        for case in found
        if case.operator.startswith(names or "")
        and (case.dtype != "float16" or (case.operator == "layer_norm_backward" and not in_grid))
    ]


def eager(case: Case, made: dict[str, Any]) -> Callable[[], Any]:
    """PyTorch's own operator for a case."""
    a = torch.ops.aten
    x, dy, weight, bias = (made[name] for name in ("input", "grad_out", "weight", "bias"))
    mean, scale = made["mean"], made.get("rstd", made.get("invstd"))
    whole = [True, True, True]
    match case.operator:
        case "layer_norm_backward":
            shape = made["normalized_shape"]
            return lambda: a.native_layer_norm_backward(dy, x, shape, mean, scale, weight, bias, whole)
        case "layer_norm":
            return lambda: a.native_layer_norm(x, made["normalized_shape"], weight, bias, 1e-5)
        case "group_norm_backward":
            # PyTorch wants the statistics in the data's dtype beside a 16-bit weight, and the data contiguous.
            mean, scale = mean.to(weight.dtype), scale.to(weight.dtype)
            return lambda: a.native_group_norm_backward(
                dy.contiguous(), x.contiguous(), mean, scale, weight, *case.sizes, whole
            )
        case "group_norm":
            return lambda: a.native_group_norm(x.contiguous(), weight, bias, *case.sizes, 1e-5)
        case "batch_norm_elemt_backward":
            sums = made["sum_dy"], made["sum_dy_xmu"], made["counter"]
            return lambda: a.batch_norm_backward_elemt(dy, x, mean, scale, weight, *sums)
        case "batch_norm_elemt":
            return lambda: a.batch_norm_elemt(x, weight, bias, mean, scale, 1e-5)
        case "batch_norm_stats":
            return lambda: a.batch_norm_stats(x, 1e-5)
    return lambda: a.batch_norm_backward_reduce(dy, x, mean, scale, weight, True, True, True)


def compiled(case: Case) -> Callable[[dict[str, Any]], Any] | None:
    """torch.compile's kernel, for the backward pass that it writes itself."""
    if case.operator != "layer_norm_backward" or case.dtype == "float16" or "compile" not in sys.argv:
        return None
    torch._dynamo.reset()
    backward = torch.compile(torch.ops.aten.native_layer_norm_backward, dynamic=False)
    return lambda made: backward(*arguments(case, made), [True, True, True])


def others(case: Case) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """The other libraries' kernels for a case, by name, as functions of its tensors."""
    found = {"compile": compiled(case)}
    if case.order == "contiguous" and case.operator.endswith("_norm_backward"):
        if importlib.util.find_spec("liger_kernel"):
            found["liger"] = functools.partial(liger, case.operator)
        if importlib.util.find_spec("quack") and case.operator == "layer_norm_backward":
            found["quack"] = functools.partial(quack, case.operator)
    return {name: run for name, run in found.items() if run is not None}


def does(run: Callable[[dict[str, Any]], Any], made: dict[str, Any], name: str) -> bool:
    """Whether another library's kernel does a case; they fail in ways of their own, some of them on long rows."""
    try:
        run(made)
        torch.cuda.synchronize()
    except Exception as error:
        print(f"  {name} fails: {type(error).__name__}: {str(error)[:80]!r}", flush=True)
        return False
    return True


def working(case: Case, made: dict[str, Any]) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Those of the others that do the case."""
    return {name: run for name, run in others(case).items() if does(run, made, name)}


def compile_all(case: Case) -> str:
    """Compile a case's kernels, and the other libraries', into their caches on disk."""
    problem = compile_case(case)
    if others(case):
        working(case, tensors(case))
    return problem


def call_times(runs: Sequence[Callable[[], Any]], repeats: int = 200) -> list[float]:
    """Microseconds of host time per call of each function: medians, the GPU never the one that is waited for.

    The functions take turns, call by call: where the host's speed drifts, it does so for all of them.
    """
    for run in runs:
        for _ in range(10):
            run()
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, found in zip(runs, times, strict=True):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            found.append((time.perf_counter() - begin) * 1e6)
    return [statistics.median(found) for found in times]


def replayed(run: Callable[[], Any], copies: int = 10) -> Callable[[], Any]:
    """A CUDA graph of several runs in a row."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(copies):
            run()
    return graph.replay


def rotating(runs: list[Callable[[], Any]]) -> Callable[[], Any]:
    """One function that takes the next of several each time."""
    turn = iter(range(1 << 60))
    return lambda: runs[next(turn) % len(runs)]()


def measure(case: Case) -> dict[str, Any]:
    """All times of a case, in microseconds."""
    sets = max(1, min(-(-COLD // case.traffic), 40))
    made = [tensors(case, seed) for seed in range(sets)]
    results = [outputs(case, one) for one in made]
    plans = [planned(case, *pair) for pair in zip(made, results, strict=True)]
    plans[0].run()
    if wrong := problem(case, made[0], results[0]):
        raise RuntimeError(wrong)
    contestants = {
        "copy": rotating([copying(case.traffic) for _ in range(sets)]),
        "normgrad": rotating([plan.run for plan in plans]),
        "eager": rotating([eager(case, one) for one in made]),
    }
    for name, run in working(case, made[0]).items():
        contestants[name] = rotating([functools.partial(run, one) for one in made])
    times = median_time(list(contestants.values()), repeats=15)
    found: dict[str, Any] = dict(zip(contestants, times, strict=True))
    if case.traffic < 20_000_000:
        operator = getattr(normgrad, case.operator)
        given = arguments(case, made[0])
        theirs = eager(case, made[0])
        times = call_times([lambda: operator(*given), plans[0].run, theirs])
        found["call"], found["plan_call"], found["eager_call"] = times
        found["graph"], found["eager_graph"] = (
            spent / 10 for spent in median_time([replayed(plans[0].run), replayed(theirs)], cold=False)
        )
    return found


def large() -> str:
    """More than 2^31 elements: rows far beyond 32-bit offsets come out as they do alone."""
    rows, columns = 2**20 + 64, 2048
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_()
    dy = torch.empty_like(x).normal_()
    mean, rstd = torch.zeros(rows, 1, device="cuda"), torch.ones(rows, 1, device="cuda")
    grad, _, bias_sum = normgrad.layer_norm_backward(dy, x, [columns], mean, rstd)
    tail = slice(rows - 40, rows)
    alone = normgrad.layer_norm_backward(dy[tail], x[tail], [columns], mean[tail], rstd[tail])[0]
    same = torch.equal(grad[tail], alone)
    exact = sum((part.double().sum(0) for part in dy.split(65536)), torch.zeros(columns, device="cuda").double())
    near = torch.allclose(bias_sum.double(), exact, rtol=1e-2, atol=8)
    return (
        f"over 2^31 elements: the last rows {'are right' if same else 'ARE WRONG'}, sums {'near' if near else 'WRONG'}"
    )


def main() -> None:
    """Measure, write the table, print a short one."""
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.strip()
    machine = [torch.cuda.get_device_name(), driver, torch.__version__, triton.__version__, normgrad.__version__]
    every = cases()
    in_processes(compile_all, every)
    print(large(), flush=True)
    shown = ["normgrad", "eager", "compile", "liger", "quack"]
    names = ["copy", *shown, "call", "plan_call", "eager_call", "graph", "eager_graph"]
    with open(Path(os.environ.get("OUT", ".")) / "cuda.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["gpu", "driver", "torch", "triton", "normgrad", "operator", "sizes", "dtype", "order", *names])
        for case in every:
            try:
                found = measure(case)
            except Exception as error:
                print("fails:", case, f"{type(error).__name__}: {error}"[:200], flush=True)
                continue
            values = [f"{found[name]:.1f}" if name in found else "" for name in names]
            sizes = "x".join(map(str, case.sizes))
            table.writerow([*machine, case.operator, sizes, case.dtype, case.order, *values])
            shares = [f"{name} {100 * found['copy'] / found[name]:.0f}%" for name in shown if name in found]
            small = {name: round(found[name], 1) for name in names[len(shown) + 1 :] if name in found}
            print(case.operator, sizes, case.dtype, case.order[:4], *shares, small or "", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
