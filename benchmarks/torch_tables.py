"""Tables of docs/evidence/pytorch.md: ``python benchmarks/torch_tables.py [TABLE...]``.

``host``: what a call costs beside the work, on tensors so small that there is none. ``forward``: our forward pass and
PyTorch's, between which ``normgrad/torch/heuristics.py`` chooses. ``override``: a backward pass without the
override and with it. ``step``: a norm's two passes in a training step, whose other operators use up the caches,
by PyTorch, with the override and by our module, whatever ``heuristics.py`` says. ``--device cuda`` for a GPU.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import normgrad
import normgrad.torch
from normgrad.bench.clock import Clock, DeviceClock, measure, wall_clock
from normgrad.bench.memory import keep_freed_memory
from normgrad.torch import heuristics

ALL = [True, True, True]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYER_NORM = ((64, 768), (2048, 768), (8192, 1024), (4096, 4096))
GROUP_NORM = (((8, 64, 32, 32), 32), ((16, 256, 16, 16), 32), ((2, 320, 64, 64), 32), ((4, 128, 128, 128), 32))
CALLS_AT_ONCE = 50
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> None:
    """Print a table in Markdown, row by row."""
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)
    print()


def name_of(dtype: torch.dtype) -> str:
    """``float32`` rather than ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def sizes_of(shape: Sequence[int]) -> str:
    """``8×64×32×32``."""
    return "×".join(map(str, shape))


def medians(runs: dict[str, Callable[[], Any]], budget: float, clock: Clock = wall_clock) -> list[float]:
    """Microseconds per call of each function."""
    for run in runs.values():
        run()
        run()
    return [timing.median * 1e6 for timing in measure(runs, budget, clock).values()]


def host_medians(runs: dict[str, Callable[[], Any]], budget: float) -> list[float]:
    """Microseconds per call of functions so short that many calls have to be timed at once."""

    def repeated(run: Callable[[], Any]) -> Callable[[], None]:
        def calls() -> None:
            for _ in range(CALLS_AT_ONCE):
                run()

        return calls

    found = medians({name: repeated(run) for name, run in runs.items()}, budget)
    return [time / CALLS_AT_ONCE for time in found]


def clock_of(device: str) -> Clock:
    """How work on a device is timed."""
    return DeviceClock() if device == "cuda" else wall_clock


# What a call costs beside the work


def small_layer_norm(device: str) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """PyTorch's way and ours, by what is called."""
    x, grad, weight, bias = (torch.randn(shape, device=device) for shape in ((2, 8), (2, 8), (8,), (8,)))
    aten, ours = torch.ops.aten, torch.ops.normgrad
    _, mean, rstd = aten.native_layer_norm(x, [8], weight, bias, 1e-5)
    backward = (grad, x, [8], mean, rstd, weight, bias, ALL)
    return {
        "LayerNorm backward, the operator": (
            lambda: aten.native_layer_norm_backward(*backward),
            lambda: ours.layer_norm_backward(*backward),
        ),
        "LayerNorm backward, `normgrad.layer_norm_backward`": (
            lambda: aten.native_layer_norm_backward(*backward),
            lambda: normgrad.layer_norm_backward(*backward),
        ),
        "LayerNorm forward, the operator": (
            lambda: aten.native_layer_norm(x, [8], weight, bias, 1e-5),
            lambda: ours.layer_norm(x, [8], weight, bias, 1e-5),
        ),
    }


def small_group_norm(device: str) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """PyTorch's way and ours, by what is called."""
    x, grad, weight, bias = (torch.randn(shape, device=device) for shape in ((2, 4, 3), (2, 4, 3), (4,), (4,)))
    sizes = (2, 4, 3, 2)
    aten, ours = torch.ops.aten, torch.ops.normgrad
    _, mean, rstd = aten.native_group_norm(x, weight, bias, *sizes, 1e-5)
    backward = (grad, x, mean, rstd, weight, *sizes, ALL)
    return {
        "GroupNorm backward, the operator": (
            lambda: aten.native_group_norm_backward(*backward),
            lambda: ours.group_norm_backward(*backward),
        ),
        "GroupNorm forward, the operator": (
            lambda: aten.native_group_norm(x, weight, bias, *sizes, 1e-5),
            lambda: ours.group_norm(x, weight, bias, *sizes, 1e-5),
        ),
    }


def training_step(module: torch.nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    """Forward and backward pass of a module."""
    leaf, grad = x.clone().requires_grad_(), torch.randn_like(x)
    leaves = [leaf, *module.parameters()]
    return lambda: torch.autograd.grad(module(leaf), leaves, grad)


def small_modules(device: str) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """A module's training step, PyTorch's and ours."""
    x = torch.randn(2, 8, device=device)
    pairs = {
        "LayerNorm module, forward and backward": (torch.nn.LayerNorm(8), normgrad.torch.LayerNorm(8)),
        "GroupNorm module, forward and backward": (torch.nn.GroupNorm(2, 8), normgrad.torch.GroupNorm(2, 8)),
    }
    return {
        what: (training_step(theirs.to(device), x), training_step(ours.to(device), x))
        for what, (theirs, ours) in pairs.items()
    }


def host_rows(device: str, budget: float) -> Iterator[Sequence[str]]:
    """A row for every kind of call."""
    for what, (theirs, ours) in {
        **small_layer_norm(device),
        **small_group_norm(device),
        **small_modules(device),
    }.items():
        yield host_row(what, host_medians({"theirs": theirs, "ours": ours}, budget))
    step = training_step(torch.nn.LayerNorm(8).to(device), torch.randn(2, 8, device=device))
    times = without_and_with(step, budget, time=host_medians)
    yield host_row("`torch.nn.LayerNorm`, forward and backward, with the override", times)


def without_and_with(run: Callable[[], Any], budget: float, time: Callable[..., list[float]] = medians) -> list[float]:
    """Microseconds per call without the override and with it, each the better of two turns."""
    turns = []
    for _ in range(2):
        (plain,) = time({"plain": run}, budget / 4)
        with normgrad.torch.override():
            (ours,) = time({"ours": run}, budget / 4)
        turns.append((plain, ours))
    return [min(times) for times in zip(*turns, strict=True)]


def host_row(what: str, times: Sequence[float]) -> Sequence[str]:
    """Times in microseconds."""
    return [what, *(f"{time:.1f}" for time in times), f"{times[0] / times[1]:.2f}"]


# The work


def forward_rows(device: str, budget: float) -> Iterator[Sequence[str]]:
    """Our forward pass and PyTorch's, with float32 parameters, beside which both keep float32 statistics."""
    ours, clock = torch.ops.normgrad, clock_of(device)
    for dtype in DTYPES:
        for shape in LAYER_NORM:
            x = torch.randn(shape, device=device, dtype=dtype)
            vectors = [torch.randn(shape[-1], device=device) for _ in range(2)]
            call = (x, shape[-1:], *vectors, 1e-5)
            runs = {"theirs": lambda c=call: torch.native_layer_norm(*c), "ours": lambda c=call: ours.layer_norm(*c)}
            yield ["LayerNorm", name_of(dtype), sizes_of(shape), "", *times_and_ratio(medians(runs, budget, clock))]
        for shape, groups in GROUP_NORM:
            for layout, order in LAYOUTS.items():
                x = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=order)
                vectors = [torch.randn(shape[1], device=device) for _ in range(2)]
                call = (x, *vectors, shape[0], shape[1], shape[2] * shape[3], groups, 1e-5)
                theirs = (x.contiguous(), *call[1:]) if device == "cuda" else call
                runs = {
                    "theirs": lambda c=theirs: torch.native_group_norm(*c),
                    "ours": lambda c=call: ours.group_norm(*c),
                }
                times = times_and_ratio(medians(runs, budget, clock))
                yield ["GroupNorm", name_of(dtype), sizes_of(shape), layout, *times]


def times_and_ratio(times: Sequence[float]) -> list[str]:
    """PyTorch's time, ours, and how many times faster ours is."""
    return [f"{times[0]:.0f}", f"{times[1]:.0f}", f"{times[0] / times[1]:.2f}"]


def override_rows(device: str, budget: float) -> Iterator[Sequence[str]]:
    """PyTorch's backward pass through autograd, without and with the override."""
    for dtype in DTYPES:
        for shape in LAYER_NORM:
            module = torch.nn.LayerNorm(shape[-1]).to(device)
            x = torch.randn(shape, device=device, dtype=dtype)
            yield ["LayerNorm", name_of(dtype), sizes_of(shape), "", *backward_times(module, x, budget)]
        for shape, groups in GROUP_NORM:
            for layout, order in LAYOUTS.items():
                x = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=order)
                module = torch.nn.GroupNorm(groups, shape[1]).to(device)
                yield ["GroupNorm", name_of(dtype), sizes_of(shape), layout, *backward_times(module, x, budget)]


def backward_times(module: torch.nn.Module, x: torch.Tensor, budget: float) -> list[str]:
    """Of the backward pass alone: the forward pass decides whose it is."""
    leaf = x.requires_grad_()
    plain = module(leaf)
    with every_size_is_ours(), normgrad.torch.override():
        ours = module(leaf)
    leaves, grad = [leaf, *module.parameters()], torch.randn_like(plain)

    def backward(output: torch.Tensor) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True)

    runs = {"plain": backward(plain), "ours": backward(ours)}
    return times_and_ratio(medians(runs, budget, clock_of(x.device.type)))


# The work in a training step

STEP_SIZES = [1 << exponent for exponent in range(15, 22)]  # elements
STEP_CHANNELS = 64
CACHES = 1 << 22  # float32 elements, which no core's own cache holds


def step_rows(device: str, budget: float) -> Iterator[Sequence[str]]:
    """Both passes of a norm, with PyTorch's other operators before each."""
    del device  # its host goes ahead, and is not measured so
    for dtype in DTYPES:
        for size in STEP_SIZES:
            columns = 1024 if size >= 1 << 18 else 256
            module = torch.nn.LayerNorm(columns), normgrad.torch.LayerNorm(columns)
            x = torch.randn(size // columns, columns).to(dtype)
            yield ["LayerNorm", name_of(dtype), sizes_of(x.shape), "", *step_times(*module, x, budget)]
        for layout, order in LAYOUTS.items():
            for size in STEP_SIZES:
                side = 32 if size >= 1 << 18 else 16
                module = torch.nn.GroupNorm(8, STEP_CHANNELS), normgrad.torch.GroupNorm(8, STEP_CHANNELS)
                shape = (size // (STEP_CHANNELS * side * side), STEP_CHANNELS, side, side)
                x = torch.randn(shape).to(dtype).contiguous(memory_format=order)
                yield ["GroupNorm", name_of(dtype), sizes_of(shape), layout, *step_times(*module, x, budget)]


def step_times(theirs: torch.nn.Module, ours: torch.nn.Module, x: torch.Tensor, budget: float) -> list[str]:
    """Microseconds by PyTorch, with the override and by our module, taken in turn; and how many times faster."""
    step = Step(x)
    times: dict[str, list[float]] = {"theirs": [], "override": [], "ours": []}
    end = time.perf_counter() + 2 * budget
    with every_size_is_ours():
        while time.perf_counter() < end or len(times["ours"]) < 12:
            times["theirs"].append(step(theirs))
            with normgrad.torch.override():
                times["override"].append(step(theirs))
            times["ours"].append(step(ours))
    plain, *others = (statistics.median(found[2:]) * 1e6 for found in times.values())
    return [f"{plain:.0f}", *(f"{time:.0f}" for time in others), *(f"{plain / time:.2f}" for time in others)]


class Step:
    """Times a norm's passes in seconds: its operands come from the operator before, all else from memory."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x, self._grad, self._others = x.requires_grad_(), torch.randn_like(x), torch.ones(CACHES)

    def __call__(self, norm: torch.nn.Module) -> float:
        self._others.add_(1.0)
        x = self._x * 1.0
        start = time.perf_counter()
        y = norm(x)
        forward = time.perf_counter() - start
        self._others.add_(1.0)
        grad = self._grad * 1.0
        start = time.perf_counter()
        torch.autograd.grad(y, [x, *norm.parameters()], grad)
        return forward + time.perf_counter() - start


@contextmanager
def every_size_is_ours() -> Iterator[None]:
    """Leave nothing to PyTorch that we can do."""
    none = {"MIN_FLOAT32": 0, "MIN_FLOAT32_CHANNELS_LAST": 0, "MIN_GROUP_NORM": {}}
    kept = {name: getattr(heuristics, name) for name in none}
    vars(heuristics).update(none)
    try:
        yield
    finally:
        vars(heuristics).update(kept)


def machine(device: str) -> str:
    """What the tables were made on."""
    where = torch.cuda.get_device_name() if device == "cuda" else f"{platform.processor() or platform.machine()} CPU"
    return f"{where}, {torch.get_num_threads()} threads, PyTorch {torch.__version__}, normgrad {normgrad.__version__}"


WORK = ("norm", "dtype", "size", "order", "PyTorch µs", "normgrad µs", "× faster")
TABLES: dict[str, tuple[Sequence[str], Callable[[str, float], Iterator[Sequence[str]]]]] = {
    "host": (("a call on tiny tensors", "PyTorch µs", "normgrad µs", "× faster"), host_rows),
    "forward": (WORK, forward_rows),
    "override": (WORK, override_rows),
    "step": ((*WORK[:5], "override µs", "module µs", "× faster", "× faster"), step_rows),
}


def main() -> None:
    """Print the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="host, forward, override, step; all by default")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--budget", type=float, default=0.3, help="seconds per row")
    options = parser.parse_args()
    keep_freed_memory()
    print(machine(options.device), end="\n\n")
    for name in options.tables or TABLES:
        head, rows = TABLES[name]
        print(f"### {name}\n")
        table(head, rows(options.device, options.budget))


if __name__ == "__main__":
    main()
