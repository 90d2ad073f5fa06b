"""Three plots of a result: its errors over the index, their histogram in ulp, and its values over the exact ones."""

from __future__ import annotations

import math

import numpy as np

from normgrad.testing.measured import Measured
from normgrad.testing.svg import Chart, Scale

_STEMS = 300
_DOTS = 1200
_BINS = 40
_WIDEST_WITH_LINES = 20  # ulp, beyond which two lines at ±½ ulp are one
_LEAST_SHARE = 1e-3


def plots(measured: Measured) -> list[str]:
    """The three as SVG elements; none of an empty result."""
    if not measured.exact.size:
        return []
    return [_error_over_index(measured), _histogram(measured), _actual_over_expected(measured)]


def _error_over_index(measured: Measured) -> str:
    """The largest error of every segment of elements as a fraction of the bound."""
    share = np.ravel(measured.share_of_bound)
    starts = np.unique(np.linspace(0, share.size, _STEMS, endpoint=False).astype(np.int64))
    largest = np.maximum.reduceat(share, starts)
    finite = share[np.isfinite(share)]
    top = max(10.0, 2 * float(np.max(finite, initial=0.0)))
    chart = Chart(
        "Error over index, as a fraction of the bound",
        Scale(0, max(share.size, 2)),
        Scale(_LEAST_SHARE, top, log=True),
        "index in the flattened result",
    )
    pairs = [(float(start), min(float(value), top)) for start, value in zip(starts, largest, strict=True)]
    chart.stems([pair for pair in pairs if pair[1] <= 1], "good")
    chart.stems([pair for pair in pairs if pair[1] > 1], "bad")
    chart.line((0, 1), (share.size, 1), text="bound")
    return chart.drawn()


def _histogram(measured: Measured) -> str:
    """Signed errors in ulp; the outermost bars hold all that is further out."""
    ulps = np.ravel(measured.ulps)
    ulps = ulps[np.isfinite(ulps)]
    reach = float(np.quantile(np.abs(ulps), 0.999)) if ulps.size else 1.0
    reach = max(0.6, 1.1 * reach)
    edges = np.linspace(-reach, reach, _BINS + 1)
    counts, _ = np.histogram(np.clip(ulps, -reach, reach), edges)
    highest = max(2.0, float(np.max(counts, initial=0)))
    top = 5 * highest  # room for a label above the bars
    label = f"signed error in ulp of {measured.dtype}"
    chart = Chart("Histogram of errors in ulp", Scale(-reach, reach), Scale(0.5, top, log=True), label)
    chart.bars([float(edge) for edge in edges], [float(count) for count in counts], "good")
    if reach <= _WIDEST_WITH_LINES:
        for edge, text in ((-0.5, ""), (0.5, "½ ulp")):
            chart.line((edge, 0.5), (edge, 1.5 * highest), "limit", text)
    return chart.drawn()


def _actual_over_expected(measured: Measured) -> str:
    """A sample of the elements, and those beyond the bound."""
    actual, exact = np.ravel(measured.actual), np.ravel(measured.exact)
    shown = np.flatnonzero(np.ravel(measured.regular))
    wrong = shown[~(np.ravel(measured.share_of_bound)[shown] <= 1)]
    picked, wrong = (some[:: max(1, math.ceil(some.size / _DOTS))] for some in (shown, wrong))
    values = np.concatenate([actual[picked], exact[picked], actual[wrong], [0.0]])
    low, high = float(np.min(values)), float(np.max(values))
    if high - low < 1e-300:
        low, high = -1.0, 1.0
    margin = 0.05 * (high - low)
    scale = Scale(low - margin, high + margin)
    chart = Chart("Result over exact value", scale, scale, "exact value")
    chart.line((scale.low, scale.low), (scale.high, scale.high), "grid")
    chart.dots([(float(exact[i]), float(actual[i])) for i in picked], "good")
    chart.dots([(float(exact[i]), float(actual[i])) for i in wrong], "bad", 3.2)
    return chart.drawn()
