"""Draw a horizontal bar chart as SVG: how many times faster than PyTorch. The page scripts call it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 760  # as wide as the text of a page, so that the type is not scaled down
BAR, GAP = 18, 12  # heights of a bar, and of the space between two rows
LETTER = 8  # the width of a letter, generously
#: Blue, orange, dark red and grey: by their lightness they are told apart in any kind of colour vision.
COLOURS = ("#2f6fb0", "#d98c2b", "#7a2e4f", "#8a94a3")
STYLE = (
    "text{font:14px system-ui,-apple-system,'Segoe UI',sans-serif;fill:#1c2430}"
    ".title{font-weight:600;font-size:16px}.small{font-size:13px;fill:#4b5565}.grid{stroke:#e3e7ec}"
    ".one{stroke:#4b5565;stroke-dasharray:4 3}"
)


@dataclass(frozen=True)
class Row:
    """A label, and for every series a factor and the text behind its bar; None leaves the bar out."""

    label: str
    bars: Sequence[tuple[float, str] | None]


def bar_chart(title: str, subtitle: str, series: Sequence[str], rows: Sequence[Row]) -> str:
    """Return an SVG document; the series are named in a legend where there are several."""
    left = 24 + LETTER * max(len(row.label) for row in rows)
    top = 106 if len(series) > 1 else 84
    height_of_row = BAR * len(series) + GAP
    bottom = top + height_of_row * len(rows)
    highest = max(bar[0] for row in rows for bar in row.bars if bar is not None)
    right = 12 + LETTER * max(len(bar[1]) for row in rows for bar in row.bars if bar is not None)
    scale = (WIDTH - left - right) / max(highest, 1.0)
    parts = [
        f'<text class="title" x="16" y="26">{escape(title)}</text>',
        f'<text class="small" x="16" y="48">{escape(subtitle)}</text>',
    ]
    if len(series) > 1:
        x = 16
        for name, colour in zip(series, COLOURS, strict=False):
            parts.append(f'<rect x="{x}" y="61" width="14" height="14" fill="{colour}"/>')
            parts.append(f'<text class="small" x="{x + 20}" y="73">{escape(name)}</text>')
            x += 48 + LETTER * len(name)
    for tick in _ticks(highest):
        x = left + tick * scale
        style = "one" if tick == 1 else "grid"
        parts.append(f'<path class="{style}" d="M{x:.1f} {top - 6}V{bottom}"/>')
        parts.append(f'<text class="small" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>')
        if tick == 1:
            parts.append(f'<text class="small" x="{x:.1f}" y="{top - 10}" text-anchor="middle">PyTorch</text>')
    for number, row in enumerate(rows):
        y = top + number * height_of_row
        middle = y + BAR * len(series) / 2 + 5
        parts.append(f'<text x="{left - 10}" y="{middle:.1f}" text-anchor="end">{escape(row.label)}</text>')
        for index, bar in enumerate(row.bars):
            if bar is not None:
                factor, text = bar
                place = f'x="{left}" y="{y + index * BAR + 1}" width="{factor * scale:.1f}" height="{BAR - 2}"'
                parts.append(f'<rect {place} fill="{COLOURS[index]}"/>')
                at = f'x="{left + factor * scale + 6:.1f}" y="{y + index * BAR + BAR - 5}"'
                parts.append(f'<text class="small" {at}>{escape(text)}</text>')
    size = f'viewBox="0 0 {WIDTH} {bottom + 30}" width="{WIDTH}" height="{bottom + 30}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(title)}</title>'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", ground, *parts, "</svg>"]) + "\n"


def _ticks(highest: float) -> list[float]:
    """Return 0, 1 and round numbers up to the longest bar, ten at most."""
    step = next(step for step in (1, 2, 5, 10, 20, 50) if highest / step <= 9)
    return [0, 1, *range(max(step, 2), math.floor(highest) + 1, step)]
