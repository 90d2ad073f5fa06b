"""Tell the version, the machine, the libraries, the backends, the products and the environment variables in force."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version

from rich.table import Table

import normgrad
from normgrad import backends, threads
from normgrad.bench.machine import processor
from normgrad.cli.errors import reason
from normgrad.cli.terminal import Console
from normgrad.contract import products
from normgrad.contract.products import Family, Product
from normgrad.cpu import store
from normgrad.cuda import devices

NAME = "info"
HELP = "version, machine, libraries, backends and products"

#: Libraries, with the extra that installs each; None where normgrad cannot be without it.
LIBRARIES = {
    "numpy": None,
    "numba": None,
    "ml_dtypes": None,
    "rich": None,
    "safetensors": "files",
    "torch": "torch",
    "triton": "cuda",
    "jax": "jax",
    "cffi": "sdk",
    "matplotlib": "plot",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def execute(arguments: argparse.Namespace) -> int:
    """Print one table after the other."""
    console = Console()
    for title, rows in (
        ("normgrad", _machine()),
        ("Libraries", _libraries()),
        ("Backends", _backends()),
        ("Environment", _environment()),
    ):
        console.print(title, style="bold cyan")
        console.print(_table(rows))
        console.print()
    console.print("Products", style="bold cyan")
    console.print(_products())
    return 0


def _table(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=22)
    for name, text in rows:
        table.add_row(f"  {name}", text)
    return table


def _machine() -> Iterable[tuple[str, str]]:
    yield "version", normgrad.__version__
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", platform.platform()
    yield "processor", processor()
    yield "cores", f"{threads.usable_cores()} usable of {os.cpu_count()}"
    yield "threads", _or_problem(lambda: str(threads.get_num_threads()))
    yield "compiled kernels in", str(next(store.folders()))


def _libraries() -> Iterable[tuple[str, str]]:
    return ((name, _installed(name, extra)) for name, extra in LIBRARIES.items())


def _installed(name: str, extra: str | None) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return f"not installed: pip install 'normgrad[{extra}]'" if extra else "not installed"


def _backends() -> Iterable[tuple[str, str]]:
    for name, (_, device) in backends.BACKENDS.items():
        yield name, f"for {device}, {_state(name, device)}"
        if name == "cuda" and devices.installation_problem() is None:
            yield from _gpus(_state(name, device))


def _gpus(state: str) -> Iterable[tuple[str, str]]:
    import torch

    for index in range(torch.cuda.device_count()):
        problem = devices.problem(index)
        yield (
            f"cuda:{index}",
            f"{torch.cuda.get_device_name(index)}: {f'does not run: {problem}' if problem else state}",
        )


def _state(name: str, device: str) -> str:
    problem = devices.installation_problem() if name == "cuda" else None
    if problem is not None:
        return f"does not run: {problem}"
    try:
        backends.load(name)
    except Exception as error:  # whatever keeps a backend away is what the user wants to read
        return f"missing: {reason(error)}"
    return "in use" if _or_problem(lambda: backends.chosen(device) or "") == name else "ready"


def _environment() -> Iterable[tuple[str, str]]:
    for variable in (products.ENVIRONMENT, backends.ENVIRONMENT, threads.ENVIRONMENT, store.ENVIRONMENT):
        yield variable, os.environ.get(variable) or "not set"
    yield "product in force", _or_problem(lambda: _label(products.current_product()))


def _label(product: Product | None) -> str:
    return "none: what some product allows is allowed" if product is None else product.label


def _or_problem(read: Callable[[], str]) -> str:
    """What a function of the environment says, or what is wrong with the environment."""
    try:
        return read()
    except ValueError as error:
        return str(error)


def _products() -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("product", no_wrap=True)
    table.add_column("SoC names", no_wrap=True)
    table.add_column("operators")
    table.add_column("bfloat16")
    for product in Product:
        socs = [f"{prefix}*" for prefix in product.value.soc_prefixes] + list(product.value.soc_names)
        has = [family.value for family in Family if product.has(family)]
        operators = "all" if len(has) == len(Family) else ", ".join(has)
        table.add_row(product.label, "\n".join(socs), operators, "yes" if product.value.bfloat16 else "no")
    return table
