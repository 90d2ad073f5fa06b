"""Find the terms that wrong sums lack, or have twice: consecutive ones, or one of every 2, 4, … 1024.

In a sum over samples and positions, these may also be the same positions in every sample.

The error of one sum fits many sets of its terms. A set that explains the errors of all wrong sums at once is what the
kernel lost or did twice: a chunk of the work, or a lane of every vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from normgrad.oracle.float64 import Array
from normgrad.testing.clusters import CHANCE

_TRIED = 64  # wrong sums that a claim is tried on, before it is tried on all
_MOST_CANDIDATES = 1 << 20  # pairs of first and last term that the first sum may leave
_PERIODS = tuple(2**k for k in range(1, 11))


@dataclass(frozen=True)
class Summands:
    """The terms of every sum of an output, such as grad_weight.

    Attributes
    ----------
    values : array
        All of them.
    axes : tuple of int
        The axes that are summed over; the others, in order, are those of the output.
    nouns : tuple of str
        What an index into the first of these axes is called, and one into the others together: ``("sample",
        "position")``.
    remark : str
        What follows the name of a term, such as ``in every sample``.
    """

    values: Array
    axes: tuple[int, ...]
    nouns: tuple[str, ...]
    remark: str = ""

    @cached_property
    def terms(self) -> Array:
        """Return a row for each element of the output, with its terms in the order of ``axes``."""
        last = tuple(range(-len(self.axes), 0))
        return np.moveaxis(self.values, self.axes, last).reshape(-1, self.count)

    @property
    def count(self) -> int:
        """Return how many terms a sum has."""
        return math.prod(self.values.shape[axis] for axis in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        """Return how many of each noun there are; a noun of which there is one is left out."""
        first = self.values.shape[self.axes[0]]
        every = zip(self.nouns, (first, self.count // max(first, 1)), strict=False)
        return {noun: size for noun, size in every if size > 1}

    @property
    def inner(self) -> Summands | None:
        """Return the same sums with the terms of the first axis added up; None where there is only one axis."""
        if len(self.sizes) < 2:
            return None
        first, *others = self.axes
        axes = tuple(axis - (axis > first) for axis in others)
        return Summands(np.sum(self.values, axis=first), axes, self.nouns[1:], f" in every {self.nouns[0]}")

    def term(self) -> tuple[str, str]:
        """Return what a term is called, and the order in which terms are counted where that needs to be said."""
        order = list(self.sizes)
        return (order[0], self.remark) if len(order) == 1 else ("term", f", counted in the order {', '.join(order)}")

    def named(self, first: int, last: int) -> str:
        """Return the terms from ``first`` to ``last`` in words: as whole samples, say, where they are just these."""
        (noun, remark), count = self.term(), self.count
        outer, *inner = self.sizes.items()
        width = math.prod(size for _, size in inner)
        if inner and first % width == 0 and (last + 1) % width == 0:
            (noun, count), remark, first, last = outer, "", first // width, last // width
        which = f"{noun} {first}" if first == last else f"{noun}s {first}–{last}"
        return f"{which} of {count}{remark}"


def lost_terms(summands: Summands, actual: Array, exact: Array, allowed: Array, wrong: np.ndarray) -> str | None:
    """Return the terms that all wrong sums ``lack …`` or ``have … twice``; None where no terms explain all errors.

    ``actual``, ``exact`` and ``allowed`` are flattened: the sums, the exact ones, and how far a sum may be off.
    ``wrong`` has the indices of those that are further off.
    """
    few = wrong[:: -(-wrong.size // _TRIED)]
    error = actual - exact
    few = few[np.argsort(-np.abs(error[few]) / allowed[few])]  # the sum that says most comes first
    if summands.count < 2 or not np.all(np.abs(np.sum(summands.terms[few], axis=1) - exact[few]) <= allowed[few]):
        return None  # the exact results are not the sums of these terms: no claim can be made
    # A sum of random terms matches an error with a probability of about allowed/error. There are about count² chunks to
    # choose from, so that one matches all errors by chance unless these are many, or large.
    evidence = np.sum(np.log(np.maximum(np.abs(error[few]) / allowed[few], 1)))
    for terms in filter(None, (summands, summands.inner)):
        if 2 * math.log(terms.count) - evidence < CHANCE:
            tried = _Sums(terms.terms[few], error[few], allowed[few])
            every = _Sums(terms.terms[wrong], error[wrong], allowed[wrong])
            if claim := _claim(terms, tried, every):
                return claim
    return None


def _claim(summands: Summands, tried: _Sums, every: _Sums) -> str | None:
    """Return the claim of a lane or a chunk that is true of all sums; looked for in those that are tried first."""
    for period in (period for period in _PERIODS if period < summands.count):
        for lane in tried.lanes(period)[:1]:
            if every.differ_by(slice(lane, None, period), -1):
                noun, remark = summands.term()
                return f"lack {noun} {lane} of every {period}{remark}"
    for sign, claim in ((-1, "lack {}"), (1, "have {} twice")):
        for begin, end in tried.chunks(sign)[:1]:
            if end - begin < summands.count and every.differ_by(slice(begin, end), sign):
                return claim.format(summands.named(begin, end - 1))
    return None


@dataclass(frozen=True)
class _Sums:
    """Some wrong sums: their terms, errors, and how large an error may be once it is explained."""

    terms: Array
    error: Array
    allowed: Array

    def differ_by(self, which: slice, sign: int) -> bool:
        """Return whether these terms explain all errors: added once more for sign 1, left out for sign -1."""
        return bool(np.all(np.abs(np.sum(self.terms[:, which], axis=1) - sign * self.error) <= self.allowed))

    def lanes(self, period: int) -> list[int]:
        """Return the lanes of two terms or more that all sums may lack: lane i has the terms i, i + period, …"""
        whole = self.terms.shape[1] // period * period
        lanes = self.terms[:, :whole].reshape(len(self.terms), -1, period).sum(axis=1)
        lanes[:, : self.terms.shape[1] - whole] += self.terms[:, whole:]
        is_lost = np.abs(lanes + self.error[:, None]) <= self.allowed[:, None]
        return [int(lane) for lane in np.flatnonzero(np.all(is_lost, axis=0)) if lane + period < self.terms.shape[1]]

    def chunks(self, sign: int) -> list[tuple[int, int]]:
        """Return the consecutive terms that all sums may lack (sign -1) or have twice (sign 1), the fewest terms first.

        They are pairs of the first term and the one after the last.

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
    """Return the indices a < b of partial sums C with C[b] = C[a] + ``difference``; none where there are too many."""
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
