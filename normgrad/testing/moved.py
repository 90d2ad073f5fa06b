"""Wrong elements that are correct at another index: rows in another order, a transposed result, one row for all.

A claim is made if every wrong element is within the error bound of the exact value that it is taken for, and most are
much nearer to it than to their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from normgrad.contract.status import counted
from normgrad.testing.clusters import Cluster, Division
from normgrad.testing.layout import Layout
from normgrad.testing.measured import Measured

_FEWEST = 4  # elements that are correct for another class: fewer may be so by chance
_FEWEST_SHIFTED = 16  # elements that are correct for a class that is not their neighbour
_NEARER = 0.25  # so much of an error may be left where an element is taken for another
_MOST = 0.75  # of the wrong elements: some exact values are alike
_TRIED = 8  # elements or classes that a guess is tried on before all
_MOST_SHORT = 16  # classes of fewer elements than _FEWEST whose order is looked for
_MOST_SOURCES = 1000  # for one class: where more are alike, nothing can be told from them
_MOST_CANDIDATES = 1 << 24  # for all classes together
_MOST_LISTED = 16
_FARTHEST = 64  # elements that a result is shifted by


def moved(measured: Measured, wrong: np.ndarray, every: Sequence[Division], layout: Layout) -> list[Cluster]:
    """What the elements at the flat indices ``wrong`` are taken for; nothing where no claim is true of all of them."""
    values = _Values(measured)
    if wrong.size >= _FEWEST:
        found = _transposed(values, wrong, measured.exact.shape, layout) or _displaced(values, wrong, layout)
        if found is not None:
            return [found]
    named = [(division, np.flatnonzero(np.bincount(division.of(wrong)))) for division in every]
    for division, hit in sorted(named, key=lambda pair: pair[1].size):
        classes = _Classes(values, division)
        found = _reordered(classes, hit) if hit.size > 1 else None
        if found is None and wrong.size >= _FEWEST:
            found = _copied(classes, hit)
        if found is not None:
            return [found]
    return []


class _Values:
    """The flattened result, exact values and bound."""

    def __init__(self, measured: Measured) -> None:
        self.actual, self.exact = np.ravel(measured.actual), np.ravel(measured.exact)
        self.limit = np.ravel(measured.limit)

    def are(self, index: np.ndarray, source: np.ndarray) -> bool:
        """Whether the elements at ``index`` are those that would be correct at ``source``."""
        with np.errstate(all="ignore"):
            own = np.abs(self.actual[index] - self.exact[index])
            error = np.abs(self.actual[index] - self.exact[source])
            is_wrong, is_nearer = ~(own <= self.limit[index]), error <= _NEARER * own
            is_near = np.count_nonzero(is_wrong & is_nearer) >= _MOST * np.count_nonzero(is_wrong)
            return bool(is_near and np.all(error <= self.limit[source]))


def _transposed(values: _Values, wrong: np.ndarray, shape: Sequence[int], layout: Layout) -> Cluster | None:
    """The result is that of a transposed matrix, or of a batch of them."""
    shapes = [tuple(shape)]
    if layout.channels:
        shapes.append((values.exact.size // (layout.channels * layout.positions), layout.channels, layout.positions))
    for matrices, height, width in dict.fromkeys(matrix for shape in shapes for matrix in _matrices(shape)):
        matrix, offset = np.divmod(wrong, height * width)
        column, row = np.divmod(offset, height)
        source = matrix * height * width + row * width + column
        if values.are(wrong[:_TRIED], source[:_TRIED]) and values.are(wrong, source):
            names = {(layout.channels, layout.positions): " (C×HxW)", (layout.positions, layout.channels): " (HxW×C)"}
            matrix_text = f"{f'{matrices} matrices' if matrices > 1 else 'matrix'} of {height}×{width}"
            named = names.get((height, width), "") if layout.positions > 1 else ""
            return Cluster(
                "transposed", f"all of them are those of the exact result with its {matrix_text}{named} transposed"
            )
    return None


def _displaced(values: _Values, wrong: np.ndarray, layout: Layout) -> Cluster | None:
    """The result was written, or an input read, a few elements too far on, or too early."""
    size = values.exact.size
    nearest = layout.positions if layout.positions > 1 else layout.channels  # beyond, it is another channel's or row's
    few = wrong[:: -(-wrong.size // _TRIED)]
    for k in (sign * distance for distance in range(1, min(_FARTHEST + 1, nearest)) for sign in (1, -1)):
        inside = few[(few >= k) & (few < size + k)]
        if not inside.size or not values.are(inside, inside - k):
            continue
        every = np.arange(max(k, 0), size + min(k, 0))
        if values.are(every, every - k):
            source = f"element i {'−' if k > 0 else '+'} {abs(k)}"
            by = counted(abs(k), "element")
            text = f"the flattened result is shifted by {by}: element i has the value of {source}"
            return Cluster("shift", text)
    return None


def _matrices(shape: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The ways to take an array as matrices: their number, height and width."""
    for first, second in combinations(range(len(shape)), 2):
        matrices, height = math.prod(shape[:first]), math.prod(shape[first:second])
        width = math.prod(shape[second:])
        if height > 1 and width > 1:
            yield matrices, height, width
            yield matrices, width, height


class _Classes:
    """The elements of every class of a division, in order."""

    def __init__(self, values: _Values, division: Division) -> None:
        self.noun, self.count = division.noun, division.classes
        self._values = values
        labels = division.of(np.arange(values.exact.size))
        self._index = np.argsort(labels, kind="stable").reshape(self.count, -1)
        self.length = self._index.shape[1]

    def have(self, hit: np.ndarray, sources: np.ndarray) -> bool:
        """Whether classes have the results of others, class by class."""
        few, every = slice(_TRIED), slice(None)
        return all(self._values.are(self._index[hit[some]], self._index[sources[some]]) for some in (few, every))

    def sources(self, one: int, candidates: np.ndarray) -> Iterator[int]:
        """The candidates whose results a class has."""
        alike = self._alike(one, candidates)[:_MOST_SOURCES]
        return (int(k) for k in alike if self.have(np.array([one]), np.array([k])))

    def source_of_each(self, hit: np.ndarray) -> np.ndarray | None:
        """For each of some classes another whose results it has; None where one has none."""
        exact, limit = self._values.exact[self._index], self._values.limit[self._index]
        with np.errstate(all="ignore"):  # the element that differs most between the classes tells them apart
            spread = np.std(exact, axis=0) / np.max(limit, axis=0)
        element = int(np.argmax(np.where(np.isfinite(spread), spread, 0)))
        order = np.argsort(exact[:, element], kind="stable")
        in_order, reach = exact[order, element], np.max(limit[:, element])
        actual = self._values.actual[self._index[hit, element]]
        first = np.searchsorted(in_order, actual - reach, "left")
        last = np.searchsorted(in_order, actual + reach, "right")
        if np.sum(last - first) > _MOST_CANDIDATES:
            return None
        sources = np.empty_like(hit)
        for n, (one, start, stop) in enumerate(zip(hit, first, last, strict=True)):
            alike = self._alike(one, np.sort(order[start:stop]))
            source = alike[0] if alike.size == 1 else next(self.sources(one, alike), None)
            if source is None:
                return None
            sources[n] = source
        return sources if self.have(hit, sources) else None

    def _alike(self, one: int, candidates: np.ndarray) -> np.ndarray:
        """The candidates, without the class itself, that the first elements of a class do not rule out."""
        candidates = candidates[candidates != one]
        for index in self._index[:, :_TRIED].T:
            if not candidates.size:
                break
            theirs = index[candidates]
            with np.errstate(all="ignore"):
                error = np.abs(self._values.actual[index[one]] - self._values.exact[theirs])
            candidates = candidates[error <= self._values.limit[theirs]]
        return candidates


def _reordered(classes: _Classes, hit: np.ndarray) -> Cluster | None:
    """Classes that have each other's results, their neighbour's, or those of other classes in any order."""
    for kind, sources, text in _orders(classes, hit):
        if classes.have(hit, sources):
            return Cluster(kind, text)
    return _shifted(classes, hit) or _permuted(classes, hit)


def _orders(classes: _Classes, hit: np.ndarray) -> Iterator[tuple[str, np.ndarray, str]]:
    """Orders to try: the kind of the claim, the source of each class, and the claim."""
    noun, those = classes.noun, _those(classes, hit)
    if hit.size == 2:
        yield "swap", hit[::-1], f"{noun}s {hit[0]} and {hit[1]} are swapped"
        return
    yield "swap", hit[::-1], f"{those} are in reverse order"
    if hit.size % 2 == 0:
        halves = np.roll(hit, hit.size // 2)
        yield "swap", halves, f"the two halves of {those} are swapped"
        pairs = hit.reshape(-1, 2)
        if np.all(np.diff(pairs) == 1):
            first = ", ".join(f"{one} and {two}" for one, two in pairs[:2])
            more = ", …" if len(pairs) > 2 else ""
            yield "swap", pairs[:, ::-1].ravel(), f"{those} are swapped in pairs: {first}{more}"


def _shifted(classes: _Classes, hit: np.ndarray) -> Cluster | None:
    """Classes that have the results of the class k before or after them, round the end where all of them do."""
    noun, middle = classes.noun, int(hit[hit.size // 2])
    for source in classes.sources(middle, np.arange(classes.count)):
        k, before = abs(source - middle), source < middle
        sources = hit + source - middle
        text = f"have the results of the {noun} {f'{k} ' if k > 1 else ''}{'before' if before else 'after'} them"
        if hit.size == classes.count and classes.have(hit, sources % classes.count):
            one, other = ("first", "last") if before else ("last", "first")
            ends = f"the {one} has that of the {other}" if k == 1 else f"the {one} {k} those of the {other} {k}"
            return Cluster("shift", f"all {hit.size} {noun}s {text}, {ends}")
        is_inside = (sources >= 0) & (sources < classes.count)
        inside = int(np.count_nonzero(is_inside))
        is_clear = inside == hit.size or 2 * k <= hit.size
        is_enough = k == 1 or (is_clear and inside * classes.length >= _FEWEST_SHIFTED)
        if is_enough and inside >= max(2, hit.size - k) and classes.have(hit[is_inside], sources[is_inside]):
            those = "all of these" if inside == hit.size else f"{inside} of these {hit.size}"
            return Cluster("shift", f"{those} {noun}s {text}")
    return None


def _permuted(classes: _Classes, hit: np.ndarray) -> Cluster | None:
    """Classes that have the results of others, each of its own."""
    if classes.length < _FEWEST and hit.size > _MOST_SHORT:
        return None
    has_source = next(classes.sources(int(hit[0]), np.arange(classes.count)), None) is not None
    sources = classes.source_of_each(hit) if has_source else None
    if sources is None or np.all(sources == sources[0]):
        return None
    is_permuted = np.array_equal(np.sort(sources), hit)
    if not is_permuted and classes.length < _FEWEST:
        return None
    listed = slice(None) if hit.size <= _MOST_LISTED else slice(6)
    pairs = [f"{one} has {source}" for one, source in zip(hit[listed], sources[listed], strict=True)]
    text = ", ".join(pairs if len(pairs) == hit.size else [*pairs, "…"])
    whose = "each other's results" if is_permuted else f"the results of other {classes.noun}s"
    return Cluster("swap" if is_permuted else "copy", f"{_those(classes, hit)} have {whose}: {text}")


def _copied(classes: _Classes, hit: np.ndarray) -> Cluster | None:
    """Classes that all have the results of one class that is correct."""
    if classes.noun == "element":  # would be one value, and is found as such
        return None
    for source in classes.sources(int(hit[0]), np.setdiff1d(np.arange(classes.count), hit)):
        if classes.have(hit, np.full(hit.size, source)):
            those = f"{classes.noun} {hit[0]} has" if hit.size == 1 else f"all of these {classes.noun}s have"
            return Cluster("copy", f"{those} the results of {classes.noun} {source}")
    return None


def _those(classes: _Classes, hit: np.ndarray) -> str:
    return f"the {classes.noun}s" if hit.size == classes.count else f"these {hit.size} {classes.noun}s"
