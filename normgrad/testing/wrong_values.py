"""What the wrong elements of a result are: NaN, zero, off by a constant, multiplied by one, or another element's value.

A claim is made if it is true of every wrong element within its error bound, and if chance does not explain it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from normgrad.testing.clusters import Cluster, Division, divisions
from normgrad.testing.layout import Layout
from normgrad.testing.measured import Array, Measured, ulp

_CHANCE = math.log(1e-3)  # a constant that chance makes more often than this is none
_MOST_PERMUTED = 16  # classes that are compared with each other
_LONGEST_DECIMAL = 17


def wrong_values(measured: Measured, layout: Layout) -> list[Cluster]:
    """What the elements beyond the bound are."""
    wrong = np.flatnonzero(~(np.ravel(measured.share_of_bound) <= 1))
    misplaced = measured.misplaced
    found = [Cluster("special", misplaced)] if misplaced else []
    if wrong.size < 2 or misplaced:
        return found
    actual, exact = np.ravel(measured.actual)[wrong], np.ravel(measured.exact)[wrong]
    # What is left of an error once a constant is taken out: the bound, and the rounding of the wrong value.
    allowed = np.ravel(measured.limit)[wrong] + ulp(actual, measured.dtype)
    if not np.all(np.isfinite(allowed)):
        return found
    constant = _constant(actual, exact, allowed)
    return [constant] if constant else list(_exchanged(measured, wrong, layout))


def _constant(actual: Array, exact: Array, allowed: Array) -> Cluster | None:
    """One rule by which all wrong values come from the exact ones."""
    if not np.any(actual):
        return Cluster("zero", "all of them are 0")
    factor = _factor(actual, exact, allowed)
    if factor == "-1":
        return Cluster("sign", "all of them have the wrong sign")
    if factor:
        return Cluster("factor", f"all of them are {factor} times the exact value")
    offset = _common(actual - exact - allowed, actual - exact + allowed)
    if offset and _is_beyond_chance(np.abs(float(offset)) / allowed):
        return Cluster("offset", f"all of them are {offset.lstrip('-')} too {'small' if offset[0] == '-' else 'large'}")
    return None


def _factor(actual: Array, exact: Array, allowed: Array) -> str:
    """The number that all exact values are multiplied by; empty where there is none."""
    has_size = exact != 0
    if not np.all(np.abs(actual[~has_size]) <= allowed[~has_size]) or np.count_nonzero(has_size) < 2:
        return ""
    ratio, width = actual[has_size] / exact[has_size], allowed[has_size] / np.abs(exact[has_size])
    factor = _common(ratio - width, ratio + width)
    return factor if factor and _is_beyond_chance(abs(float(factor) - 1) / width) else ""


def _common(low: Array, high: Array) -> str:
    """The shortest decimal number that is in every interval; empty where there is none."""
    least, most = float(np.max(low)), float(np.min(high))
    if not least <= most:
        return ""
    for digits in range(1, _LONGEST_DECIMAL + 1):
        text = f"{(least + most) / 2:.{digits}g}"
        if least <= float(text) <= most:
            return text
    return ""


def _is_beyond_chance(precision: Array) -> bool:
    """Whether intervals this narrow, for the size of the deviation, do not meet by chance."""
    return bool(-np.sum(np.log(np.maximum(np.sort(precision)[:-1], 1))) < _CHANCE)


def _exchanged(measured: Measured, wrong: np.ndarray, layout: Layout) -> Iterator[Cluster]:
    """Rows, samples, channels or elements that have each other's results, or their neighbour's."""
    every = [division for division in divisions(layout, measured.exact.size) if division.noun != "position"]
    named = [(division, np.unique(division.of(wrong))) for division in every]
    for division, hit in sorted(named, key=lambda pair: pair[1].size):
        if hit.size < 2:
            continue
        slices = _Slices(measured, division)
        if hit.size <= _MOST_PERMUTED:
            sources = [next((k for k in hit if k != j and slices.has(j, k)), -1) for j in hit]
            if -1 not in sources and len(set(sources)) == hit.size:
                yield Cluster("swap", _swap_text(division.noun, list(hit), sources))
                return
        for step, word in ((-1, "before"), (1, "after")):
            inner = hit[(hit + step >= 0) & (hit + step < division.classes)]
            if inner.size >= 2 and inner.size >= hit.size - 1 and all(slices.has(j, j + step) for j in inner):
                those = "all of these" if inner.size == hit.size else f"{inner.size} of these {hit.size}"
                yield Cluster("shift", f"{those} {division.noun}s have the results of the {division.noun} {word} them")
                return


class _Slices:
    """The elements of every class of a division, in order."""

    def __init__(self, measured: Measured, division: Division) -> None:
        labels = division.of(np.arange(measured.exact.size))
        self._order = np.argsort(labels, kind="stable")
        self._starts = np.searchsorted(labels[self._order], np.arange(division.classes + 1))
        self._actual, self._exact = np.ravel(measured.actual), np.ravel(measured.exact)
        self._limit = np.ravel(measured.limit)

    def has(self, one: int, other: int) -> bool:
        """Whether the results of one class are correct for another."""
        mine, theirs = (self._order[self._starts[k] : self._starts[k + 1]] for k in (one, other))
        if mine.size != theirs.size:
            return False
        with np.errstate(all="ignore"):
            return bool(np.all(np.abs(self._actual[mine] - self._exact[theirs]) <= self._limit[theirs]))


def _swap_text(noun: str, classes: Sequence[int], sources: Sequence[int]) -> str:
    if len(classes) == 2:
        return f"{noun}s {classes[0]} and {classes[1]} are swapped"
    pairs = ", ".join(f"{one} has {other}" for one, other in zip(classes, sources, strict=True))
    return f"{noun}s have each other's results: {pairs}"
