"""Time whole calls: on small data, where call overhead decides, and on large data, where results are allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.table import Table

from normgrad.bench.cases import Case
from normgrad.bench.clock import measure
from normgrad.bench.report import print_whole, time_text
from normgrad.bench.workload import Workload, workload

OPERATOR = "layer_norm_backward"
SHAPES = ((2, 2), (128, 768), (16384, 1024))


@dataclass(frozen=True)
class Overhead:
    """Seconds per call of every way to make the same call."""

    case: Case
    seconds: Mapping[str, float]


def overheads(budget: float) -> Iterator[Overhead]:
    """LayerNorm's backward pass in float32, from NumPy and from PyTorch."""
    for shape in SHAPES:
        work = workload(Case(OPERATOR, shape, "float32"))
        timings = measure(dict(_ways(work)), budget)
        yield Overhead(work.case, {name: timing.median for name, timing in timings.items()})


def _ways(work: Workload) -> Iterator[tuple[str, Callable[[], Any]]]:
    arguments = work.arguments
    yield "plan.run", _repeatable(work, arguments, work.outputs())
    yield "call from NumPy", partial(work.operator, *arguments.values())
    if find_spec("torch") is None:
        return
    import torch

    import normgrad.torch  # noqa: F401 - registers the operators
    from normgrad.bench.implementations.pytorch import PyTorch
    from normgrad.bench.tensors import arguments_as_torch

    tensors = arguments_as_torch(arguments).values()
    yield "call from PyTorch", partial(work.operator, *tensors)
    yield "torch.ops.normgrad", partial(getattr(torch.ops.normgrad, OPERATOR), *tensors)
    for implementation in PyTorch().prepare(work):
        yield "PyTorch's operator", implementation.run


def _repeatable(work: Workload, arguments: Mapping[str, Any], outputs: tuple[Any, ...]) -> Callable[[], None]:
    plan = work.operator.plan(**arguments, out=outputs)
    plan.repeatable = True
    return plan.run


def show(console: Console, found: list[Overhead]) -> None:
    """A row per way, a column per size."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("LayerNorm backward, float32")
    for overhead in found:
        table.add_column(overhead.case.size, justify="right")
    for name in found[0].seconds:
        table.add_row(name, *(time_text(overhead.seconds[name]) for overhead in found))
    console.print("Time of a whole call. All but plan.run allocate their results", style="bold cyan")
    print_whole(console, table)
    console.print()


def record(found: list[Overhead]) -> list[dict[str, Any]]:
    """For a file."""
    return [{"case": str(overhead.case), "seconds": dict(overhead.seconds)} for overhead in found]
