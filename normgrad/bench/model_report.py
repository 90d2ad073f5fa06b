"""What ``normgrad bench --models`` prints and writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from normgrad.bench.model_steps import BASELINES, MODES, ModelResult, ModeResult, Settings
from normgrad.bench.models import MODELS
from normgrad.bench.report import NOTHING, new_table, print_whole


def show(console: Console, results: Sequence[ModelResult], modes: Sequence[str]) -> None:
    """Print a line per model and dtype, and what was skipped or is wrong."""
    timed = [result for result in results if result.results]
    shown = [mode for mode in MODES if mode in modes]
    if timed:
        console.print("Milliseconds of a training step; × is the baseline's time over the mode's", style="bold cyan")
        table = new_table("model", "dtype", "batch", *_titles(shown))
        for result in timed:
            cells = [cell for mode in shown for cell in _cells(result, mode)]
            batch = "×".join(map(str, result.batch))
            table.add_row(MODELS[result.model].title, result.dtype, batch, *cells)
        print_whole(console, table)
        console.print()
    for name, problem in skipped(results).items():
        console.print(f"skipped: {name}: {problem}", style="dim", soft_wrap=True)
    for result in results:
        for mode in result.results:
            if mode.problem:
                word, style = ("WRONG", "bold red") if mode.is_wrong else ("skipped", "dim")
                text = f"{word}: {result.model}, {result.dtype}, {mode.mode}: {mode.problem}"
                console.print(text, style=style, soft_wrap=True)
    _show_losses(console, timed)


def _titles(modes: Sequence[str]) -> list[str]:
    titles = []
    for mode in modes:
        titles.append(mode)
        if mode in BASELINES:
            titles.append(f"× {BASELINES[mode]}")
    return titles


def _cells(result: ModelResult, mode: str) -> list[str | Text]:
    found = next((each for each in result.results if each.mode == mode), None)
    time: str | Text = NOTHING
    if found is not None and found.is_wrong:
        time = Text("WRONG", "bold red")
    elif found is not None and found.seconds is not None:
        time = f"{found.seconds * 1e3:.2f}"
    return [time, _speedup(found)] if mode in BASELINES else [time]


def _speedup(result: ModeResult | None) -> str:
    return NOTHING if result is None or result.speedup is None else f"{result.speedup:.3f}"


def _show_losses(console: Console, results: Sequence[ModelResult]) -> None:
    """Print how close the losses came to what is allowed, at the most."""
    shares = [
        (mode.difference / mode.allowed, f"{result.model}, {result.dtype}, {mode.mode}")
        for result in results
        for mode in result.results
        if mode.difference is not None and mode.allowed
    ]
    if shares:
        share, name = max(shares)
        text = f"Losses: the largest difference from eager mode is {share:.2f} of what rounding allows ({name})."
        console.print(text, soft_wrap=True)


def skipped(results: Sequence[ModelResult]) -> dict[str, str]:
    """Return why models could not be built, by name."""
    return {result.model: result.problem for result in results if result.problem}


def rows(results: Sequence[ModelResult], settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield one flat record per model, dtype and mode; times in seconds."""
    for result in results:
        for mode in result.results:
            yield {
                "model": result.model,
                "title": MODELS[result.model].title,
                "dtype": result.dtype,
                "batch": "x".join(map(str, result.batch)),
                "mode": mode.mode,
                "seconds": mode.seconds,
                "baseline": BASELINES.get(mode.mode),
                "speedup": mode.speedup,
                "first_step_seconds": mode.first_step,
                "rounds": settings.rounds,
                "steps_per_round": settings.steps,
                "loss_steps": len(mode.losses),
                "last_loss": mode.losses[-1] if mode.losses else None,
                "loss_difference": mode.difference,
                "loss_allowed": mode.allowed,
                "problem": mode.problem or None,
            }
