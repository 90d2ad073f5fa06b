"""The report as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from normgrad.testing.judgement import Element, Errors, Judgement, OutputJudgement
from normgrad.testing.page_style import CSS
from normgrad.testing.plots import plots

_BOUND = (
    "The bound of an element is ½ ulp + 8·2⁻²⁴·T + 2⁻¹²⁶·U. T, the sum of the absolute values of its terms, allows for "
    "cancellation. U allows for products and quotients below 2⁻¹²⁶, which may lose all their digits."
)


@dataclass(frozen=True)
class Section:
    """The part of the page on one case, and its line in the summary."""

    name: str
    passed: bool
    line: str
    body: str


def section(name: str, judgement: Judgement, *, with_plots: bool) -> Section:
    """The part of the page on one case."""
    failed = [output.name for output in judgement.outputs if not output.passed]
    shares = [output.errors.largest_share for output in judgement.outputs if output.errors]
    line = f"{_number(max(shares, default=0.0))} of the bound at most"
    if failed:
        line += f"; wrong: {', '.join(failed)}"
    body = "".join(_output(output, with_plots) for output in judgement.outputs)
    return Section(name, judgement.passed, line, body or '<p class="dim">No output is wanted.</p>')


def refused(name: str, text: str) -> Section:
    """The part on a case that cannot be judged."""
    return Section(name, False, text, f"<p>{escape(text)}</p>")


def page(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The whole page; of several cases a table first, and those that passed folded."""
    failed = sum(not part.passed for part in sections)
    verdict = (
        f"{failed} of {len(sections)} cases failed" if failed else f"{len(sections)} of {len(sections)} cases passed"
    )
    if len(sections) == 1:
        verdict = "failed" if failed else "passed"
    head = f"<h1>{escape(title)}</h1><p class=dim>{escape(subtitle)}</p><p>{_badge(not failed)}{verdict}</p>"
    if len(sections) == 1:
        body = f"<div class=card>{sections[0].body}</div>"
    else:
        ordered = sorted(sections, key=lambda part: part.passed)
        body = _summary(ordered) + "".join(_folded(part) for part in ordered)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body><main>{head}{body}</main></body></html>\n"
    )


def _badge(passed: bool) -> str:
    return '<span class="badge pass">pass</span>' if passed else '<span class="badge fail">fail</span>'


def _summary(sections: Sequence[Section]) -> str:
    rows = "".join(
        f"<tr><td>{_badge(part.passed)}</td><td>{escape(part.name)}</td><td>{escape(part.line)}</td></tr>"
        for part in sections
    )
    return f"<div class='card scroll'><table><tr><th></th><th>case</th><th>worst error</th></tr>{rows}</table></div>"


def _folded(part: Section) -> str:
    is_open = "" if part.passed else " open"
    head = f"<summary>{_badge(part.passed)}<h2>{escape(part.name)}</h2></summary>"
    return f"<details class=card{is_open}>{head}<div>{part.body}</div></details>"


def _output(output: OutputJudgement, with_plots: bool) -> str:
    head = f"<div>{_badge(output.passed)}<h2>{escape(output.name)}</h2> "
    head += f"<span class=dim>{output.dtype} {output.shape if output.dtype else ''}</span></div>"
    parts = [head, f"<p>{escape(output.report.text)}</p>"]
    if output.errors is not None and output.measured is not None:
        parts.append(_patterns(output.errors))
        if with_plots:
            parts.append(f"<div class=plots>{''.join(plots(output.measured))}</div>")
        parts += [_quantiles(output.errors), _worst(output.errors.worst)]
    return f"<div class=out>{''.join(parts)}</div>"


def _patterns(errors: Errors) -> str:
    items = "".join(f"<li><span class=wrong>{c.kind}</span>: {escape(c.text)}</li>" for c in errors.clusters)
    return f"<p>Beyond the bound:</p><ul>{items}</ul>" if items else ""


def _quantiles(errors: Errors) -> str:
    cells = "".join(f"<td class=n>{_number(value)}</td>" for value in errors.quantiles.values())
    heads = "".join(f"<th class=n>{share} below</th>" for share in errors.quantiles)
    return (
        f"<div class=scroll><table><caption>Errors in ulp</caption><tr>{heads}<th class=n>rounded right</th>"
        f"<th class=n>largest, of the bound</th></tr><tr>{cells}<td class=n>{100 * errors.rounded:.4g} %</td>"
        f"<td class=n>{_number(errors.largest_share)}</td></tr></table></div>"
    )


def _worst(elements: Sequence[Element]) -> str:
    if not elements:
        return ""
    heads = ("index", "came out", "exact", "ulp off", "of the bound", "inputs", "terms", "T", "U")
    cells = "".join(f"<th{' class=n' if n in (1, 2, 3, 4, 7, 8) else ''}>{head}</th>" for n, head in enumerate(heads))
    rows = "".join(_element(element) for element in elements)
    table = f"<table><caption>Worst elements</caption><tr>{cells}</tr>{rows}</table>"
    return f"<div class=scroll>{table}</div><p class=dim>{_BOUND}</p>"


def _element(element: Element) -> str:
    wrong = "" if element.share <= 1 else " wrong"
    numbers = (f"{element.actual:.9g}", f"{element.exact:.9g}", _number(element.ulps))
    cells = "".join(f"<td class=n>{number}</td>" for number in numbers)
    return (
        f"<tr><td>{', '.join(map(str, element.index))}</td>{cells}<td class='n{wrong}'>{_number(element.share)}</td>"
        f"<td>{_chips(element.inputs)}</td><td>{_chips(element.terms)}</td>"
        f"<td class=n>{_number(element.total)}</td><td class=n>{_number(element.underflow)}</td></tr>"
    )


def _chips(values: Mapping[str, float]) -> str:
    return (
        "".join(f"<span class=chip><b>{escape(name)}</b> {value:.7g}</span>" for name, value in values.items()) or "–"
    )


def _number(value: float) -> str:
    return f"{value:.4g}"
