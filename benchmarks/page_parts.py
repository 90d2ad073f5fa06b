"""What the generated pages have in common: Markdown tables, the machine, and the parts between markers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from normgrad.bench.machine import hardware

ROOT = Path(__file__).resolve().parent.parent

_TITLES = {"torch": "PyTorch", "triton": "Triton", "numpy": "NumPy", "numba": "Numba", "jax": "JAX"}


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> str:
    """Return a table; the last ``numbers`` columns are aligned to the right."""
    rule = ["---"] * (len(titles) - numbers) + ["---:"] * numbers
    lines = ["| " + " | ".join(titles) + " |", "|" + "|".join(rule) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def machine_line(results: dict[str, Any], *packages: str, end: str = ".") -> str:
    """Return a line that says what was measured on, with which versions, and when."""
    machine = results["machine"]
    threads = f", {machine['threads']} threads" if machine["device"] == "cpu" else ""
    versions = (f"{_TITLES.get(name, name)} {machine['versions'][name]}" for name in packages)
    return f"{hardware(machine)}{threads}, {', '.join(versions)}, {machine['date'][:10]}{end}\n"


def replaced(page: str, marker: str, content: str) -> str:
    """Return the page with other content between a pair of markers; ValueError where it has none."""
    begin, end = f"<!-- {marker} -->\n", f"<!-- end of {marker} -->\n"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page must have {begin.strip()} and {end.strip()} once, each on a line of its own")
    before, rest = page.split(begin)
    return before + begin + content + end + rest.split(end)[1]
