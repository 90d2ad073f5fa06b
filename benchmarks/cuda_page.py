"""Writes the tables and the picture of ``docs/evidence/gpu.md`` from ``benchmarks/results/cuda_h200.csv``.

Other libraries' speeds, which are not measured every time, come from ``cuda_h200_others.csv`` beside it.
"""

from __future__ import annotations

import csv
from pathlib import Path

from bars import Row as Bars
from bars import bar_chart

from normgrad.bench.results import geometric_mean

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cuda_h200.csv"
OTHERS = RESULTS.with_name("cuda_h200_others.csv")
PAGE = ROOT / "docs" / "evidence" / "gpu.md"
PICTURE = ROOT / "docs" / "evidence" / "gpu.svg"
BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->\n"
SUMMARY_BEGIN, SUMMARY_END = "<!-- summary -->\n", "<!-- end of summary -->\n"
SHORT = {"channels_last": "channels_last", "contiguous": ""}
CONTESTANTS = {
    "normgrad": "normgrad",
    "eager": "PyTorch",
    "compile": "torch.compile",
    "liger": "Liger",
    "quack": "QuACK",
}
DTYPES = ("bfloat16", "float32")

Row = dict[str, str]


def share(row: Row, name: str) -> float:
    """A contestant's speed in % of the copy."""
    return 100 * float(row["copy"]) / float(row[name])


def table(rows: list[Row]) -> list[str]:
    """The lines of a table of speeds."""
    timed = {name: title for name, title in CONTESTANTS.items() if any(row.get(name) for row in rows)}
    titles = ["operator", "sizes", "dtype", "order", "copy, µs", *(f"{title}, %" for title in timed.values())]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in rows:
        shares = (f"{share(row, name):.0f}" if row.get(name) else "" for name in timed)
        cells = [row["operator"], row["sizes"], row["dtype"], SHORT[row["order"]], row["copy"], *shares]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def tables(rows: list[Row], others: list[Row]) -> str:
    """The cases by operator, the calls of the small ones, and those that other libraries took part in."""
    first = rows[0]
    lines = [
        f"{first['gpu']}, driver {first['driver']}, PyTorch {first['torch']}, Triton {first['triton']}. "
        "Speeds in % of a device-to-device copy of the same bytes.",
        "",
        *table(rows),
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
    lines += ["", "Other libraries, in a run of their own, with normgrad as it was then:", "", *table(others)]
    return "\n".join(lines) + "\n"


def chosen(rows: list[Row], operator: str, order: str, dtype: str) -> list[Row]:
    """Return the rows of an operator, memory format and dtype."""
    return [row for row in rows if (row["operator"], row["order"], row["dtype"]) == (operator, order, dtype)]


def factors(rows: list[Row], operator: str, order: str, dtype: str) -> list[float]:
    """Return how many times faster than PyTorch normgrad is, for every size."""
    return [float(row["eager"]) / float(row["normgrad"]) for row in chosen(rows, operator, order, dtype)]


def summary(rows: list[Row]) -> str:
    """Return a table with a row for each operator and memory format: geometric mean and range over all sizes."""
    titles = [
        "operator",
        "memory format",
        *(f"{dtype}, {what}" for dtype in DTYPES for what in ("× PyTorch", "% of copy")),
    ]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for operator, order in dict.fromkeys((row["operator"], row["order"]) for row in rows):
        cells = [f"`{operator}`", order]
        for dtype in DTYPES:
            ratios = factors(rows, operator, order, dtype)
            shares = [share(row, "normgrad") for row in chosen(rows, operator, order, dtype)]
            cells.append(f"{geometric_mean(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})")
            cells.append(f"{geometric_mean(shares):.0f} ({min(shares):.0f} to {max(shares):.0f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def replaced(page: str, begin: str, end: str, content: str) -> str:
    """Return the page with new content between two markers."""
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return before + begin + content + end + after


def draw(rows: list[Row]) -> str:
    """Return the picture: how many times faster than PyTorch, by operator and memory format."""
    shown = []
    for operator, order in dict.fromkeys((row["operator"], row["order"]) for row in rows):
        bars: list[tuple[float, str] | None] = []
        for dtype in DTYPES:
            factor = geometric_mean(factors(rows, operator, order, dtype))
            bars.append(None if factor is None else (factor, f"{factor:.1f} ×"))
        shown.append(Bars(f"{operator} {SHORT[order]}".rstrip(), bars))
    subtitle = f"Geometric mean over the sizes of the table: {rows[0]['gpu']}, PyTorch {rows[0]['torch']}"
    return bar_chart("Times faster than PyTorch's eager operators", subtitle, DTYPES, shown)


def main() -> None:
    """Put the tables into the page, and the picture beside it."""
    with open(RESULTS, newline="") as file, open(OTHERS, newline="") as other_file:
        rows = list(csv.DictReader(file))
        others = list(csv.DictReader(other_file))
    page = replaced(PAGE.read_text(), BEGIN, END, tables(rows, others))
    PAGE.write_text(replaced(page, SUMMARY_BEGIN, SUMMARY_END, summary(rows)))
    PICTURE.write_text(draw(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
