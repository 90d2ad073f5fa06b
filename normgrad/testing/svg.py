"""Charts as SVG: axes, points, bars and lines, coloured by the classes of the page around them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

#: The classes that charts use, for pages and files that show them.
STYLE = """
.axis{stroke:var(--line);stroke-width:1;fill:none}.grid{stroke:var(--grid);stroke-width:1;fill:none}
.tick,.label{font:11px system-ui,sans-serif;fill:var(--dim)}.name{font:600 12px system-ui,sans-serif;fill:var(--text)}
.label{paint-order:stroke;stroke:var(--card);stroke-width:3px}
.good{stroke:var(--good);fill:var(--good)}.bad{stroke:var(--bad);fill:var(--bad)}
.other{stroke:var(--other);fill:var(--other)}.limit{stroke:var(--bad);stroke-width:1;stroke-dasharray:4 3;fill:none}
"""
LIGHT = (
    "--card:#fff;--text:#1c2430;--dim:#667085;--line:#98a2b3;--grid:#eaecf0;"
    "--good:#2f7fd1;--bad:#d1343f;--other:#c77700"
)

_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 26, 34


@dataclass(frozen=True)
class Scale:
    """Values along an axis, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Where a value lies between the ends, 0 to 1; one beyond an end lies at it."""
        low, high, value = (self._flat(v) for v in (self.low, self.high, value))
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def _flat(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.log else value

    def ticks(self) -> list[float]:
        """A few round values."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            step = max(1, (last - first) // 4)
            return [10.0**k for k in range(first, last + 1, step)]
        span = self.high - self.low
        step = 10 ** math.floor(math.log10(span / 4))
        step *= next(factor for factor in (1, 2, 2.5, 5, 10) if span / (step * factor) <= 5)
        return [k * step for k in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]


@dataclass
class Chart:
    """A chart that is drawn on, then turned into SVG."""

    title: str
    x: Scale
    y: Scale
    x_label: str = ""
    width: int = 380
    height: int = 240
    _parts: list[str] = field(default_factory=list)

    def point(self, x: float, y: float) -> tuple[float, float]:
        """The coordinates of a pair of values."""
        across, up = self.width - _LEFT - _RIGHT, self.height - _TOP - _BOTTOM
        return _LEFT + self.x.at(x) * across, self.height - _BOTTOM - self.y.at(y) * up

    def dots(self, pairs: Iterable[tuple[float, float]], style: str, size: float = 2.4) -> None:
        """A dot for every pair."""
        path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in (self.point(*pair) for pair in pairs))
        if path:
            self._parts.append(f'<path class="{style}" d="{path}" stroke-width="{size}" stroke-linecap="round"/>')

    def stems(self, pairs: Iterable[tuple[float, float]], style: str) -> None:
        """A vertical line from the ground to every pair."""
        ground = self.height - _BOTTOM
        path = "".join(f"M{x:.1f} {ground}V{y:.1f}" for x, y in (self.point(*pair) for pair in pairs))
        if path:
            self._parts.append(f'<path class="{style}" d="{path}" stroke-width="1.0" fill="none"/>')

    def bars(self, edges: Sequence[float], heights: Sequence[float], style: str) -> None:
        """A bar between every two edges."""
        ground = self.height - _BOTTOM
        for left, right, height in zip(edges[:-1], edges[1:], heights, strict=True):
            (x0, y), (x1, _) = self.point(left, height), self.point(right, height)
            if ground - y > 0:
                size = f'width="{max(x1 - x0 - 0.6, 0.6):.1f}" height="{ground - y:.1f}"'
                self._parts.append(f'<rect class="{style}" stroke="none" x="{x0:.1f}" y="{y:.1f}" {size}/>')

    def line(self, start: tuple[float, float], end: tuple[float, float], style: str = "limit", text: str = "") -> None:
        """A line between two pairs of values, with a text at its end."""
        (x0, y0), (x1, y1) = self.point(*start), self.point(*end)
        self._parts.append(f'<path class="{style}" d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}"/>')
        if text:
            anchor = f'x="{x1 - 4:.1f}" y="{y1 - 4:.1f}" text-anchor="end"'
            self._parts.append(f'<text class="label" {anchor}>{escape(text)}</text>')

    def drawn(self, *, x_ticks: bool = True) -> str:
        """The chart as an SVG element."""
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(self.title)}">'
        name = f'<text class="name" x="{_LEFT}" y="15">{escape(self.title)}</text>'
        return head + name + self._axes(x_ticks) + "".join(self._parts) + "</svg>"

    def _axes(self, x_ticks: bool) -> str:
        right, ground = self.width - _RIGHT, self.height - _BOTTOM
        parts = []
        for value in self.y.ticks():
            _, y = self.point(self.x.low, value)
            parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
            parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>')
        for value in self.x.ticks() if x_ticks else ():
            x, _ = self.point(value, self.y.low)
            parts.append(f'<path class="axis" d="M{x:.1f} {ground}v4"/>')
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{ground + 15}" text-anchor="middle">{_short(value)}</text>'
            )
        middle = (_LEFT + right) / 2
        label = f'x="{middle}" y="{self.height - 4}" text-anchor="middle"'
        parts.append(f'<text class="label" {label}>{escape(self.x_label)}</text>')
        return "".join(parts) + f'<path class="axis" d="M{_LEFT} {_TOP}V{ground}H{right}"/>'


def _short(value: float) -> str:
    """A number on an axis."""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    if -3 <= exponent <= 4:
        return f"{value:.6g}"
    mantissa = f"{value / 10.0**exponent:.3g}"
    power = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{power}" if mantissa == "1" else f"{mantissa}·10{power}"
