"""What the GPU's benchmarks have in common: problems by name, plans for them, compilation ahead, and timing."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

import normgrad
from normgrad.cuda.batch_norm import launches as batch_norm
from normgrad.cuda.batch_norm.tiles import ElementwiseTile, ReduceTile
from normgrad.cuda.group_norm import channels_last_launches, contiguous_launches
from normgrad.cuda.group_norm.tiles import ChannelsLastTile, GroupTile
from normgrad.cuda.layer_norm import launches as layer_norm
from normgrad.cuda.layer_norm.tiles import RowTile
from normgrad.testing import oracle, terms

CACHED = 256_000_000  # bytes: several times the L2 cache
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
Tile = RowTile | GroupTile | ChannelsLastTile | ElementwiseTile | ReduceTile | None


@dataclass(frozen=True)
class Case:
    """An operator at sizes, in a dtype and memory order; with a tile, that one instead of the package's choice."""

    operator: str
    sizes: tuple[int, ...]
    dtype: str
    order: str = "contiguous"
    tile: Tile = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes if self.operator.startswith("layer") else self.sizes[:3]

    @property
    def traffic(self) -> int:
        """The fewest bytes: every tensor of the data's size, once."""
        tensors = {"batch_norm_stats": 1, "layer_norm": 2, "group_norm": 2, "batch_norm_elemt": 2}
        count = tensors.get(self.operator, 2 if self.operator == "batch_norm_reduce_backward" else 3)
        elements = 1
        for size in self.shape:
            elements *= size
        return count * elements * DTYPES[self.dtype].itemsize


def _data(case: Case, generator: torch.Generator) -> torch.Tensor:
    shape, dtype = case.shape, DTYPES[case.dtype]
    if case.order == "channels_last":
        samples, channels, places = shape
        made = torch.empty(samples, places, channels, dtype=dtype, device="cuda").normal_(generator=generator)
        return made.transpose(1, 2)
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(generator=generator)


def tensors(case: Case, seed: int = 0) -> dict[str, Any]:
    """Arguments for a case: random data, the statistics its own."""
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = DTYPES[case.dtype]
    x = _data(case, generator)

    def vector(size: int) -> torch.Tensor:
        return torch.empty(size, device="cuda").normal_(generator=generator).to(dtype)

    made: dict[str, Any] = {"input": x, "grad_out": _data(case, generator)}
    if case.operator.startswith("layer_norm"):
        made["normalized_shape"] = [case.sizes[1]]
        made["weight"], made["bias"] = vector(case.sizes[1]), vector(case.sizes[1])
        made["mean"] = x.mean(1, keepdim=True, dtype=torch.float32)
        made["rstd"] = torch.rsqrt(x.float().var(1, keepdim=True, unbiased=False) + 1e-5)
    elif case.operator.startswith("group_norm"):
        N, C, HxW, group = case.sizes
        made |= {"N": N, "C": C, "HxW": HxW, "group": group}
        made["weight"], made["bias"] = vector(C), vector(C)
        grouped = x.reshape(N, group, -1)
        made["mean"] = grouped.mean(2, dtype=torch.float32)
        made["rstd"] = torch.rsqrt(grouped.float().var(2, unbiased=False) + 1e-5)
    else:
        C = case.sizes[1]
        made["weight"], made["bias"] = vector(C).float(), vector(C).float()
        made["mean"] = x.mean((0, 2), dtype=torch.float32)
        made["invstd"] = torch.rsqrt(x.float().var((0, 2), unbiased=False) + 1e-5)
        made["sum_dy"] = made["grad_out"].sum((0, 2), dtype=torch.float32)
        made["sum_dy_xmu"] = torch.empty(C, device="cuda").normal_(generator=generator)
        made["counter"] = torch.tensor([x.numel() // C], dtype=torch.int32, device="cuda")
    return made


_PARAMETERS = {
    "layer_norm_backward": "grad_out input normalized_shape mean rstd weight bias",
    "layer_norm": "input normalized_shape weight bias",
    "group_norm_backward": "grad_out input mean rstd weight N C HxW group",
    "group_norm": "input weight bias N C HxW group",
    "batch_norm_elemt_backward": "grad_out input mean invstd weight sum_dy sum_dy_xmu counter",
    "batch_norm_elemt": "input weight bias mean invstd",
    "batch_norm_stats": "input",
    "batch_norm_reduce_backward": "grad_out input mean invstd weight",
}


def arguments(case: Case, made: dict[str, Any]) -> list[Any]:
    """The operator's arguments, in order."""
    return [made[name] for name in _PARAMETERS[case.operator].split()]


def on_host(value: Any) -> Any:
    """An argument as the oracle takes it; of a tensor a copy, since some operators write into their arguments."""
    if not isinstance(value, torch.Tensor):
        return value
    return (value.cpu().float() if value.is_floating_point() else value.cpu()).numpy().copy()


def expected(operator: str, given: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What an operator's results should be, and the sizes of the terms that they are sums of; for each a fresh copy."""
    exact = getattr(oracle, operator)(*map(on_host, given))
    sizes = getattr(terms, operator)(*map(on_host, given))
    return (exact, sizes) if isinstance(exact, tuple) else ((exact,), (sizes,))


def outputs(case: Case, made: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Fresh memory for every result."""
    x, weight = made["input"], made["weight"]
    data = torch.empty_like(x)
    match case.operator:
        case "layer_norm_backward" | "group_norm_backward":
            return data, torch.empty_like(weight), torch.empty_like(weight)
        case "layer_norm" | "group_norm":
            return data, torch.empty_like(made["mean"]), torch.empty_like(made["rstd"])
        case "batch_norm_elemt_backward" | "batch_norm_elemt":
            return (data,)
        case "batch_norm_stats":
            return torch.empty_like(made["mean"]), torch.empty_like(made["mean"])
    return tuple(torch.empty_like(made["mean"]) for _ in range(4))


@contextlib.contextmanager
def chosen_tile(case: Case) -> Iterator[None]:
    """The case's own tile in place of the package's choice."""
    if case.tile is None:
        yield
        return
    module, name = {
        RowTile: (layer_norm, "row_tile" if case.operator == "layer_norm_backward" else "forward_row_tile"),
        GroupTile: (contiguous_launches, "group_tile"),
        ChannelsLastTile: (channels_last_launches, "channels_last_tile"),
        ElementwiseTile: (batch_norm, "elementwise_tile"),
        ReduceTile: (batch_norm, "reduce_tile"),
    }[type(case.tile)]
    with mock.patch.object(module, name, return_value=case.tile):
        yield


def planned(case: Case, made: dict[str, Any], results: tuple[torch.Tensor, ...]) -> normgrad.Plan:
    """A repeatable plan for a case."""
    with chosen_tile(case):
        plan = getattr(normgrad, case.operator).plan(*arguments(case, made), out=results)
    plan.repeatable = True
    return plan


def compile_case(case: Case) -> str:
    """Compile a case's kernels into Triton's cache; the layout counts, so some of many rows stand for all of them."""
    if case.operator.startswith("layer_norm"):
        case = replace(case, sizes=(min(case.sizes[0], 256), case.sizes[1]))
    try:
        made = tensors(case)
        planned(case, made, outputs(case, made))
    except Exception as error:
        return f"{case}: {type(error).__name__}: {error}"[:300]
    return ""


def in_processes(prepare: Callable[[Case], str], cases: Sequence[Case], processes: int = 14) -> None:
    """Call a function for every case, several at a time; what it says is printed."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(processes, os.cpu_count() or 1)) as pool:
        for problem in pool.imap_unordered(prepare, cases, chunksize=1):
            if problem:
                print("does not compile:", problem, flush=True)


def compile_ahead(cases: Sequence[Case], processes: int = 14) -> None:
    """Compile every case's kernels, several at a time."""
    in_processes(compile_case, cases, processes)


def median_time(runs: Sequence[Callable[[], Any]], repeats: int = 15, cold: bool = True) -> list[float]:
    """Microseconds of each function on the GPU: medians, the functions taking turns, the host kept ahead of the GPU.

    ``cold``: before each the L2 cache is filled with what was only read. So none pays for the one before, whose results
    would have to be written from there to memory: 3 to 7 microseconds, for sums after a copy.
    """
    unrelated = torch.zeros(CACHED, dtype=torch.uint8, device="cuda")
    for run in runs:
        run()
        run()
    torch.cuda.synchronize()
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        events = []
        for run in runs:
            torch.cuda._sleep(600_000)
            if cold:
                unrelated.max()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        for place, (begin, end) in enumerate(events):
            times[place].append(begin.elapsed_time(end) * 1000)
    return [statistics.median(found) for found in times]


def copying(nbytes: int) -> Callable[[], Any]:
    """A device-to-device copy that moves so many bytes, read and written together."""
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
