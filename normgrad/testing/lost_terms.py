"""Sums that lack consecutive terms, or one of every 2, 4, … 1024, or have some twice: lost or repeated work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from normgrad.oracle.float64 import Array
from normgrad.testing.clusters import Cluster

_TRIED = 64  # sums
_MOST_CANDIDATES = 1 << 20  # for the first and last term
_PERIODS = tuple(2**k for k in range(1, 11))
_CHANCE = math.log(1e-3)


@dataclass(frozen=True)
class Summands:
    """The terms of every sum of an output.

    Attributes
    ----------
    values : array
        All of them.
    axes : tuple of int
        The axes that are summed over; the others, in order, are those of the output.
    nouns : tuple of str
        What an index is in the first of these axes, and in the others together: ``("sample", "position")``.
    """

    values: Array
    axes: tuple[int, ...]
    nouns: tuple[str, ...]

    @cached_property
    def terms(self) -> Array:
        """A row for each element of the output, with its terms in order."""
        last = tuple(range(-len(self.axes), 0))
        return np.moveaxis(self.values, self.axes, last).reshape(-1, math.prod(self._sizes))

    @property
    def _sizes(self) -> tuple[int, ...]:
        """The sizes of the first axis, and of the others together where they have a name."""
        sizes = tuple(self.values.shape[axis] for axis in self.axes)
        return (sizes[0], math.prod(sizes[1:])) if len(self.nouns) > 1 else sizes

    @property
    def noun(self) -> tuple[str, str]:
        """What a term is called, and in which order terms are counted where that needs to be said."""
        counts = {noun: size for noun, size in zip(self.nouns, self._sizes, strict=True) if size > 1}
        return (next(iter(counts)), "") if len(counts) == 1 else ("term", f", counted in the order {', '.join(counts)}")

    def named(self, first: int, last: int) -> str:
        """The terms from ``first`` to ``last`` in words."""
        counts = {noun: size for noun, size in zip(self.nouns, self._sizes, strict=True) if size > 1}
        inner = math.prod(list(counts.values())[1:])
        if first % inner == 0 and (last + 1) % inner == 0:
            noun, count = next(iter(counts.items()), ("term", 1))
            first, last = first // inner, last // inner
        else:
            noun, count = "term", self.terms.shape[1]
        which = f"{noun} {first}" if first == last else f"{noun}s {first}–{last}"
        return f"{which} of {count}{self.noun[1] if noun == 'term' else ''}"


def lost_terms(summands: Summands, actual: Array, exact: Array, allowed: Array, wrong: np.ndarray) -> Cluster | None:
    """The consecutive terms that all wrong sums lack, or have twice; None where there are none.

    With the partial sums C of a sum whose error is d, the terms from a to b − 1 are lost where C[b] = C[a] − d, and
    there twice where C[b] = C[a] + d. One sum gives the candidates for a and b, which the others confirm.
    """
    few = wrong[:: -(-wrong.size // _TRIED)]
    error = actual - exact
    order = few[np.argsort(-np.abs(error[few]) / allowed[few])]  # the sum that says most comes first
    terms = summands.terms[order]
    count = terms.shape[1]
    partial = np.concatenate([np.zeros((len(order), 1)), np.cumsum(terms, axis=1)], axis=1)
    if count < 2 or not np.all(np.abs(partial[:, -1] - exact[order]) <= allowed[order]):
        return None  # not all that is summed up
    evidence = np.sum(np.log(np.maximum(np.abs(error[order]) / allowed[order], 1)))
    if 2 * math.log(count) - evidence >= _CHANCE:
        return None
    for period in _PERIODS:
        lanes = terms[:, : count // period * period].reshape(len(order), -1, period).sum(axis=1)
        lanes[:, : count % period] += terms[:, count // period * period :]
        is_lost = np.all(np.abs(lanes + error[order][:, None]) <= allowed[order][:, None], axis=0)
        for lane in np.flatnonzero(is_lost)[: period < count]:
            if np.all(np.abs(summands.terms[wrong, lane::period].sum(axis=1) + error[wrong]) <= allowed[wrong]):
                noun, counted = summands.noun
                return Cluster("sum", f"all of them lack {noun} {lane} of every {period}{counted}")
    for sign, text in ((-1, "lack"), (1, "have")):
        begin, end = _candidates(partial[0], sign * error[order[0]], allowed[order[0]])
        for n in range(1, len(order)):
            difference = partial[n, end] - partial[n, begin]
            is_near = np.abs(difference - sign * error[order[n]]) <= allowed[order[n]]
            begin, end = begin[is_near], end[is_near]
        for a, b in sorted(zip(begin.tolist(), end.tolist(), strict=True), key=lambda pair: pair[1] - pair[0])[:1]:
            chunk = np.sum(summands.terms[wrong, a:b], axis=1)
            if b - a < count and np.all(np.abs(chunk - sign * error[wrong]) <= allowed[wrong]):
                twice = " twice" if sign > 0 else ""
                return Cluster("sum", f"all of them {text} {summands.named(a, b - 1)}{twice}")
    return None


def _candidates(partial: Array, difference: float, allowed: float) -> tuple[np.ndarray, np.ndarray]:
    """The indices a < b of partial sums with this difference."""
    order = np.argsort(partial, kind="stable")
    in_order = partial[order]
    low = np.searchsorted(in_order, partial + difference - allowed, "left")
    high = np.searchsorted(in_order, partial + difference + allowed, "right")
    sizes = high - low
    if np.sum(sizes) > _MOST_CANDIDATES:
        return np.array([], np.int64), np.array([], np.int64)
    begin = np.repeat(np.arange(partial.size), sizes)
    offset = np.arange(begin.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    end = order[np.repeat(low, sizes) + offset]
    return begin[begin < end], end[begin < end]
