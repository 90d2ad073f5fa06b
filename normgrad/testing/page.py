"""The report as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from normgrad.testing.judgement import Element, Errors, Judgement, OutputJudgement
from normgrad.testing.measured import percent
from normgrad.testing.page_style import CSS
from normgrad.testing.plots import plots

_NOTES = (
    "The bound of an element is ½ ulp + 8·2⁻²⁴·T + 2⁻¹²⁶·U. T, the sum of the absolute values of its terms, allows for "
    "cancellation. U allows for products and quotients below 2⁻¹²⁶, which may lose all their digits.",
    "Dashed lines in the plots: the bound of an element (left), and ±½ ulp, the largest error of a result that is "
    "rounded once (middle). The outermost bars of the histogram hold all errors beyond.",
    "Rows, samples, channels, positions and indices are counted from 0.",
)

PASS, FAIL, NOT_JUDGED = "pass", "fail", "not judged"


@dataclass(frozen=True)
class Origin:
    """What wrote a report, when (UTC), and the command that did."""

    program: str
    date: str
    command: str


@dataclass(frozen=True)
class Section:
    """The part of the page on one case, and its line in the table of cases."""

    name: str
    verdict: str
    line: str
    outputs: Sequence[OutputJudgement]
    plots: Mapping[str, Sequence[str]]


def section(name: str, judgement: Judgement, *, with_plots: bool) -> Section:
    """The part of the page on one case. What was measured is drawn now, and not kept."""
    failed = [output.name for output in judgement.outputs if not output.passed]
    shares = [output.errors.largest_share for output in judgement.outputs if output.errors]
    if not shares:
        line = "nothing to measure"
    elif math.isfinite(max(shares)):
        line = f"{_share(max(shares))} of the bound at most"
    else:
        line = "special values out of place"
    if failed:
        line += f"; wrong: {', '.join(failed)}"
    drawn = {o.name: plots(o.measured) for o in judgement.outputs if with_plots and o.measured is not None}
    return Section(name, FAIL if failed else PASS, line, judgement.without_arrays().outputs, drawn)


def not_judged(name: str, text: str) -> Section:
    """The part on a case that cannot be judged."""
    return Section(name, NOT_JUDGED, text, (), {})


def page(title: str, subtitle: str, sections: Sequence[Section], origin: Origin) -> str:
    """The whole page; of several cases a table first, which links to them, and those that passed folded."""
    head = f"<h1>{escape(title)}</h1><p class=dim>{escape(subtitle)}</p><p>{_summary_of(sections)}</p>"
    if len(sections) == 1:
        body = f"<div class=card>{_body(sections[0], 'h2')}</div>"
    else:
        order = (NOT_JUDGED, FAIL, PASS)
        ordered = sorted(sections, key=lambda part: order.index(part.verdict))
        body = _table_of_cases(ordered) + "".join(_folded(number, part) for number, part in enumerate(ordered))
    notes = "".join(f"<p>{escape(note)}</p>" for note in _NOTES)
    foot = f"<footer class=dim>{notes}<p>{escape(origin.program)}, {escape(origin.date)}</p>"
    foot += f"<p><code>{escape(origin.command)}</code></p></footer>"
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="generator" content="{escape(origin.program)}">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>"
        f"<body><main>{head}{body}{foot}</main></body></html>\n"
    )


def _summary_of(sections: Sequence[Section]) -> str:
    """The verdict on all cases, in a badge and words."""
    if len(sections) == 1:
        return f"{_badge(sections[0].verdict)}{escape(sections[0].line)}"
    counts = {verdict: sum(part.verdict == verdict for part in sections) for verdict in (PASS, FAIL, NOT_JUDGED)}
    words = {PASS: "passed", FAIL: "failed", NOT_JUDGED: "could not be judged"}
    text = ", ".join(f"{count} {words[verdict]}" for verdict, count in counts.items() if count)
    return f"{_badge(PASS if counts[PASS] == len(sections) else FAIL)}{len(sections)} cases: {text}"


def _badge(verdict: str) -> str:
    return f'<span class="badge {verdict.replace(" ", "-")}">{verdict}</span>'


def _table_of_cases(sections: Sequence[Section]) -> str:
    rows = "".join(
        f"<tr><td>{_badge(part.verdict)}</td><td><a href='#case-{number}'>{escape(part.name)}</a></td>"
        f"<td>{escape(part.line)}</td></tr>"
        for number, part in enumerate(sections)
    )
    heads = "<tr><th>verdict</th><th>case</th><th>worst error</th></tr>"
    return f"<div class='card scroll'><table><caption>Cases</caption>{heads}{rows}</table></div>"


def _folded(number: int, part: Section) -> str:
    # A link to an element inside a folded one unfolds it.
    head = f"<summary>{_badge(part.verdict)}<h2>{escape(part.name)}</h2></summary>"
    is_open = "" if part.verdict == PASS else " open"
    return f"<details class=card{is_open}>{head}<div id=case-{number}>{_body(part, 'h3')}</div></details>"


def _body(part: Section, heading: str) -> str:
    if part.verdict == NOT_JUDGED:
        return f"<p>{escape(part.line)}</p>"
    body = "".join(_output(output, part.plots.get(output.name, ()), heading) for output in part.outputs)
    return body or "<p class=dim>No output is requested.</p>"


def _output(output: OutputJudgement, drawn: Sequence[str], heading: str) -> str:
    head = f"<div>{_badge(PASS if output.passed else FAIL)}<{heading}>{escape(output.name)}</{heading}> "
    head += f"<span class=dim>{output.dtype} {output.shape if output.dtype else ''}</span></div>"
    parts = [head, f"<p>{escape(output.report.text)}</p>"]
    if output.errors is not None:
        parts.append(_patterns(output.errors))
        if drawn:
            parts.append(f"<div class=plots>{''.join(drawn)}</div>")
        parts += [_quantiles(output.errors), _worst(output.errors.worst)]
    return f"<section class=out>{''.join(parts)}</section>"


def _patterns(errors: Errors) -> str:
    items = "".join(f"<li><span class=wrong>{c.kind}</span>: {escape(c.text)}</li>" for c in errors.clusters)
    return f"<p>Beyond the bound:</p><ul>{items}</ul>" if items else ""


def _quantiles(errors: Errors) -> str:
    cells = "".join(f"<td class=n>{_number(value)}</td>" for value in errors.quantiles.values())
    heads = "".join(f"<th class=n>{share} below</th>" for share in errors.quantiles)
    return (
        f"<div class=scroll><table><caption>Errors in ulp</caption><tr>{heads}<th class=n>correctly rounded</th>"
        f"<th class=n>largest, of the bound</th></tr><tr>{cells}<td class=n>{percent(errors.rounded)}</td>"
        f"<td class=n>{_share(errors.largest_share)}</td></tr></table></div>"
    )


def _worst(elements: Sequence[Element]) -> str:
    if not elements:
        return ""
    heads = ("index", "result", "exact", "ulp off", "of the bound", "inputs", "terms", "T", "U")
    cells = "".join(f"<th{' class=n' if n in (1, 2, 3, 4, 7, 8) else ''}>{head}</th>" for n, head in enumerate(heads))
    rows = "".join(_element(element) for element in elements)
    table = f"<table class=worst><caption>Worst elements</caption><tr>{cells}</tr>{rows}</table>"
    return f"<div class=scroll>{table}</div>"


def _element(element: Element) -> str:
    wrong = "" if element.share <= 1 else " wrong"
    numbers = (f"{element.actual:.9g}", f"{element.exact:.9g}", _number(element.ulps))
    cells = "".join(f"<td class=n>{number}</td>" for number in numbers)
    return (
        f"<tr><td>{', '.join(map(str, element.index))}</td>{cells}<td class='n{wrong}'>{_share(element.share)}</td>"
        f"<td>{_chips(element.inputs)}</td><td>{_chips(element.terms)}</td>"
        f"<td class=n>{_number(element.total)}</td><td class=n>{_number(element.underflow)}</td></tr>"
    )


def _chips(values: Mapping[str, float]) -> str:
    return (
        "".join(f"<span class=chip><b>{escape(name)}</b> {value:.7g}</span>" for name, value in values.items()) or "–"
    )


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4g}"


def _share(value: float) -> str:
    """A fraction of the bound; where it is not finite, NaN, Inf or a number is out of place."""
    return f"{value:.4g}" if math.isfinite(value) else "special"
