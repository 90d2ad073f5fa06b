"""Writes the tables of ``docs/performance_gpu.md`` from ``benchmarks/results/cuda_h200.csv``."""

from __future__ import annotations

import csv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cuda_h200.csv"
PAGE = ROOT / "docs" / "performance_gpu.md"
BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->\n"
SHORT = {"channels_last": "channels_last", "contiguous": ""}


def share(row: dict[str, str], name: str) -> str:
    """A contestant's speed in % of the copy."""
    return f"{100 * float(row['copy']) / float(row[name]):.0f}" if row[name] else ""


def tables(rows: list[dict[str, str]]) -> str:
    """One table of the large cases by operator, and one of the calls of the small ones."""
    first = rows[0]
    lines = [
        f"{first['gpu']}, driver {first['driver']}, PyTorch {first['torch']}, Triton {first['triton']}. "
        "Speeds in % of a device-to-device copy of the same bytes.",
        "",
        "| operator | sizes | dtype | order | copy, µs | normgrad, % | PyTorch, % | torch.compile, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shares = (share(row, name) for name in ("normgrad", "eager", "compile"))
        cells = [row["operator"], row["sizes"], row["dtype"], SHORT[row["order"]], row["copy"], *shares]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "Host time of a call and time of a replayed CUDA graph, in µs:",
        "",
        "| operator | sizes | dtype | order | call | plan.run | PyTorch call | graph | PyTorch graph |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["call"]:
            times = (row[name] for name in ("call", "plan_call", "eager_call", "graph", "eager_graph"))
            cells = [row["operator"], row["sizes"], row["dtype"], SHORT[row["order"]], *times]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Put the tables into the page."""
    with open(RESULTS, newline="") as file:
        rows = list(csv.DictReader(file))
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + tables(rows) + END + after)


if __name__ == "__main__":
    main()
