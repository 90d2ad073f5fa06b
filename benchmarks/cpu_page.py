"""Write the tables and the picture of ``docs/evidence/cpu.md`` from what was measured.

normgrad bench --startup --json benchmarks/results/cpu_2_cores.json --csv benchmarks/results/cpu_2_cores.csv
normgrad bench --grid --json benchmarks/results/cpu_2_cores_grid.json
python benchmarks/cpu_page.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bars import Row as Bars
from bars import bar_chart

from normgrad.bench.cases import TARGETS
from normgrad.bench.contenders.ours import CALL, NUMPY_CALL, PLAN
from normgrad.bench.results import geometric_mean

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cpu_2_cores.json"
GRID = RESULTS.with_name("cpu_2_cores_grid.json")
PAGE = ROOT / "docs" / "evidence" / "cpu.md"
PICTURE = ROOT / "docs" / "evidence" / "cpu.svg"
PEERS = ("PyTorch", "torch.compile", "JAX")
BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->\n"
SUMMARY_BEGIN, SUMMARY_END = "<!-- summary -->\n", "<!-- end of summary -->\n"
#: Operators that PyTorch has on the CPU too, with the same contract.
SAME_IN_PYTORCH = ("layer_norm_backward", "layer_norm", "group_norm_backward", "group_norm")
DTYPES = ("float32", "float16", "bfloat16")
SMALL = 1 << 20  # bytes: below, the limit says little
ORDERS = {"contiguous": "", "channels_last": "last"}

Row = dict[str, Any]
Case = dict[str, Row]  # by contender


def cases(rows: Iterable[Row]) -> Iterator[Case]:
    """The measurements of every case together; who was wrong or took no part is not among them."""
    for _, group in groupby(rows, lambda row: tuple(row[k] for k in ("operator", "shape", "group", "dtype", "layout"))):
        found = {row["contender"]: row for row in group if row["seconds"] is not None}
        if "normgrad" in found:
            yield found


def measured(path: Path) -> list[Case]:
    """Return the cases of a file of results; none where it is not there."""
    return list(cases(json.loads(path.read_text(encoding="utf-8"))["results"])) if path.exists() else []


def table(titles: list[str], rows: Iterable[list[str]]) -> list[str]:
    """In Markdown, with an empty line after it."""
    return ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles), *(f"| {' | '.join(r)} |" for r in rows), ""]


def name_of(case: Case) -> str:
    """An operator, its sizes, dtype and order."""
    row = case["normgrad"]
    group = "" if row["group"] is None else f" / {row['group']}"
    return f"`{row['operator']}` {row['shape']}{group} {row['dtype']} {ORDERS[row['layout']]}".rstrip()


def times(peer: str, case: Case, ours: str = "normgrad") -> float | None:
    """A library's time over ours."""
    return case[peer]["seconds"] / case[ours]["seconds"] if peer in case and ours in case else None


def times_pytorch(case: Case, ours: str = "normgrad") -> float | None:
    """PyTorch's time over ours."""
    return times("PyTorch", case, ours)


def means(found: list[Case]) -> list[str]:
    """A row for each operator, dtype and order."""
    groups: dict[tuple[str, str, str], list[Case]] = {}
    for case in found:
        row = case["normgrad"]
        if row["bytes"] >= SMALL:
            groups.setdefault((row["operator"], row["dtype"], row["layout"]), []).append(case)
    rows = []
    for (operator, dtype, layout), group in groups.items():
        shares = [case["normgrad"]["of_limit"] for case in group]
        speeds = [speed for case in group if (speed := times_pytorch(case)) is not None]
        error = max(case["normgrad"]["error_of_bound"] for case in group)
        mean, target = geometric_mean(shares) or 0.0, TARGETS.get(operator)
        verdict = ""
        if target is not None:
            reached = min(shares) >= target.every_case and mean >= target.geometric_mean
            verdict = f"{target.every_case:.0%} and {target.geometric_mean:.0%}: {'' if reached else 'not '}reached"
        against = f"{geometric_mean(speeds):.2f}" if speeds else "–"
        cells = [f"{min(shares):.0%}", f"{mean:.0%}", against, f"{error:.3f}", verdict]
        rows.append([f"`{operator}`", dtype, ORDERS[layout], *cells])
    return table(["operator", "dtype", "order", "worst", "mean", "× PyTorch", "error / bound", "target"], rows)


def below(found: list[Case]) -> list[str]:
    """The cases below their operator's target for every case, furthest first."""
    rows = []
    for case in sorted(found, key=lambda case: case["normgrad"]["of_limit"] or 0.0):
        row = case["normgrad"]
        target = TARGETS.get(row["operator"])
        if row["bytes"] >= SMALL and target is not None and row["of_limit"] < target.every_case:
            speed = times_pytorch(case)
            rows.append([name_of(case), f"{row['of_limit']:.0%}", "–" if speed is None else f"{speed:.2f}"])
    return table(["case below its target", "of limit", "× PyTorch"], rows)


def slower(found: list[Case], title: str) -> list[str]:
    """The cases in which PyTorch is faster than the plan's run or, if it was timed, a call with tensors; worst first.

    How calls with NumPy arrays compare is said too.
    """
    compared, behind = 0, []
    from_numpy = [speed for case in found if (speed := times_pytorch(case, NUMPY_CALL)) is not None]
    for case in found:
        speeds = [times_pytorch(case, ours) for ours in (PLAN, CALL, NUMPY_CALL)]
        counting = [speed for speed in speeds[:2] if speed is not None]
        compared += bool(counting)
        if min(counting, default=1.0) < 1:
            cells = ["" if speed is None else f"{speed:.2f}" for speed in speeds]
            behind.append((min(counting), [name_of(case), *cells]))
    lines = [f"{title}: slower than PyTorch in {len(behind)} of {compared} cases, the plan or the call with tensors."]
    if from_numpy:
        slow = sum(speed < 1 for speed in from_numpy)
        lines.append(
            f"A call with NumPy arrays takes longer than PyTorch's operator on tensors in {slow} of {len(from_numpy)}."
        )
    lines.append("")
    if behind:
        titles = ["case", "plan, × PyTorch", "call, × PyTorch", "call with NumPy, × PyTorch"]
        lines += table(titles, [cells for _, cells in sorted(behind)])
    return lines


def against(found: list[Case]) -> list[str]:
    """A row for each operator, dtype and order: how the libraries compare over all sizes, and how the process grew."""
    groups: dict[tuple[str, str, str], list[Case]] = {}
    for case in found:
        row = case["normgrad"]
        groups.setdefault((row["operator"], row["dtype"], row["layout"]), []).append(case)
    peers = [peer for peer in PEERS if any(times(peer, case) is not None for case in found)]
    rows = []
    for (operator, dtype, layout), group in groups.items():
        cells = []
        for peer in peers:
            speeds = [speed for case in group if (speed := times(peer, case)) is not None]
            cells.append(f"{geometric_mean(speeds):.2f}, {min(speeds):.2f}" if speeds else "–")
        growth = max(case["normgrad"]["peak_growth_bytes"] or 0 for case in group)
        workspace = max(case["normgrad"]["workspace_bytes"] or 0 for case in group)
        sizes = [f"{nbytes / 2**20:.1f} MB" for nbytes in (growth, workspace)]
        rows.append([f"`{operator}`", dtype, ORDERS[layout], str(len(group)), *cells, *sizes])
    titles = ["operator", "dtype", "order", "cases", *(f"× {peer}" for peer in peers), "growth", "workspace"]
    return table(titles, rows)


def ratios(default: list[Case], others: list[Case]) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Return PyTorch's time over ours by operator, memory format and dtype, from 1 MB on.

    Operators that PyTorch does not have are left out. The default sizes are timed for longer; operators that are not
    among them come from the grid.
    """
    timed = {case["normgrad"]["operator"] for case in default}
    found = [*default, *(case for case in others if case["normgrad"]["operator"] not in timed)]
    groups: dict[tuple[str, str], dict[str, list[float]]] = {}
    for case in found:
        row, ratio = case["normgrad"], times_pytorch(case)
        if row["operator"] in SAME_IN_PYTORCH and row["bytes"] >= SMALL and ratio is not None:
            groups.setdefault((row["operator"], row["layout"]), {}).setdefault(row["dtype"], []).append(ratio)
    return groups


def mean_and_range(found: Sequence[float]) -> str:
    """Return the geometric mean of factors with the least and the largest; a dash where there is none."""
    return f"{geometric_mean(found):.1f} ({min(found):.1f} to {max(found):.1f})" if found else "–"


def summary(groups: dict[tuple[str, str], dict[str, list[float]]]) -> list[str]:
    """Return a table with a row for each operator and memory format."""
    rows = [
        [f"`{operator}`", layout, *(mean_and_range(by.get(dtype, [])) for dtype in DTYPES)]
        for (operator, layout), by in groups.items()
    ]
    return table(["operator", "memory format", *DTYPES], rows)[:-1]


def draw(groups: dict[tuple[str, str], dict[str, list[float]]], machine: dict[str, Any]) -> str:
    """Return the picture: how many times faster than PyTorch, by operator and memory format."""
    rows = []
    for (operator, layout), by in groups.items():
        bars: list[tuple[float, str] | None] = []
        for dtype in DTYPES:
            factor = geometric_mean(by.get(dtype, []))
            bars.append(None if factor is None else (factor, f"{factor:.1f} ×"))
        rows.append(Bars(operator if layout == "contiguous" else f"{operator} {layout}", bars))
    place = f"{machine['cores']} cores of an {machine['processor']}, PyTorch {machine['versions']['torch']}"
    subtitle = f"Geometric mean over tensors of 1 MB and more: {place}"
    return bar_chart("Times faster than PyTorch's operators on a CPU", subtitle, DTYPES, rows)


def replaced(page: str, begin: str, end: str, lines: list[str]) -> str:
    """Return the page with new lines between two markers."""
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return before + begin + "\n".join(lines) + end + after


def grid(path: Path) -> list[str]:
    """Return what the grid adds."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    found = list(cases(stored["results"]))
    return [
        "The grid, from 2×2 to 256 MB (`normgrad bench --grid`): times of other libraries over the plan's,",
        "geometric mean and worst; the largest growth of the process during a plan's run, and the largest workspace.",
        "Below 1 MB a plain call with tensors counts too; one with NumPy arrays is timed beside it.",
        "",
        *against(found),
        *slower(found, "The grid"),
    ]


def calls(stored: dict[str, Any]) -> list[str]:
    """What whole calls cost, and the start."""
    rows = [
        [entry["case"], *(f"{1e6 * seconds:.1f}" for seconds in entry["seconds"].values())]
        for entry in stored["overhead"]
    ]
    lines = ["Whole calls on small data, µs:", "", *table(["case", *stored["overhead"][0]["seconds"]], rows)]
    if stored["startup"]:
        rows = [[_told(value) for value in entry.values()] for entry in stored["startup"]]
        lines += [
            "The first call in a fresh process:",
            "",
            *table([name.replace("_", " ") for name in stored["startup"][0]], rows),
        ]
    return lines


def _told(value: Any) -> str:
    return f"{value:.2f} s" if isinstance(value, float) else str(value)


def main() -> None:
    """Put the tables into the page, and the picture beside it."""
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    machine, found = stored["machine"], list(cases(stored["results"]))
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("numpy", "numba", "torch"))
    lines = [f"{machine['processor']}, {machine['cores']} cores, {versions}, {machine['date'][:10]}.", ""]
    lines += means(found) + below(found) + slower(found, "The default sizes") + calls(stored)
    if GRID.exists():
        lines += grid(GRID)
    page = replaced(PAGE.read_text(encoding="utf-8"), BEGIN, END, lines)
    groups = ratios(found, measured(GRID))
    page = replaced(page, SUMMARY_BEGIN, SUMMARY_END, [*summary(groups), ""])
    PICTURE.write_text(draw(groups, machine), encoding="utf-8")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
