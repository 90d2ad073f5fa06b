"""Print the version, the machine, the libraries, the backends, the environment variables in force and the products."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

import normgrad
from normgrad import backends, threads
from normgrad.bench.machine import processor
from normgrad.cli.cache import amount, used_folder
from normgrad.cli.errors import reason
from normgrad.cli.terminal import Console
from normgrad.contract import products
from normgrad.contract.products import Family, Product
from normgrad.cpu.compile import disk_cache
from normgrad.cuda import devices

NAME = "info"
HELP = "print version, machine, libraries, backends, environment and products"

#: Libraries, with the extra that installs each; None where normgrad cannot be without it.
LIBRARIES = {
    "numpy": None,
    "numba": None,
    "ml_dtypes": None,
    "rich": None,
    "safetensors": "files",
    "torch": "torch",
    "triton": "cuda",
    "cuda-bindings": "cuda",
    "jax": "jax",
    "cffi": "sdk",
    "matplotlib": "plot",
}

#: CPU features that decide which instructions the kernels use, as LLVM names them.
_FEATURES = (
    *("sse4.2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512fp16", "avx512bf16"),
    *("neon", "fullfp16", "bf16", "sve", "sve2"),
)

#: Variables of other libraries that limit threads or choose devices.
_OTHERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "TRITON_CACHE_DIR")

Section = dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How to print."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def execute(arguments: argparse.Namespace) -> int:
    """Print one table after the other."""
    sections = {
        "package": _package(),
        "machine": _machine(),
        "libraries": {name: _installed(name, extra) for name, extra in LIBRARIES.items()},
        "backends": {name: f"for {device}, {_state(name, device)}" for name, (_, device) in backends.BACKENDS.items()},
        "environment": _environment(),
    }
    console = Console()
    if arguments.json:
        content = {**sections, "products": [_product(product) for product in Product]}
        console.print(json.dumps(content, indent=2, ensure_ascii=False), soft_wrap=True)
        return 0
    for title, rows in sections.items():
        console.print(title.capitalize(), style="bold cyan")
        console.print(_table(rows))
        console.print()
    console.print("Products", style="bold cyan")
    console.print(_products())
    return 0


def _table(rows: Mapping[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=22, no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(f"  {name}", text)
    return table


def _package() -> Section:
    return {
        "version": normgrad.__version__,
        "path": str(Path(normgrad.__file__).parent),
        "kernel cache": _cache(),
    }


def _cache() -> str:
    """The folder where compiled kernels are kept, and why not another."""
    folder, problems = used_folder()
    because = "; ".join(problems)
    if folder is None:
        return f"none, so every process compiles its kernels: {because}"
    return f"{folder} ({amount(disk_cache.stored(folder))})" + (f", since {because}" if because else "")


def _machine() -> Section:
    import llvmlite.binding as llvm  # a library that other commands do not need

    features = llvm.get_host_cpu_features()
    return {
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
        "processor": processor(),
        "CPU features": ", ".join(name for name in _FEATURES if features.get(name)) or "none that matter",
        "cores": f"{threads.usable_cores()} usable of {os.cpu_count()}",
        "threads": _or_problem(lambda: str(threads.get_num_threads())),
        "memory": _memory(),
        "GPUs": _gpus(),
        "LLVM": ".".join(map(str, llvm.llvm_version_info)),
    }


def _memory() -> str:
    try:
        nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not every system tells
        return "unknown"
    return _gibibytes(nbytes)


def _gpus() -> str:
    if find_spec("torch") is None:
        return "unknown without PyTorch"
    try:
        named = [
            f"{gpu.name} (compute {gpu.major}.{gpu.minor}, {_gibibytes(gpu.total_memory)})" for gpu in _every_gpu()
        ]
    except Exception as error:  # whatever a driver or library says
        return f"unknown: {reason(error)}"
    return ", ".join(named) or "none that PyTorch sees"


def _every_gpu() -> list[Any]:
    import torch

    return [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]


def _gibibytes(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def _installed(name: str, extra: str | None) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return f"not installed: pip install 'normgrad[{extra}]'" if extra else "not installed"


def _state(name: str, device: str) -> str:
    problems = _gpu_problems() if device == "cuda" else []
    if problems and all(problems):
        return f"does not run: {'; '.join(dict.fromkeys(map(str, problems)))}"
    try:
        backends.load(name)
    except Exception as error:  # whatever keeps a backend away is what the user wants to read
        return f"missing: {reason(error)}"
    if any(problems):
        return "; ".join(f"cuda:{i} {f'does not run: {p}' if p else 'in use'}" for i, p in enumerate(problems))
    return "in use" if _or_problem(lambda: backends.chosen(device) or "") == name else "ready"


def _gpu_problems() -> list[str | None]:
    """Why the kernels do not run, for each GPU that PyTorch sees; one reason where it sees none."""
    problem = devices.installation_problem()
    return [problem] if problem is not None else [devices.problem(index) for index in range(len(_every_gpu()))]


def _environment() -> Section:
    judges: dict[str, Callable[[], Any]] = {
        products.ENVIRONMENT: products.current_product,
        backends.ENVIRONMENT: lambda: backends.chosen("cpu"),
        threads.ENVIRONMENT: threads.get_num_threads,
        disk_cache.ENVIRONMENT: _try_cache,
    }
    found = {variable: _judged(variable, judge) for variable, judge in judges.items()}
    found |= {variable: os.environ[variable] for variable in _OTHERS if os.environ.get(variable)}
    return {**found, "product in force": _or_problem(lambda: _label(products.current_product()))}


def _try_cache() -> None:
    (folder,) = disk_cache.folders()
    problem = disk_cache.problem_of(folder)
    if problem:
        raise ValueError(f"{disk_cache.ENVIRONMENT} is {str(folder)!r}, which {problem}")


def _judged(variable: str, judge: Callable[[], Any]) -> str:
    """A variable's value, or what is wrong with it."""
    value = os.environ.get(variable)
    if not value:
        return "not set"
    try:
        judge()
    except ValueError as error:
        return str(error)
    return value


def _label(product: Product | None) -> str:
    return "none: a call is accepted if some product accepts it" if product is None else product.label


def _or_problem(read: Callable[[], str]) -> str:
    """What a function of the environment returns, or what is wrong with the environment."""
    try:
        return read()
    except ValueError as error:
        return str(error)


def _product(product: Product) -> dict[str, Any]:
    return {
        "product": product.label,
        "SoC names": [f"{prefix}*" for prefix in product.value.soc_prefixes] + list(product.value.soc_names),
        "operators": [family.value for family in Family if product.has(family)],
        "bfloat16": product.value.bfloat16,
    }


def _products() -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("product", no_wrap=True)
    table.add_column("SoC names", no_wrap=True)
    table.add_column("has")
    for product in Product:
        content = _product(product)
        operators = ["all operators"] if len(content["operators"]) == len(Family) else content["operators"]
        has = [*operators, *(["bfloat16"] if content["bfloat16"] else [])]
        table.add_row(content["product"], "\n".join(content["SoC names"]), ", ".join(has) or "none")
    return table
