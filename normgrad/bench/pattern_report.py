"""What ``normgrad bench --data`` prints and writes: the worst ratio first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from normgrad.bench.pattern_runner import CONTROL, PatternCase, PatternResult
from normgrad.bench.report import NOTHING, new_table, print_whole, show_skipped, time_text

#: Up to which multiple of normal data's time a pattern counts as equally fast; a CPU that others use is the noisier.
LIMITS = {"cpu": 1.25, "cuda": 1.1}

_MOST_NAMED = 10

Value = Callable[[PatternResult], float | None]


def _over_normal(result: PatternResult) -> float | None:
    return result.over_normal


def _over_pytorch(result: PatternResult) -> float | None:
    return result.over_pytorch


def worst_first(results: Iterable[PatternResult], value: Value = _over_normal) -> list[PatternResult]:
    """Return the results on patterns that have a ratio, the largest first."""
    timed = [(ratio, result) for result in results if result.is_pattern and (ratio := value(result)) is not None]
    return [result for _, result in sorted(timed, key=lambda pair: -pair[0])]


def every_result(cases: Iterable[PatternCase]) -> list[PatternResult]:
    """Return the results of all cases."""
    return [result for case in cases for result in case.results]


def wrong(cases: Iterable[PatternCase]) -> list[PatternResult]:
    """Return every result of normgrad's own that is beyond the bound."""
    return [result for result in every_result(cases) if result.problem]


def rows(cases: Iterable[PatternCase]) -> Iterator[dict[str, Any]]:
    """Yield one flat record per case and pattern; times in seconds."""
    for result in every_result(cases):
        yield {
            **result.case.fields,
            "pattern": result.pattern,
            "seconds": result.seconds,
            "normal_seconds": result.normal_seconds,
            "time_over_normal": result.over_normal,
            "pytorch_seconds": result.pytorch_seconds,
            "time_over_pytorch": result.over_pytorch,
            "pytorch_time_over_normal": result.pytorch_over_normal,
            "rounds": result.rounds,
            "error_of_bound": result.error,
            "problem": result.problem or None,
            "pytorch_error_of_loose_bound": result.pytorch_error,
            "pytorch_problem": result.pytorch_problem or None,
        }


def skipped(cases: Iterable[PatternCase]) -> list[dict[str, str]]:
    """Return a record for every library that took no part in a case, with the reason."""
    return [
        {"case": str(case.case), "library": name, "reason": reason}
        for case in cases
        for name, reason in case.skipped.items()
    ]


def show(console: Console, cases: Sequence[PatternCase], device: str, subnormal_cost: Mapping[str, float]) -> None:
    """Print the worst ratios, a line per operator, dtype and memory format, the noise, and what is wrong."""
    results = every_result(cases)
    worst = worst_first(results)
    if worst:
        _show_worst(console, worst, LIMITS[device])
        console.print("The worst pattern of every operator, dtype and memory format", style="bold cyan")
        print_whole(console, _summary(results))
        console.print()
    _show_noise(console, results)
    for where, ratio in subnormal_cost.items():
        text = f"This processor, a plain multiply-add {where}: subnormal operands take {ratio:.2f} of the time."
        console.print(text, soft_wrap=True)
    show_skipped(console, [case.skipped for case in cases])
    deviating = [result for result in results if result.pytorch_problem]
    if deviating:
        text = f"PyTorch's results are beyond the loose bound in {len(deviating)} of {len(results)} measurements:"
        console.print(text, style="dim", soft_wrap=True)
        for result in deviating[:_MOST_NAMED]:
            console.print(f"  {name_of(result)}: {result.pytorch_problem}", style="dim", soft_wrap=True)
    for result in results:
        if result.problem:
            console.print(f"WRONG: {name_of(result)}: {result.problem}", style="bold red", soft_wrap=True)


def name_of(result: PatternResult) -> str:
    """Return the case and the pattern in words."""
    return f"{result.case}, {result.pattern}"


def _show_worst(console: Console, worst: Sequence[PatternResult], limit: float) -> None:
    first = worst[0]
    slow = [result for result in worst if (result.over_normal or 0.0) > limit]
    against = f", {first.over_pytorch:.2f} of PyTorch's" if first.over_pytorch is not None else ""
    text = f"Worst: {name_of(first)}: {first.over_normal:.2f} of the time on normal data{against}."
    console.print(text, style="bold red" if slow else "bold green", soft_wrap=True)
    console.print(
        f"{len(slow)} of {len(worst)} measurements take more than {limit} of the time on normal data.", soft_wrap=True
    )
    behind = worst_first(worst, _over_pytorch)
    if behind:
        count = sum((result.over_pytorch or 0.0) > 1 for result in behind)
        slowest = behind[0]
        console.print(
            f"{count} of {len(behind)} take longer than PyTorch; worst: {name_of(slowest)}: "
            f"{slowest.over_pytorch:.2f} of its time.",
            soft_wrap=True,
        )
    console.print()
    console.print("The worst ten", style="bold cyan")
    table = new_table(*_COLUMNS)
    for result in worst[:_MOST_NAMED]:
        table.add_row(*_cells(result))
    print_whole(console, table)
    console.print()


_COLUMNS = (
    *("operator", "shape", "dtype", "format", "pattern"),
    *("time", "normal", "time / normal", "PyTorch", "time / PyTorch"),
)


def _cells(result: PatternResult) -> tuple[str, ...]:
    case = result.case
    times = (_time(result.seconds), _time(result.normal_seconds), _ratio(result.over_normal))
    against = (_time(result.pytorch_seconds), _ratio(result.over_pytorch))
    return (case.operator, case.size, case.dtype, case.layout, result.pattern, *times, *against)


def _summary(results: Sequence[PatternResult]) -> Any:
    """Return a table with one line per operator, dtype and memory format, the worst first."""
    groups: dict[tuple[str, str, str], list[PatternResult]] = {}
    for result in results:
        case = result.case
        groups.setdefault((case.operator, case.dtype, case.layout), []).append(result)
    table = new_table(*_COLUMNS, "worst / PyTorch", "error")
    ordered = sorted(filter(None, map(worst_first, groups.values())), key=lambda group: -(group[0].over_normal or 0.0))
    for group in ordered:
        behind = worst_first(group, _over_pytorch)
        errors = [result.error for result in group if result.error is not None]
        table.add_row(
            *_cells(group[0]),
            _ratio(behind[0].over_pytorch if behind else None),
            f"{max(errors):.3f}" if errors else NOTHING,
        )
    return table


def _show_noise(console: Console, results: Sequence[PatternResult]) -> None:
    noise = [(r.over_normal, r) for r in results if r.pattern == CONTROL and r.over_normal is not None]
    if noise:
        ratios = [ratio for ratio, _ in noise]
        _, worst = max(noise, key=lambda pair: pair[0])
        console.print(
            f"Control, normal data against other normal data: {min(ratios):.2f} to {max(ratios):.2f}, the largest in "
            f"{worst.case}.",
            soft_wrap=True,
        )


def _time(seconds: float | None) -> str:
    return NOTHING if seconds is None else time_text(seconds)


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"
