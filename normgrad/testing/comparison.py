"""How far results may lie from the exact values, and whether they do.

A result is right where ``|result − exact| ≤ ½·ulp(exact) + 8·2⁻²⁴·T``, with the ulp of the result's dtype and T the sum
of the absolute values of all the terms that the formula adds up for that element. So cancellation is allowed for, and
nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from normgrad.contract.arrays import as_numpy, as_view
from normgrad.reference import rounded
from normgrad.testing.terms import Magnitude

#: Mantissa bits (the hidden one included) and exponent of the smallest normal number.
_FORMATS = {"float32": (24, -126), "float16": (11, -14), "bfloat16": (8, -126), "float64": (53, -1022)}
_LARGEST = {name: math.ldexp(2 - 2.0 ** (1 - digits), 1 - least) for name, (digits, least) in _FORMATS.items()}


@dataclass(frozen=True)
class Report:
    """What a comparison found.

    Attributes
    ----------
    passed : bool
        Whether every element is within the bound.
    wrong : int
        How many elements are not.
    worst : float
        The largest error as a fraction of the bound.
    index : tuple of int
        Where it is.
    text : str
        All that in one line.
    """

    passed: bool
    wrong: int
    worst: float
    index: tuple[int, ...]
    text: str

    def __bool__(self) -> bool:
        return self.passed


def ulp(values: ArrayLike, dtype: str) -> NDArray[np.float64]:
    """The distance between neighbours of a dtype at these values."""
    digits, least = _FORMATS[dtype]
    fraction, exponent = np.frexp(np.asarray(values, np.float64))
    exponent = np.where(fraction == 0, least, np.maximum(exponent - 1, least))  # frexp gives 0 the exponent of 1/2
    return np.asarray(np.ldexp(1.0, exponent - (digits - 1)))


def bound(expected: ArrayLike, terms: ArrayLike, dtype: str) -> NDArray[np.float64]:
    """How far a result of a dtype may lie from the exact values."""
    return np.asarray(0.5 * ulp(expected, dtype) + 8 * 2.0**-24 * np.asarray(terms, np.float64))


def compare(actual: Any, expected: ArrayLike, terms: ArrayLike | Magnitude | None = None) -> Report:
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

    Notes
    -----
    NaN and Inf must stand where the exact values, rounded to the result's dtype, have them. Where a factor or term of
    the formula overflows float32 (a Magnitude knows), Inf and NaN are right too.
    """
    view = as_view(actual)
    dtype = view.dtype.name
    result = as_numpy(view)
    exact = np.asarray(expected, np.float64)
    if result.shape != exact.shape:
        text = f"the shape is {result.shape}, and must be {exact.shape}"
        return Report(False, exact.size, float("inf"), (), text)
    magnitude = (
        terms if isinstance(terms, Magnitude) else Magnitude(np.abs(exact) if terms is None else np.asarray(terms))
    )
    ratio = np.ravel(_error_ratio(result, exact, magnitude, dtype))
    wrong = int(np.count_nonzero(~(ratio <= 1)))
    place = int(np.argmax(ratio)) if ratio.size else 0
    index = tuple(int(i) for i in np.unravel_index(place, exact.shape)) if ratio.size else ()
    worst = float(ratio[place]) if ratio.size else 0.0
    text = f"{exact.size - wrong} of {exact.size} elements within the bound; the worst error is {worst:.3g} of it"
    if wrong:
        text += f", at {index}: {result[index]} for {exact[index]:.9g}"
    return Report(wrong == 0, wrong, worst, index, text)


def _error_ratio(result: np.ndarray, exact: np.ndarray, magnitude: Magnitude, dtype: str) -> np.ndarray:
    """Error over bound; where a special value stands, 0 if that is right and Inf if not."""
    actual = result.astype(np.float64)
    nearest = rounded(exact, result.dtype).astype(np.float64)
    limit = bound(exact, np.broadcast_to(magnitude.total, exact.shape), dtype)
    with np.errstate(all="ignore"):
        ratio = np.abs(actual - exact) / limit
        right = (actual == nearest) | (np.isnan(actual) & np.isnan(nearest))
        # So close to the largest number that rounding up is within the bound.
        right |= np.isinf(actual) & (np.copysign(exact, actual) == exact) & (np.abs(exact) + limit > _LARGEST[dtype])
        right |= ~np.isfinite(actual) & np.broadcast_to(magnitude.peak > _LARGEST["float32"], exact.shape)
    measured = np.isfinite(actual) & np.isfinite(exact) & np.isfinite(limit)
    return np.asarray(np.where(measured, ratio, np.where(right, 0.0, np.inf)))
