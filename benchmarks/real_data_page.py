"""Put what was measured on real data into a page: the patterns of values, and the calls of models.

    python benchmarks/real_data_page.py docs/evidence/gpu.md --patterns data.json --models model_calls.json

``normgrad bench --data --json`` writes the one file, ``benchmarks/model_calls.py --json`` the other. Each table
replaces what stands between its two markers in the page: ``<!-- patterns -->`` and ``<!-- end of patterns -->``,
``<!-- model calls -->`` and ``<!-- end of model calls -->``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from model_calls import COLUMNS, Timed, cells, worst_first

from normgrad.bench.pattern_report import LIMITS
from normgrad.bench.pattern_runner import CONTROL
from normgrad.bench.patterns import NORMAL

Row = dict[str, Any]


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table in Markdown, with an empty line after it."""
    return ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles), *(f"| {' | '.join(r)} |" for r in rows), ""]


def machine(stored: dict[str, Any]) -> str:
    """What was measured on, and with which versions."""
    described = stored["machine"]
    place = described["device"]
    if place == "cpu":
        place = f"{described['processor']}, {described['threads']} threads"
    names = ("normgrad", "torch", "numba" if described["device"] == "cpu" else "triton")
    versions = (f"{name} {described['versions'][name]}" for name in names if name in described["versions"])
    return f"{place}, {', '.join(versions)}, {described['date'][:10]}."


def pattern_lines(stored: dict[str, Any]) -> list[str]:
    """The worst pattern of every operator, dtype and memory format, the worst first."""
    rows: list[Row] = [row for row in stored["results"] if row["time_over_normal"] is not None]
    patterns = [row for row in rows if row["pattern"] not in (NORMAL.name, CONTROL)]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in patterns:
        groups.setdefault((row["operator"], row["dtype"], row["layout"]), []).append(row)
    worst = [max(group, key=lambda row: row["time_over_normal"]) for group in groups.values()]
    worst.sort(key=lambda row: -row["time_over_normal"])
    limit = LIMITS["cpu" if stored["machine"]["device"] == "cpu" else "cuda"]
    slow = sum(row["time_over_normal"] > limit for row in patterns)
    control = [row["time_over_normal"] for row in rows if row["pattern"] == CONTROL]
    lines = [
        machine(stored),
        f"{slow} of {len(patterns)} measurements take more than {limit} × the time on normal data.",
        f"Control, normal data against other normal data: {min(control):.2f} to {max(control):.2f}.",
    ]
    for where, ratio in stored.get("subnormal_cost", {}).items():
        lines.append(f"A plain multiply-add {where} takes {ratio:.2f} × the time on subnormal operands.")
    titles = [
        "operator",
        "shape",
        "dtype",
        "format",
        "worst pattern",
        "µs",
        "normal, µs",
        "time / normal",
        "time / PyTorch",
    ]
    return [*lines, "", *table(titles, map(_pattern_cells, worst))]


def _pattern_cells(row: Row) -> list[str]:
    group = f" / {row['group']}" if row["group"] else ""
    against = "–" if row["time_over_pytorch"] is None else f"{row['time_over_pytorch']:.2f}"
    return [
        f"`{row['operator']}`",
        row["shape"].replace("x", "×") + group,
        row["dtype"],
        row["layout"],
        row["pattern"],
        f"{row['seconds'] * 1e6:.1f}",
        f"{row['normal_seconds'] * 1e6:.1f}",
        f"{row['time_over_normal']:.2f}",
        against,
    ]


def model_lines(stored: dict[str, Any]) -> list[str]:
    """Every distinct call, the slowest against PyTorch first."""
    found = worst_first([Timed(**row) for row in stored["results"]])
    slower = sum((line.time_over_pytorch or 0.0) > 1 for line in found)
    return [
        machine(stored),
        f"{slower} of {len(found)} distinct calls take longer than PyTorch's.",
        "",
        *table(COLUMNS, map(cells, found)),
    ]


def replaced(page: str, marker: str, lines: Sequence[str]) -> str:
    """The page with other lines between a pair of markers; ValueError where it has none."""
    begin, end = f"<!-- {marker} -->\n", f"<!-- end of {marker} -->\n"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page must have {begin.strip()} and {end.strip()} once, each on a line of its own")
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return before + begin + "\n".join(lines) + end + after


def main() -> int:
    """Replace the tables whose files are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--patterns", type=Path, metavar="JSON")
    parser.add_argument("--models", type=Path, metavar="JSON")
    options = parser.parse_args()
    page = options.page.read_text(encoding="utf-8")
    given = (("patterns", options.patterns, pattern_lines), ("model calls", options.models, model_lines))
    for marker, path, lines in given:
        if path is not None:
            try:
                page = replaced(page, marker, lines(json.loads(path.read_text(encoding="utf-8"))))
            except ValueError as error:
                print(f"{options.page}: {error}", file=sys.stderr)
                return 2
    options.page.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
