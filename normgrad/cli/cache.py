"""List the compiled CPU kernels that are kept on disk, with their sizes, or clear them.

A kernel is compiled when it is first called, which takes seconds, and kept. One that was removed is compiled again when
it is next called. The environment variable NORMGRAD_CACHE_DIR names another folder to keep them in.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.table import Table

from normgrad.cli.errors import BadInput, reason
from normgrad.cli.terminal import Console
from normgrad.contract.status import counted
from normgrad.cpu.compile import disk_cache

NAME = "cache"
HELP = "list or clear the compiled kernels that are kept on disk"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do."""
    parser.add_argument(
        "action",
        metavar="{list,clear}",
        nargs="?",
        default="list",
        choices=("list", "clear"),
        help="print the folder, its kernels and their sizes, or remove the kernels (default: list)",
    )


def execute(arguments: argparse.Namespace) -> int:
    """List or remove the files of every folder that holds some."""
    console = Console()
    used, problems = used_folder()
    for problem in problems:
        console.print(f"not used: {problem}", style="bold yellow", soft_wrap=True)
    if used is None:
        console.print("Every process compiles its kernels.", style="bold yellow")
    for folder in disk_cache.folders():
        files = disk_cache.stored(folder)
        if not files and folder != used:
            continue
        if arguments.action == "clear":
            _remove(files)
            console.print(f"removed from {folder}: {amount(files)}", soft_wrap=True)
        else:
            console.print(f"{folder}: {amount(files)}", style="bold cyan", soft_wrap=True)
            if files:
                console.print(_table(console, files))
    return 0


def amount(files: Sequence[disk_cache.Stored]) -> str:
    """The number of kernels and their size."""
    kilobytes = sum(file.nbytes for file in files) / 1000
    size = f"{kilobytes / 1000:.1f} MB" if kilobytes >= 1000 else f"{kilobytes:.0f} kB"
    return f"{counted(len(files), 'kernel')}, {size}" if files else "no kernels"


def used_folder() -> tuple[Path | None, list[str]]:
    """The folder where kernels are kept, None where there is none, and why those that are preferred are not used."""
    problems: list[str] = []
    for folder in disk_cache.folders():
        problem = disk_cache.problem_of(folder)
        if problem is None:
            return folder, problems
        problems.append(f"{folder} {problem}")
    return None, problems


def _remove(files: Sequence[disk_cache.Stored]) -> None:
    try:
        for file in files:
            file.path.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(f"{error.filename}: cannot be removed: {reason(error)}") from None


def _table(console: Console, files: Sequence[disk_cache.Stored]) -> Table:
    """The kernels with as many columns as fit beside whole names."""
    rows = []
    for kernel, variants in groupby(files, key=lambda file: file.kernel):
        of_kernel = list(variants)
        size = f"{sum(file.nbytes for file in of_kernel) / 1000:.0f} kB"
        day = time.strftime("%Y-%m-%d", time.localtime(max(file.last_used for file in of_kernel)))
        rows.append((f"  {kernel}", size, str(len(of_kernel)), day))
    headers = ("  kernel", "size", "variants", "last used")
    widths = [max(map(len, column)) + len("  ") for column in zip(headers, *rows, strict=True)]
    shown = next((count for count in (4, 3) if sum(widths[:count]) <= console.width), 2)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for header in headers[:shown]:
        table.add_column(header, justify="left" if header == headers[0] else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row[:shown])
    return table
