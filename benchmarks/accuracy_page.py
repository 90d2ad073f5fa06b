"""docs/evidence/accuracy_tables.md and its plots, and the tables of accuracy.md; ``pages.py`` calls :func:`written`.

The errors come from ``accuracy.py``; the planted bugs are judged anew every time.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from page_parts import ROOT, replaced
from page_parts import table as markdown_table

from normgrad.operators import OPERATORS
from normgrad.testing.cases import kinds_of, make_cases
from normgrad.testing.svg import LIGHT, STYLE, Chart, Scale
from normgrad.testing.values import KINDS

sys.path.insert(0, str(ROOT / "tests"))
from support.planted_bugs import BUGS, CORRECT, OPERATORS_TRIED, Trial

STORE = ROOT / "benchmarks" / "results" / "accuracy.json"
EVIDENCE = ROOT / "docs" / "evidence"
DTYPES = ("float32", "float16", "bfloat16")
_MEASURED_KINDS = [kind for kind in KINDS if kind not in ("dtypes", "masks")]
_MARGIN = 0.01  # of the bound: less is no difference
_HIGHEST = 1e6
_DEVICES = {"cpu": "CPU", "cuda": "GPU"}
#: What backends of normgrad are called on the page.
_BACKENDS = {"cpu": "normgrad", "cuda": "normgrad", "reference": "normgrad, reference"}

#: What the colours of the dots mean.
_COLOURS = {"good": "normgrad, within the bound", "other": "others, within the bound", "bad": "beyond the bound"}

Store = Mapping[str, Mapping[str, Any]]

_INTRODUCTION = """# Accuracy: all tables

[Accuracy](accuracy.md) is the summary. Here is every implementation on the cases that `normgrad cases` writes (seed 0),
against the float64 oracle. A number is the largest error of all outputs as a fraction of the
[bound](../reference/error_bound.md) ½ ulp + 8·2⁻²⁴·T + 2⁻¹²⁶·U, with the ulp of the result's own dtype: 1 is the most
that the contract allows. A result that is rounded once from the exact value has up to 1 in a 16-bit dtype, where ½ ulp
is nearly the whole bound, and about 0.1 in float32.

- **Bold**: beyond the bound. inf: a result is NaN or Inf where it must be finite, or finite where it must not be.
- –: the implementation has no such operator.
- \\*: the implementation does not take 16-bit weights beside float32 statistics. It was run, and judged, on float32
  weights or on statistics in the data's dtype. Do not compare starred cells with normgrad's in the same row.

`python benchmarks/accuracy.py` measures, with `--device cuda` on a GPU; `python benchmarks/pages.py` writes this page.

In the plots a dot is a case. The cases of a column are sorted by their error. ▲ at the top edge is an error of more
than 10⁶ times the bound, or a result that is not finite where it must be.
"""

_BUGS = """## Planted bugs

A small float32 kernel for LayerNorm and GroupNorm (`tests/support/planted_bugs.py`) with one classic bug at a time, on
the {cases} cases of both operators: how many of them fail by the [standards](../guides/judging.md#standards) `strict`
and `cann`, and how many of the six of normally distributed data, on which a kernel is usually tried first.

"""


def written() -> dict[Path, str]:
    """Return what every file should hold: two pages, and a plot for every device."""
    store: Store = json.loads(STORE.read_text(encoding="utf-8"))
    parts, files = [_INTRODUCTION], {}
    devices = _by_device(store)
    for device, found in devices.items():
        parts.append(f"![The largest error of every case on a {_DEVICES[device]}](accuracy_{device}.svg)\n")
        files[EVIDENCE / f"accuracy_{device}.svg"] = _plot(found)
    parts += [_machines(store), _overview(store), *_better_peers(store)]
    for operator in OPERATORS:
        parts.append(f"## {operator}\n\n" + "\n".join(_errors(found, operator) for found in devices.values()))
    found_bugs = _bugs()
    parts.append(_bug_table(found_bugs))
    files[EVIDENCE / "accuracy_tables.md"] = "\n".join(parts)
    page = (EVIDENCE / "accuracy.md").read_text(encoding="utf-8")
    for marker, content in (("cases", _kept(store)), ("bugs", _caught(found_bugs))):
        page = replaced(page, marker, content)
    files[EVIDENCE / "accuracy.md"] = page
    return files


def _kept(store: Store) -> str:
    """Return the summary: how many cases of every implementation and dtype are beyond the bound."""
    rows, largest = [], 0.0
    for name, entry in _sorted(store):
        if name.startswith("reference"):
            continue
        cells = []
        for dtype in DTYPES:
            shares = [_share(case) for case in _of(entry, dtype).values()]
            cells.append(f"{sum(share > 1 for share in shares)} of {len(shares)}")
            if entry["ours"] and dtype == "float32":
                largest = max(largest, *shares)
        rows.append([_shown(name), entry["machine"], *cells])
    table = _table(["implementation", "machine", *DTYPES], rows)
    return f"{table}\nnormgrad's largest error in float32 is {largest:.2f} of the bound.\n"


def _by_device(store: Store) -> dict[str, Store]:
    """What was measured on each device."""
    return {
        device: {name: entry for name, entry in store.items() if _device(name) == device}
        for device in sorted({_device(name) for name in store})
    }


def _table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table whose first column alone is text."""
    return markdown_table(head, rows, numbers=len(head) - 1)


def _number(value: float) -> str:
    """A fraction; what is within the bound does not read as 1.00."""
    if math.isinf(value):
        return "**inf**"
    if value > 1:
        return f"**{value:.3g}**" if value > 1.005 else "**1.005**"
    return f"{math.floor(value * 1000) / 1000:.3f}"


def _of(entry: Mapping[str, Any], dtype: str) -> dict[str, Mapping[str, Any]]:
    """The cases of a dtype."""
    return {key: case for key, case in entry["cases"].items() if key.endswith(f"-{dtype}")}


def _share(case: Mapping[str, Any]) -> float:
    """The largest error of all outputs."""
    return max(case["shares"].values(), default=0.0)


def _shown(name: str) -> str:
    """Return an implementation's name for readers: ``cuda (cuda)`` is normgrad (GPU)."""
    implementation = name.rpartition(" ")[0]
    return f"{_BACKENDS.get(implementation, implementation)} ({_DEVICES[_device(name)]})"


def _machines(store: Store) -> str:
    rows = [
        [_shown(name), entry["machine"], ", ".join(f"{k} {v}" for k, v in sorted(entry["versions"].items()))]
        for name, entry in _sorted(store)
    ]
    return "## Machines\n\n" + _table(["implementation", "machine", "versions"], rows)


def _sorted(store: Store) -> list[tuple[str, Mapping[str, Any]]]:
    """Ours first."""
    return sorted(store.items(), key=lambda item: (not item[1]["ours"], item[0]))


def _overview(store: Store) -> str:
    rows = []
    for name, entry in _sorted(store):
        for dtype in DTYPES:
            found = _of(entry, dtype)
            if found:
                worst = max(found, key=lambda key: _share(found[key]))
                beyond = sum(_share(case) > 1 for case in found.values())
                shares = found[worst]["shares"]
                where = f"{max(shares, key=lambda name: shares[name])} of {worst.removesuffix(f'-{dtype}')}"
                rounded = f"{100 * min(case['rounded'] for case in found.values()):.4g} %"
                share = _number(_share(found[worst]))
                rows.append([f"{_shown(name)} {dtype}", f"{beyond} of {len(found)}", share, where, rounded])
    head = ["implementation", "cases beyond the bound", "largest error", "where", "least share correctly rounded"]
    return "## Overview\n\n" + _table(head, rows)


def _better_peers(store: Store) -> Iterator[str]:
    """Yield where a library is more accurate than a backend of normgrad, on the same device and the same inputs."""
    for ours, entry in _sorted(store):
        if not entry["ours"]:
            continue
        rows = []
        for theirs, peer in _sorted(store):
            if peer["ours"] or _device(theirs) != _device(ours):
                continue
            for key, case in peer["cases"].items():
                adapted = case.get("adapted")
                own = entry["cases"].get(key) if adapted is None else adapted.get(ours.rpartition(" ")[0])
                if own is None:
                    continue
                share = max(own["shares"][name] for name in case["shares"])
                if _share(case) < share - _MARGIN:
                    rows.append([key, _number(share), _shown(theirs), _number(_share(case))])
        yield f"## Where another library is more accurate than {_shown(ours)}\n"
        nowhere = (
            f"Nowhere, by more than {_MARGIN} of the bound. Where a library was run on other inputs (\\*), normgrad\n"
            "was run on the same ones for this comparison.\n"
        )
        yield _table(["case", "normgrad", "library", "its error"], rows) if rows else nowhere


def _device(name: str) -> str:
    return name.rpartition("(")[2].rstrip(")")


def _errors(store: Store, operator: str) -> str:
    """A row per kind of case, a column per dtype and implementation."""
    columns = [
        (name, entry, dtype)
        for dtype in DTYPES
        for name, entry in _sorted(store)
        if any(key.startswith(f"{operator} ") for key in entry["cases"])
    ]
    rows = [
        [kind, *(_cell(entry["cases"].get(f"{operator} {kind}-{dtype}")) for _, entry, dtype in columns)]
        for kind in kinds_of(operator)
        if kind in _MEASURED_KINDS
    ]
    return _table(["kind", *(f"{dtype} {_shown(name)}" for name, _, dtype in columns)], rows)


def _cell(case: Mapping[str, Any] | None) -> str:
    return "–" if case is None else _number(_share(case)) + ("\\*" if "adapted" in case else "")


def _plot(store: Store) -> str:
    """One column per implementation and dtype, one dot per case."""
    columns = [(name, entry, dtype) for name, entry in _sorted(store) for dtype in DTYPES]
    width = 90 + 70 * len(columns)
    chart = Chart(
        "Largest error of every case, as a fraction of the bound",
        Scale(0, len(columns)),
        Scale(1e-3, _HIGHEST, log=True),
        "",
        width,
        360,
    )
    chart.line((0, 1), (len(columns), 1), text="bound")
    labels = []
    for place, (name, entry, dtype) in enumerate(columns):
        shares = [_share(case) for case in _of(entry, dtype).values()]
        dots = [(place + 0.2 + 0.6 * n / max(len(shares) - 1, 1), share) for n, share in enumerate(sorted(shares))]
        chart.dots([dot for dot in dots if dot[1] <= 1], "good" if entry["ours"] else "other", 4)
        chart.dots([dot for dot in dots if 1 < dot[1] <= _HIGHEST], "bad", 4)
        for across, _ in (dot for dot in dots if dot[1] > _HIGHEST):
            x, y = chart.point(across, _HIGHEST)
            labels.append(f'<path class="bad" d="M{x - 3:.1f} {y + 6:.1f}h6l-3 -6z"/>')
        x, _ = chart.point(place + 0.5, 1)
        labels.append(f'<text class="tick" x="{x:.0f}" y="345" text-anchor="middle">{dtype}</text>')
        if dtype == DTYPES[1]:
            labels.append(f'<text class="name" x="{x:.0f}" y="358" text-anchor="middle">{_shown(name)}</text>')
    for number, (key, text) in enumerate(_COLOURS.items()):
        x = 60 + 190 * number
        labels.append(f'<circle class="{key}" cx="{x}" cy="378" r="4"/>')
        labels.append(f'<text class="tick" x="{x + 10}" y="382">{text}</text>')
    style = f"<style>svg{{{LIGHT};background:#fff}}{STYLE}</style>"
    drawn = chart.drawn(x_ticks=False).replace(f'viewBox="0 0 {width} 360" width="{width}" height="360"', _size(width))
    return drawn.replace("</svg>", f"{''.join(labels)}</svg>").replace(">", f">{style}", 1) + "\n"


def _size(width: int) -> str:
    """Return the size of a plot with the colour key under it."""
    return f'viewBox="0 0 {width} 390" width="{width}" height="390"'


def _bugs() -> dict[str, dict[str, list[str]]]:
    """Return the kinds of the cases that fail, for every planted bug and standard."""
    trials = _trials()
    found = {}
    for name, kernel in {"none": CORRECT, **BUGS}.items():
        failed: dict[str, list[str]] = {"strict": [], "cann": []}
        for trial in trials:
            results = trial.run(kernel)
            for standard, kinds in failed.items():
                if not trial.passes(results, standard):
                    kinds.append(trial.case.kind)
        found[name] = failed
    return found


def _trials() -> list[Trial]:
    return [Trial(case) for name in OPERATORS_TRIED for case in make_cases(name) if case.kind in _MEASURED_KINDS]


def _bug_table(found: Mapping[str, Mapping[str, list[str]]]) -> str:
    """Return what the standards make of planted bugs."""
    rows = []
    for name, failed in found.items():
        row = [name]
        for kinds in failed.values():
            row += [f"caught: {len(kinds)}" if kinds else "passes", f"{kinds.count('normal')} of 6"]
        rows.append(row)
    head = ["bug", "strict", "on normal data alone", "cann", "on normal data alone"]
    return _BUGS.format(cases=len(_trials())) + _table(head, rows)


def _caught(found: Mapping[str, Mapping[str, list[str]]]) -> str:
    """Return the summary: how many of the bugs each standard catches."""
    bugs = [failed for name, failed in found.items() if name != "none"]
    rows = []
    for standard, meaning in (("strict", "normgrad's bound"), ("cann", "CANN's tolerance")):
        caught = sum(bool(failed[standard]) for failed in bugs)
        on_normal = sum("normal" in failed[standard] for failed in bugs)
        rows.append([f"`{standard}`, {meaning}", f"{caught} of {len(bugs)}", f"{on_normal} of {len(bugs)}"])
    return (
        f"{len(bugs)} classic bugs were planted one at a time in a correct float32 kernel, which was judged on the\n"
        f"{len(_trials())} cases of LayerNorm and GroupNorm. A bug is caught if one case fails. "
        "[The table](accuracy_tables.md#planted-bugs)\nhas each bug.\n\n"
        + _table(["standard", "bugs caught", "caught on normal data alone"], rows)
    )
