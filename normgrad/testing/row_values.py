"""Find values that all elements of a row share and that are wrong, where the rest of the formula is correct.

grad_input of LayerNorm and GroupNorm is ``rstd·(g − Σg/N − x̂·Σ(g·x̂)/N)``. A sum that is off by δ makes every element of
its row wrong, by ``−rstd/N·δ`` or ``−rstd·x̂/N·δ``. So the errors of a row, many, give the errors of its two sums, and
those tell which terms the sums lack. In the same way the errors of an output give those of the mean and of rstd.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from normgrad.oracle.float64 import Array
from normgrad.testing.clusters import CHANCE, Cluster
from normgrad.testing.lost_terms import Summands, lost_terms

_MOST_AT_ONCE = 1 << 20  # elements


@dataclass(frozen=True)
class RowValue:
    """A value that all elements of a row share.

    Attributes
    ----------
    factor : array
        What an error of the value is multiplied by on its way to each element; the last axes are the row.
    summands : Summands, optional
        The terms of the value, where it is a sum over the row.
    """

    factor: Array
    summands: Summands | None = None


def wrong_row_values(
    values: Mapping[str, RowValue], length: int, error: Array, allowed: Array, wrong: np.ndarray
) -> Cluster | None:
    """Return which values are wrong in the rows that hold wrong elements, and what sums lack if it is the same.

    ``length`` is that of a row. ``error`` and ``allowed`` are flattened: the errors of all elements, and how large one
    may be once it is explained. ``wrong`` has the indices of the elements with larger errors.
    """
    rows = np.unique(wrong // length)
    for names in _subsets(list(values)):
        fitted = _fitted([values[name].factor for name in names], length, error, allowed, rows)
        if fitted is None:
            continue
        subject, lost = " and ".join(names), set()
        for name, (difference, uncertainty) in zip(names, fitted, strict=True):
            lost.add(_lost(values[name].summands, rows, difference, uncertainty))
        if len(lost) == 1 and (what := lost.pop()):
            return Cluster("sum", f"the sums {subject} of the rows {what}")
        other = "another value" if len(names) == 1 else "other values"
        return Cluster("term", f"in each row they are correct for {other} of {subject}")
    return None


def _lost(summands: Summands | None, rows: np.ndarray, difference: Array, uncertainty: Array) -> str | None:
    if summands is None:
        return None
    exact = np.sum(summands.terms, axis=1)
    actual, limit = exact.copy(), np.full_like(exact, math.inf)
    actual[rows], limit[rows] = exact[rows] + difference, uncertainty + 1e-12 * np.abs(exact[rows])
    return lost_terms(summands, actual, exact, limit, rows)


def _subsets(names: list[str]) -> Iterator[tuple[str, ...]]:
    for count in range(1, len(names) + 1):
        yield from combinations(names, count)


def _fitted(
    factors: Sequence[Array], length: int, error: Array, allowed: Array, rows: np.ndarray
) -> list[tuple[Array, Array]] | None:
    """Return for each value its error in every row, and how far that may be off; None where not all is explained.

    Some rows are fitted at a time: most results that are wrong in other ways are known by the first ones.
    """
    found, spread, evidence = [], [], 0.0
    count = max(_MOST_AT_ONCE // length, 1)
    for some in (rows[first : first + count] for first in range(0, rows.size, count)):
        in_rows = [np.reshape(array, (-1, length))[some] for array in (*factors, error, allowed)]
        part = _least_squares(np.stack(in_rows[:-2], axis=-1), *in_rows[-2:])
        if part is None:
            return None
        found.append(part[0])
        spread.append(part[1])
        evidence += part[2]
    if -evidence >= CHANCE:
        return None
    return list(zip(np.concatenate(found).T, np.concatenate(spread).T, strict=True))


def _least_squares(factors: Array, error: Array, allowed: Array) -> tuple[Array, Array, float] | None:
    """Return the errors of the values in some rows, how far these may be off, and how far that is from chance.

    ``factors`` has the axes row, element and value; ``error`` and ``allowed`` row and element. Each element is weighted
    by its limit. None where an element keeps a larger error.
    """
    with np.errstate(all="ignore"):
        scaled, deviation = factors / allowed[..., None], error / allowed
        if not (np.all(np.isfinite(scaled)) and np.all(np.isfinite(deviation))):
            return None
        unit = np.max(np.abs(scaled), axis=1, keepdims=True)
        unit[unit == 0] = 1
        scaled /= unit
        squares = np.einsum("rek,rel->rkl", scaled, scaled)
        inverse = np.linalg.pinv(squares, rcond=1e-9, hermitian=True) @ scaled.swapaxes(1, 2)
        found = np.einsum("rke,re->rk", inverse, deviation)
    if not np.all(np.abs(np.einsum("rek,rk->re", scaled, found) - deviation) <= 1):
        return None
    # The largest errors of a row determine its values; only the others can contradict them.
    evidence = np.sort(np.log(np.maximum(np.abs(deviation), 1)), axis=1)[:, : -factors.shape[-1]]
    return found / unit[:, 0], np.sum(np.abs(inverse), axis=2) / unit[:, 0], float(np.sum(evidence))
