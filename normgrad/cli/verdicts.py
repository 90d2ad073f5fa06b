"""Print what a judge found."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from normgrad.testing.judgement import Element, Judgement, OutputJudgement
from normgrad.testing.measured import percent

_LONGEST_WHOLE = 20  # characters of the name of a case, which on a narrow terminal leave room for what is wrong


def show_case(console: Console, name: str, judgement: Judgement, *, only_failed: bool = False) -> None:
    """Everything about one case, or about its results that failed."""
    console.print(Text.assemble((judgement.operator, "bold cyan"), f"  {name}, standard {judgement.standard}"))
    for output in judgement.outputs:
        if not (only_failed and output.passed):
            _show_output(console, output)
    if not judgement.outputs:
        console.print("No output is requested.")
    console.print()


def show_summary(console: Console, outcomes: Sequence[tuple[str, Judgement | None, str]]) -> None:
    """A line per case, those that failed last, and the count."""
    table = Table(box=None, padding=(0, 1), header_style="dim")
    longest = max((len(name) for name, _, _ in outcomes), default=0)
    table.add_column("case", overflow="fold", no_wrap=longest <= _LONGEST_WHOLE)
    table.add_column("", no_wrap=True)
    table.add_column("of bound", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    failed = [outcome for outcome in outcomes if outcome[1] is None or not outcome[1].passed]
    for name, judgement, problem in [*(o for o in outcomes if o not in failed), *failed]:
        if judgement is None:
            table.add_row(name, Text("CANNOT BE JUDGED", "bold yellow"), "", problem)
            continue
        shares = [output.errors.largest_share for output in judgement.outputs if output.errors]
        wrong = ", ".join(output.name for output in judgement.outputs if not output.passed)
        table.add_row(name, _verdict(judgement.passed), _share(max(shares)) if shares else "–", wrong)
    console.print(table)
    console.print()
    if failed:
        unjudged = sum(judgement is None for _, judgement, _ in failed)
        parts = f": {len(failed) - unjudged} failed, {unjudged} cannot be judged" if unjudged else ""
        console.print(f"{len(failed)} of {len(outcomes)} cases did not pass{parts}.", style="bold red")
    else:
        console.print(f"All {len(outcomes)} cases passed.", style="bold green")


def _share(value: float) -> str:
    """A fraction of the bound; what is within it does not read as 1, and NaN, Inf or a number out of place has none."""
    if not math.isfinite(value):
        return "special"
    return f"{min(value, 0.999):.3g}" if value <= 1 else f"{value:.3g}"


def _verdict(passed: bool) -> Text:
    return Text("pass", "green") if passed else Text("FAIL", "bold red")


def _show_output(console: Console, output: OutputJudgement) -> None:
    shape = f"  {output.dtype} {output.shape}" if output.dtype else ""
    console.print(Text.assemble("  ", _verdict(output.passed), "  ", (output.name, "bold"), (shape, "dim")))
    _indented(console, 8, output.report.text)
    if output.errors is None:
        return
    quantiles = ", ".join(f"{share} below {value:.3g}" for share, value in output.errors.quantiles.items())
    _indented(console, 8, f"errors in ulp: {quantiles}; {percent(output.errors.rounded)} correctly rounded")
    for cluster in output.errors.clusters:
        _indented(console, 8, f"beyond the bound, {cluster.kind}: {cluster.text}")
    if not output.passed:
        worst = output.errors.worst
        for element in [element for element in worst if not element.share <= 1] or worst:
            _show_element(console, element)


def _show_element(console: Console, element: Element) -> None:
    error = f", {element.ulps:.4g} ulp, {element.share:.4g} of the bound" if math.isfinite(element.share) else ""
    _indented(console, 10, f"at {element.index}: {element.actual:.9g} for {element.exact:.9g}{error}")
    terms = {**element.terms, "T": element.total, "U": element.underflow}
    for what, values in (("inputs", element.inputs), ("terms", terms)):
        if values:
            _indented(
                console, 12, f"{what}: {', '.join(f'{name} {value:.7g}' for name, value in values.items())}", "dim"
            )


def _indented(console: Console, columns: int, text: str, style: str = "") -> None:
    console.print(Padding(Text(text, style), (0, 0, 0, columns), expand=False))
