"""Whether a result is close enough to the exact values, by a standard of one's choice.

By default a result is right where ``|result − exact| ≤ ½·ulp(exact) + 8·2⁻²⁴·T``, with the ulp of the result's dtype
and T the sum of the absolute values of all the terms that the formula adds up for that element. So cancellation is
allowed for, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from normgrad.contract.arrays import as_numpy, as_view
from normgrad.testing.measured import Measured, bound, ulp
from normgrad.testing.standards import STRICT, Reference, find
from normgrad.testing.terms import Magnitude

__all__ = ["Report", "bound", "compare", "measure", "report_of", "ulp"]


@dataclass(frozen=True)
class Report:
    """What a comparison found.

    Attributes
    ----------
    passed : bool
        Whether the result is right by the standard.
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
        The result, of any kind that the operators take, on the CPU.
    expected : array
        The exact values in float64, from the oracle.
    terms : array or Magnitude, optional
        T for every element, as :mod:`normgrad.testing.terms` gives it. By default the exact values' own size: no
        cancellation is allowed for.
    standard : str
        One of :data:`normgrad.testing.STANDARDS`.
    baseline : array, optional
        The result of another implementation, for the standards that look at one.
    level : str
        Which level of ``cann-double``: L0, L1 or L2.

    Notes
    -----
    NaN and Inf must stand where the exact values, rounded to the result's dtype, have them. Where a factor or term of
    the formula overflows float32 (a Magnitude knows), Inf and NaN are right too.
    """
    find(standard, level)
    exact = np.asarray(expected, np.float64)
    given = {"": actual} if baseline is None else {"": actual, " of the baseline": baseline}
    for whose, array in given.items():
        shape = as_view(array).shape
        if shape != exact.shape:
            text = f"the shape{whose} is {shape}, and must be {exact.shape}"
            return Report(False, exact.size, float("inf"), (), text, standard)
    measured = measure(actual, exact, terms)
    return report_of(measured, standard, None if baseline is None else measure(baseline, exact, terms), level)


def measure(actual: Any, expected: ArrayLike, terms: ArrayLike | Magnitude | None = None) -> Measured:
    """A result beside the exact values of the same shape."""
    view = as_view(actual)
    exact = np.asarray(expected, np.float64)
    if not isinstance(terms, Magnitude):
        terms = Magnitude(np.abs(exact) if terms is None else np.asarray(terms))
    result = np.asarray(actual) if view.dtype.name == "float64" else as_numpy(view)
    return Measured(result, exact, terms)


def report_of(measured: Measured, standard: str, baseline: Measured | None = None, level: str = "L1") -> Report:
    """What a standard says of a result, and where it is worst."""
    verdict = find(standard, level)(measured, Reference(baseline, level))
    share = np.ravel(verdict.share)
    wrong = int(np.count_nonzero(~(share <= 1)))
    if not share.size:
        return Report(verdict.passed, 0, 0.0, (), verdict.text, standard, verdict.figures)
    place = int(np.argmax(share))
    index = tuple(int(i) for i in np.unravel_index(place, measured.exact.shape))
    text = verdict.text
    if wrong:
        text += f", at {index}: {measured.result[index]} for {measured.exact[index]:.9g}"
    return Report(verdict.passed, wrong, float(share[place]), index, text, standard, verdict.figures)
