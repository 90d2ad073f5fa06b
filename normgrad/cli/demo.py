"""Run the three backward operators and compare every result with the float64 oracle.

Each operator gets values that can be checked by hand and a tensor as models have them. The exit status is 1 if a
result is not within the error bound.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
from rich.table import Table
from rich.text import Text

import normgrad
from normgrad import backends, threads
from normgrad.cli.demo_cases import Case, every_case
from normgrad.cli.errors import BadInput
from normgrad.cli.terminal import Console
from normgrad.contract.arrays import as_view
from normgrad.contract.products import use_product
from normgrad.testing import Report, compare, oracle, terms
from normgrad.testing.expected import as_tuple

NAME = "demo"
HELP = "run the backward operators and compare the results with the oracle"

_MOST_VALUES = 4
_VALUES_WIDTH = 23
_OTHER_COLUMNS = 36  # the name, the share of the bound, the verdict, and the blanks between


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: the demonstration is always the same."""


def execute(arguments: argparse.Namespace) -> int:
    """Print the results, the exact values and whether the results are within the bound."""
    console = Console()
    try:
        console.print(f"normgrad {normgrad.__version__} on the backend {_backend()}\n", style="bold")
        with use_product(None):  # the cases mix dtypes as no single product allows
            reports = [report for case in every_case() for report in _show(console, case)]
    except ValueError as error:  # an environment variable that says nothing known
        raise BadInput(str(error)) from None
    failed = sum(not report for report in reports)
    console.print("The bound: |result − exact| ≤ ½·ulp + 8·2⁻²⁴·T + 2⁻¹²⁶·U")
    console.print("(T: sum of the absolute terms, U: underflow allowance).")
    if failed:
        console.print(f"{failed} of {len(reports)} results are not within the bound.", style="bold red")
        return 1
    console.print(f"All {len(reports)} results are within the bound.", style="bold green")
    return 0


def _backend() -> str:
    """The backend of the CPU; the number of threads is looked up too, so that nothing is printed where it is wrong."""
    threads.get_num_threads()
    name = backends.chosen("cpu")
    if name is None:
        known = [name for name, (_, device) in backends.BACKENDS.items() if device == "cpu"]
        problem = f"is {backends.requested_backend()!r}, and the demonstration needs a backend for the CPU"
        raise ValueError(f"{backends.ENVIRONMENT} {problem}: {' or '.join(known)}")
    return name


def _show(console: Console, case: Case) -> list[Report]:
    """Run a case and print its table."""
    name = case.operator.signature.name
    results = as_tuple(case.operator(**case.arguments))
    exact = as_tuple(getattr(oracle, name)(**case.arguments))
    sizes = as_tuple(getattr(terms, name)(**case.arguments))
    view = as_view(case.arguments["input"])
    console.print(Text.assemble((name, "bold cyan"), f"  {view.dtype} {view.shape}, {case.title}"))
    width = min(_VALUES_WIDTH, (console.width - _OTHER_COLUMNS) // 2)
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("result", width=11)
    table.add_column("values", width=width)
    table.add_column("exact values", width=width)
    table.add_column("of bound", width=8, justify="right")
    table.add_column("", width=5)
    reports = []
    for output, result, value, size in zip(case.operator.signature.outputs, results, exact, sizes, strict=True):
        report = compare(result, value, size)
        verdict = Text("pass", "green") if report else Text("WRONG", "bold red")
        shown = (_first_values(array, width) for array in (result, value))
        table.add_row(output.name, *shown, _percent(report.worst), verdict)
        reports.append(report)
    console.print(table)
    console.print()
    return reports


def _first_values(array: np.ndarray, width: int = _VALUES_WIDTH) -> str:
    """As many of the first elements as fit in a column; one at least, if need be with fewer digits."""
    for digits in range(5, 0, -1):
        values = [f"{float(value):.{digits}g}" for value in array.flat[:_MOST_VALUES]]
        for shown in range(len(values), 0, -1):
            text = " ".join([*values[:shown], "…"] if shown < array.size else values)
            if len(text) <= width:
                return text
    return ""


def _percent(worst: float) -> str:
    """A share of the bound, rounded down: what is within it does not read as more than 100 %."""
    return f"{math.floor(worst * 1000) / 10}%" if math.isfinite(worst) else str(worst)
