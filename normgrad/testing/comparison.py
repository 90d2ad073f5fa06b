"""Compare a result with the exact values by one of the standards.

By default a result is correct where ``|result − exact| ≤ ½·ulp(exact) + 8·2⁻²⁴·T + 2⁻¹²⁶·U``, with the ulp of the
result's dtype. T, the sum of the absolute values of the terms that the formula adds up for the element, allows for
cancellation. U, the underflow allowance, allows for products and quotients below 2⁻¹²⁶ that lose their digits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from normgrad.contract.arrays import NotAnArray, as_view
from normgrad.testing.host import on_host
from normgrad.testing.measured import DTYPES, Measured, bound, ulp
from normgrad.testing.standards import STRICT, Reference, find
from normgrad.testing.terms import Magnitude

__all__ = ["Report", "bound", "compare", "measure", "report_of", "ulp"]


@dataclass(frozen=True)
class Report:
    """What a comparison found.

    Attributes
    ----------
    passed : bool
        Whether the result passes by the standard.
    wrong : int
        How many elements are beyond what the standard allows an element.
    worst : float
        The largest error as a fraction of that.
    index : tuple of int
        Where it is.
    text : str
        All that in one line.
    standard : str
        The standard's name.
    figures : dict
        The numbers that the verdict hangs on, by name, for a standard that looks at more than single elements.
    """

    passed: bool
    wrong: int
    worst: float
    index: tuple[int, ...]
    text: str
    standard: str = STRICT
    figures: dict[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.passed


def compare(
    actual: Any,
    expected: ArrayLike,
    terms: ArrayLike | Magnitude | None = None,
    *,
    standard: str = STRICT,
    baseline: Any = None,
    level: str = "L1",
) -> Report:
    """Judge a result against the exact values.

    Parameters
    ----------
    actual : array
        The result, an array as the operators take them. A tensor on a GPU is copied.
    expected : array
        The exact values in float64, from the oracle.
    terms : array or Magnitude, optional
        T and U for every element, as :mod:`normgrad.testing.terms` gives them. An array is T, with U = 0. By default T
        is the absolute exact value: no cancellation and no underflow is allowed for.
    standard : str
        One of :data:`normgrad.testing.STANDARDS`.
    baseline : array, optional
        The result of another implementation, for the standards that look at one.
    level : str
        Which level of ``cann-double``: L0, L1 or L2.

    Notes
    -----
    Where the exact value is NaN or Inf, the result must be NaN or Inf, whichever of the two. Where the exact value is
    finite, the result must be finite, with two exceptions: an exact value that overflows the result's dtype must give
    Inf with its sign, and where a term or a sum of terms of the formula reaches 2¹²⁶ (a Magnitude knows), NaN and Inf
    are correct too.
    """
    find(standard, level)
    exact = np.asarray(expected, np.float64)
    given = {"": actual} if baseline is None else {"": actual, " of the baseline": baseline}
    for whose, array in given.items():
        try:
            view = as_view(array)
        except NotAnArray as problem:
            raise TypeError(f"{'the baseline' if whose else 'actual'} {problem}") from None
        text = ""
        if view.dtype.name not in DTYPES:
            text = f"the dtype{whose} is {view.dtype}, and must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
        elif view.shape != exact.shape:
            text = f"the shape{whose} is {view.shape}, and must be {exact.shape}"
        if text:
            return Report(False, exact.size, float("inf"), (), text, standard)
    measured = measure(actual, exact, terms)
    return report_of(measured, standard, None if baseline is None else measure(baseline, exact, terms), level)


def measure(actual: Any, expected: ArrayLike, terms: ArrayLike | Magnitude | None = None) -> Measured:
    """A result beside the exact values of the same shape."""
    exact = np.asarray(expected, np.float64)
    if not isinstance(terms, Magnitude):
        terms = Magnitude(np.abs(exact) if terms is None else np.asarray(terms))
    return Measured(on_host(actual), exact, terms)


def report_of(measured: Measured, standard: str, baseline: Measured | None = None, level: str = "L1") -> Report:
    """What a standard says of a result, and where it is worst."""
    verdict = find(standard, level)(measured, Reference(baseline, level))
    share = np.ravel(verdict.share)
    wrong = int(np.count_nonzero(~(share <= 1)))
    if not share.size:
        return Report(verdict.passed, 0, 0.0, (), verdict.text, standard, verdict.figures)
    worst = int(np.argmax(share))
    index = tuple(int(i) for i in np.unravel_index(worst, measured.exact.shape))
    text = verdict.text
    if wrong:
        which = "worst" if np.isfinite(share[worst]) else "first"
        text += f"; {which} at {index}: {measured.actual[index]:.9g} for {measured.exact[index]:.9g}"
    return Report(verdict.passed, wrong, float(share[worst]), index, text, standard, verdict.figures)
