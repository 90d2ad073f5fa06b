"""Tables of what was found, the worst first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normgrad.bench.implementations.implementation import Role
from normgrad.bench.implementations.ours import CALL, NUMPY_CALL
from normgrad.bench.results import (
    CaseResult,
    Measurement,
    numpy_speeds_against_peers,
    speeds_against_peers,
    summaries,
    worst_first,
    wrong,
)
from normgrad.contract.status import counted

NOTHING = "–"
_MOST_NAMED = 10
_WIDEST = 240


def show(console: Console, results: Sequence[CaseResult]) -> None:
    """Everything that follows from the results."""
    for title, some in (
        ("From 1 MB on, furthest from the limit first", [r for r in results if not r.case.is_small]),
        ("Under 1 MB, slowest against the fastest other library first", [r for r in results if r.case.is_small]),
    ):
        if some:
            console.print(title, style="bold cyan")
            print_whole(console, _cases(some))
            console.print()
    if any(not result.case.is_small for result in results):
        console.print("Geometric means of the cases from 1 MB on", style="bold cyan")
        print_whole(console, _means(results))
        console.print()
    _show_memory(console, results)
    show_skipped(console, [result.skipped for result in results])
    _show_slower(console, results)
    _show_largest_error(console, results)
    for case, measurement in wrong(results):
        text = f"WRONG: {measurement.implementation}, {case}: {measurement.problem}"
        console.print(text, style="bold red", soft_wrap=True)


def print_whole(console: Console, table: Table) -> None:
    """A table with nothing cut off, however narrow the terminal."""
    width = console.width
    console.width = max(width, _WIDEST)
    console.print(table)
    console.width = width


def new_table(*columns: str) -> Table:
    """The first columns are names, the rest numbers; nothing is cut off."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in columns:
        is_number = name in _NUMBERS
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True, overflow="ignore")
    return table


_NUMBERS = frozenset(
    [
        *("time", "limit", "of limit", "peer", "× peer", "cases", "worst", "mean", "error"),
        *("growth", "workspace", "normal", "time / normal", "PyTorch", "time / PyTorch", "worst / PyTorch"),
        *("eager", "override", "modules", "override16", "modules16", "compile", "compile+modules"),
        *("× eager", "× compile"),
    ]
)


_CASE_COLUMNS = (
    "operator",
    "shape",
    "dtype",
    "format",
    "by",
    "time",
    "limit",
    "of limit",
    "peer",
    "× peer",
    "fastest peer",
    "growth",
)


_WAYS = {CALL: "call", NUMPY_CALL: "call, NumPy"}


def _cases(results: Iterable[CaseResult]) -> Table:
    table = new_table(*_CASE_COLUMNS)
    for result in worst_first(results):
        case = result.case
        names = (case.operator, case.size, case.dtype, "last" if case.layout == "channels_last" else "")
        peer, limit = result.fastest(Role.PEER), result.fastest(Role.LIMIT)
        own: Measurement | None
        for own in result.of(Role.OURS) or (None,):
            table.add_row(
                *names,
                _WAYS.get(own.implementation if own else "", "plan"),
                Text("WRONG", "bold red") if own and own.problem else _time(own),
                _time(limit),
                _percent(result.of_limit(own)),
                _time(peer),
                _times(result.of_peer(own)),
                peer.implementation if peer else NOTHING,
                _megabytes(own.growth if own else None),
            )
    return table


def _means(results: Iterable[CaseResult]) -> Table:
    table = new_table("operator", "dtype", "format", "cases", "worst", "mean", "× peer", "error")
    for summary in summaries(results):
        if not summary.cases:
            continue
        table.add_row(
            summary.operator,
            summary.dtype,
            "last" if summary.layout == "channels_last" else "",
            str(summary.cases),
            _percent(summary.worst_of_limit),
            _percent(summary.mean_of_limit),
            _times(summary.mean_of_peer),
            NOTHING if summary.largest_error is None else f"{summary.largest_error:.3f}",
        )
    return table


def _show_memory(console: Console, results: Iterable[CaseResult]) -> None:
    """The cases in which the process grew most, by implementation."""
    most: dict[str, tuple[int, CaseResult, Measurement]] = {}
    for result in results:
        for m in result.measurements:
            if m.growth is not None and m.growth > most.get(m.implementation, (-1,))[0]:
                most[m.implementation] = (m.growth, result, m)
    if not most:
        return
    table = new_table("library", "growth", "workspace", "in the case")
    for name, (growth, result, m) in most.items():
        table.add_row(name, _megabytes(growth), _megabytes(m.workspace), str(result.case))
    console.print("Largest growth of the process during one call, its results included", style="bold cyan")
    print_whole(console, table)
    console.print()


def show_skipped(console: Console, skipped: Iterable[Mapping[str, str]]) -> None:
    """Print who took no part in how many cases, and why; ``skipped`` has the reasons of each case by name."""
    reasons: dict[tuple[str, str], int] = {}
    for absent in skipped:
        for name, reason in absent.items():
            reasons[name, reason] = reasons.get((name, reason), 0) + 1
    for (name, reason), count in reasons.items():
        text = f"{name} took no part in {counted(count, 'case')}: {reason}"
        console.print(text, style="dim", soft_wrap=True)


def _show_slower(console: Console, results: Sequence[CaseResult]) -> None:
    """Per library, in how many cases it is faster than the plan or the plain call, and in which."""
    from_numpy = numpy_speeds_against_peers(results)
    for peer, speeds in speeds_against_peers(results).items():
        slower = sorted(((speed, str(result.case)) for speed, result in speeds if speed < 1))
        style = "bold red" if slower else "bold green"
        console.print(f"Slower than {peer} in {len(slower)} of {len(speeds)} cases.", style=style)
        others = [speed for speed, _ in from_numpy.get(peer, ())]
        if others:
            behind = sum(speed < 1 for speed in others)
            console.print(f"  Called with NumPy arrays, which does not count: in {behind} of {len(others)} cases.")
        for speed, case in slower[:_MOST_NAMED]:
            console.print(f"  × {speed:.2f}  {case}")
        if len(slower) > _MOST_NAMED:
            console.print(f"  … and {len(slower) - _MOST_NAMED} more; --csv has them all")


def _show_largest_error(console: Console, results: Iterable[CaseResult]) -> None:
    errors = [(m.error, str(result.case)) for result in results for m in result.of(Role.OURS) if m.error is not None]
    if errors:
        error, case = max(errors)
        console.print(f"Largest error: {error:.4f} of the bound, in {case}.")


def _time(measurement: Measurement | None) -> str:
    if measurement is None or measurement.timing is None:
        return NOTHING
    return time_text(measurement.timing.median)


def time_text(seconds: float) -> str:
    """A time in the unit that suits it, three digits of it."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        value = seconds * scale
        if value >= 1 or unit == "µs":
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
    raise AssertionError("unreachable")


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share * 100:.1f} %"


def _times(factor: float | None) -> str:
    return NOTHING if factor is None else f"{factor:.2f}"


def _megabytes(nbytes: int | None) -> str:
    return NOTHING if nbytes is None else f"{nbytes / 2**20:.1f} MB"
