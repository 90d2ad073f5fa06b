"""Sums that lack consecutive terms, or one of every 2, 4, … 1024, or have some twice: lost or repeated work.

A sum names only its error; the terms that explain the errors of all sums at once are what a kernel lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from normgrad.oracle.float64 import Array
from normgrad.testing.clusters import Cluster

_TRIED = 64  # sums that a guess is tried on before all
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
        return np.moveaxis(self.values, self.axes, last).reshape(-1, self.count)

    @property
    def count(self) -> int:
        """How many terms a sum has."""
        return math.prod(self.values.shape[axis] for axis in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        """How many of each noun there are; those of which there is one are left out."""
        first = self.values.shape[self.axes[0]]
        every = zip(self.nouns, (first, self.count // max(first, 1)), strict=False)
        return {noun: size for noun, size in every if size > 1}

    def term(self) -> tuple[str, str]:
        """What a term is called, and in which order terms are counted where that needs to be said."""
        order = list(self.sizes)
        return (order[0], "") if len(order) == 1 else ("term", f", counted in the order {', '.join(order)}")

    def named(self, first: int, last: int) -> str:
        """The terms from ``first`` to ``last`` in words."""
        (noun, remark), count = self.term(), self.count
        outer, *inner = self.sizes.items()
        width = math.prod(size for _, size in inner)
        if inner and first % width == 0 and (last + 1) % width == 0:
            (noun, count), remark, first, last = outer, "", first // width, last // width
        which = f"{noun} {first}" if first == last else f"{noun}s {first}–{last}"
        return f"{which} of {count}{remark}"


def lost_terms(summands: Summands, actual: Array, exact: Array, allowed: Array, wrong: np.ndarray) -> Cluster | None:
    """The terms that all wrong sums lack, or have twice, in words; None where there are none."""
    few = wrong[:: -(-wrong.size // _TRIED)]
    error = actual - exact
    few = few[np.argsort(-np.abs(error[few]) / allowed[few])]  # the sum that says most comes first
    if summands.count < 2 or not np.all(np.abs(np.sum(summands.terms[few], axis=1) - exact[few]) <= allowed[few]):
        return None  # not all that is summed up
    evidence = np.sum(np.log(np.maximum(np.abs(error[few]) / allowed[few], 1)))
    if 2 * math.log(summands.count) - evidence >= _CHANCE:  # so many first and last terms there are
        return None
    tried = _Sums(summands.terms[few], error[few], allowed[few])
    every = _Sums(summands.terms[wrong], error[wrong], allowed[wrong])
    for period in (period for period in _PERIODS if period < summands.count):
        for lane in tried.lanes(period)[:1]:
            if every.differ_by(slice(lane, None, period), -1):
                noun, remark = summands.term()
                return Cluster("sum", f"all of them lack {noun} {lane} of every {period}{remark}")
    for sign, claim in ((-1, "all of them lack {}"), (1, "all of them have {} twice")):
        for begin, end in tried.chunks(sign)[:1]:
            if end - begin < summands.count and every.differ_by(slice(begin, end), sign):
                return Cluster("sum", claim.format(summands.named(begin, end - 1)))
    return None


@dataclass(frozen=True)
class _Sums:
    """Some wrong sums: their terms, errors, and how large an error may be once it is explained."""

    terms: Array
    error: Array
    allowed: Array

    def differ_by(self, which: slice, sign: int) -> bool:
        """Whether these terms, added or left out, explain the errors."""
        return bool(np.all(np.abs(np.sum(self.terms[:, which], axis=1) - sign * self.error) <= self.allowed))

    def lanes(self, period: int) -> list[int]:
        """The lanes of every ``period`` terms that all sums may lack."""
        whole = self.terms.shape[1] // period * period
        lanes = self.terms[:, :whole].reshape(len(self.terms), -1, period).sum(axis=1)
        lanes[:, : self.terms.shape[1] - whole] += self.terms[:, whole:]
        is_lost = np.abs(lanes + self.error[:, None]) <= self.allowed[:, None]
        return [int(lane) for lane in np.flatnonzero(np.all(is_lost, axis=0))]

    def chunks(self, sign: int) -> list[tuple[int, int]]:
        """The consecutive terms that all sums may lack or have twice, as first and last + 1; the fewest terms first.

        With the partial sums C of a sum whose error is d, the terms from a to b − 1 are lost where C[b] = C[a] − d, and
        there twice where C[b] = C[a] + d. The first sum gives the candidates for a and b, which the others confirm.
        """
        partial = np.concatenate([np.zeros((len(self.terms), 1)), np.cumsum(self.terms, axis=1)], axis=1)
        begin, end = _apart(partial[0], sign * self.error[0], self.allowed[0])
        for n in range(1, len(self.terms)):
            difference = partial[n, end] - partial[n, begin]
            is_near = np.abs(difference - sign * self.error[n]) <= self.allowed[n]
            begin, end = begin[is_near], end[is_near]
        return sorted(zip(begin.tolist(), end.tolist(), strict=True), key=lambda chunk: chunk[1] - chunk[0])


def _apart(partial: Array, difference: float, allowed: float) -> tuple[np.ndarray, np.ndarray]:
    """The indices a < b of partial sums with this difference."""
    order = np.argsort(partial, kind="stable")
    in_order = partial[order]
    low = np.searchsorted(in_order, partial + difference - allowed, "left")
    sizes = np.searchsorted(in_order, partial + difference + allowed, "right") - low
    if np.sum(sizes) > _MOST_CANDIDATES:
        return np.array([], np.int64), np.array([], np.int64)
    begin = np.repeat(np.arange(partial.size), sizes)
    offset = np.arange(begin.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    end = order[np.repeat(low, sizes) + offset]
    return begin[begin < end], end[begin < end]
