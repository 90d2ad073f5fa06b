"""Run the three backward operators and hold every result against the oracle.

Each operator gets values that can be checked by hand and a tensor as models have them. The status is 1 where a result
is further from the oracle than the bound allows.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

import normgrad
from normgrad import backends
from normgrad.cli.demo_cases import Case, every_case
from normgrad.cli.errors import BadInput
from normgrad.cli.terminal import Console
from normgrad.contract.arrays import as_view
from normgrad.contract.products import use_product
from normgrad.testing import Report, compare, oracle, terms

NAME = "demo"
HELP = "run the backward operators and hold the results against the oracle"

_MOST_VALUES = 4
_VALUES_WIDTH = 23


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: the demonstration is always the same."""


def execute(arguments: argparse.Namespace) -> int:
    """Print what came out, what the oracle says and whether it holds."""
    console = Console()
    try:
        console.print(f"normgrad {normgrad.__version__} on the backend {backends.chosen('cpu')}\n", style="bold")
        with use_product(None):  # the cases mix dtypes as no single product allows
            reports = [report for case in every_case() for report in _show(console, case)]
    except ValueError as error:  # an environment variable that says nothing known
        raise BadInput(str(error)) from None
    failed = sum(not report for report in reports)
    console.print("The bound: |result − exact| ≤ ½·ulp + 8·2⁻²⁴·T + 2⁻¹²⁶·U")
    console.print("(T: sum of the absolute terms, U: underflow allowance).")
    if failed:
        console.print(f"{failed} of {len(reports)} results do not hold.", style="bold red")
        return 1
    console.print(f"All {len(reports)} results hold.", style="bold green")
    return 0


def _show(console: Console, case: Case) -> list[Report]:
    """Run a case and print its table."""
    name = case.operator.signature.name
    results = _as_tuple(case.operator(**case.arguments))
    exact = _as_tuple(getattr(oracle, name)(**case.arguments))
    sizes = _as_tuple(getattr(terms, name)(**case.arguments))
    view = as_view(case.arguments["input"])
    console.print(Text.assemble((name, "bold cyan"), f"  {view.dtype} {view.shape}, {case.title}"))
    table = Table(box=None, padding=(0, 1), pad_edge=True, header_style="dim")
    table.add_column("result", width=11)
    table.add_column("came out", width=_VALUES_WIDTH)
    table.add_column("the oracle says", width=_VALUES_WIDTH)
    table.add_column("of bound", width=8, justify="right")
    table.add_column("", width=5)
    reports = []
    for output, result, value, size in zip(case.operator.signature.outputs, results, exact, sizes, strict=True):
        report = compare(result, value, size)
        verdict = Text("holds", "green") if report else Text("WRONG", "bold red")
        table.add_row(output.name, _first_values(result), _first_values(value), _percent(report.worst), verdict)
        reports.append(report)
    console.print(table)
    console.print()
    return reports


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def _first_values(array: np.ndarray) -> str:
    """As many of the first elements as fit in a column."""
    values = [f"{float(value):.5g}" for value in array.flat[:_MOST_VALUES]]
    shown = min(len(values), _MOST_VALUES)
    while len(text := " ".join([*values[:shown], "…"] if shown < array.size else values)) > _VALUES_WIDTH:
        shown -= 1
    return text


def _percent(worst: float) -> str:
    """A share of the bound, rounded down: what is within it does not read as 100 %."""
    return f"{math.floor(worst * 1000) / 10}%" if math.isfinite(worst) else str(worst)
