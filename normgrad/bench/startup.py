"""How long a fresh process takes to its first result: compiling, and from the cache on disk."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import normgrad
from normgrad.bench.cases import GATHER, Case
from normgrad.bench.report import print_whole, time_text
from normgrad.bench.workload import workload
from normgrad.cpu.compile import disk_cache

_TIME_LIMIT = 300  # seconds for one process

# The data comes from a file, so that nothing but the import of normgrad is timed as such.
_PROGRAM = """
import json, pickle, sys, time
start = time.perf_counter()
import normgrad
imported = time.perf_counter()
with open(sys.argv[2], "rb") as stream:
    arguments = pickle.load(stream)
ready = time.perf_counter()
getattr(normgrad, sys.argv[1])(**arguments)
called = time.perf_counter()
print(json.dumps([imported - start, called - ready]))
"""


@dataclass(frozen=True)
class Startup:
    """Seconds: of the import, and of the first call with an empty cache and with a full one."""

    operator: str
    dtype: str
    first_import: float
    compiling_call: float
    cached_import: float
    cached_call: float

    @property
    def cached_total(self) -> float:
        return self.cached_import + self.cached_call


_SHAPES = {"layer": ((16, 64), 0), "group": ((2, 8, 4, 4), 2), "batch": ((4, 8, 4, 4), 0)}


def measure_startup(operator: str, dtype: str) -> Startup:
    """Two processes one after the other: the first compiles, the second finds what the first left."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "arguments"
        data.write_bytes(pickle.dumps(workload(_small(operator, dtype)).arguments))
        first, second = (_process(operator, data, Path(folder) / "cache") for _ in range(2))
    return Startup(operator, dtype, *first, *second)


def _small(operator: str, dtype: str) -> Case:
    shape, group = ((2, 8), 0) if operator == GATHER else _SHAPES[operator.partition("_")[0]]
    return Case(operator, shape, dtype, group=group)


def _process(operator: str, data: Path, cache: Path) -> tuple[float, float]:
    """Seconds of the import and of the first call in a process of its own, whose kernels are kept in a folder."""
    package = str(Path(normgrad.__file__).parents[1])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, operator, str(data)],
        env={**os.environ, disk_cache.ENVIRONMENT: str(cache), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=_TIME_LIMIT,
    )
    imported, called = json.loads(done.stdout)
    return imported, called


def show(console: Console, found: Sequence[Startup]) -> None:
    """The slowest from the cache first."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("operator", "dtype"):
        table.add_column(name)
    for name in ("import", "first call ever", "import", "first call from the cache", "both"):
        table.add_column(name, justify="right")
    for startup in sorted(found, key=lambda s: -s.cached_total):
        seconds = (
            startup.first_import,
            startup.compiling_call,
            startup.cached_import,
            startup.cached_call,
            startup.cached_total,
        )
        table.add_row(startup.operator, startup.dtype, *map(time_text, seconds))
    console.print("A fresh process: compiling, and from the cache on disk", style="bold cyan")
    print_whole(console, table)
    console.print()


def record(found: Sequence[Startup]) -> list[dict[str, Any]]:
    """For a file."""
    return [asdict(startup) for startup in found]
