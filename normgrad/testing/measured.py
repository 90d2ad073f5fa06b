"""A result beside the exact values, in float64, and how the two differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from normgrad.reference import rounded
from normgrad.testing.terms import Magnitude

#: Mantissa bits (the hidden one included) and exponent of the smallest normal number.
_FORMATS = {"float32": (24, -126), "float16": (11, -14), "bfloat16": (8, -126), "float64": (53, -1022)}
_LARGEST = {name: math.ldexp(2 - 2.0 ** (1 - digits), 1 - least) for name, (digits, least) in _FORMATS.items()}

Array = NDArray[np.float64]


def ulp(values: ArrayLike, dtype: str) -> Array:
    """The distance between neighbours of a dtype at these values."""
    digits, least = _FORMATS[dtype]
    fraction, exponent = np.frexp(np.asarray(values, np.float64))
    exponent = np.where(fraction == 0, least, np.maximum(exponent - 1, least))  # frexp gives 0 the exponent of 1/2
    return np.asarray(np.ldexp(1.0, exponent - (digits - 1)))


def bound(expected: ArrayLike, terms: ArrayLike, dtype: str) -> Array:
    """How far a result of a dtype may lie from the exact values."""
    return np.asarray(0.5 * ulp(expected, dtype) + 8 * 2.0**-24 * np.asarray(terms, np.float64))


@dataclass(frozen=True)
class Measured:
    """A result and the exact values, of one shape.

    Attributes
    ----------
    result : array
        The result in its own dtype.
    exact : array
        The exact values.
    magnitude : Magnitude
        The terms behind them.
    """

    result: np.ndarray
    exact: Array
    magnitude: Magnitude

    @property
    def dtype(self) -> str:
        """The name of the result's dtype."""
        return self.result.dtype.name

    @cached_property
    def actual(self) -> Array:
        """The result in float64."""
        return self.result.astype(np.float64)

    @cached_property
    def narrowed(self) -> np.ndarray:
        """The exact values rounded to the result's dtype."""
        return rounded(self.exact, self.result.dtype)

    @cached_property
    def nearest(self) -> Array:
        """Those in float64 again."""
        return self.narrowed.astype(np.float64)

    @cached_property
    def error(self) -> Array:
        """How far the result is from the exact values; Inf or NaN where either is."""
        with np.errstate(all="ignore"):
            return np.abs(self.actual - self.exact)

    @cached_property
    def limit(self) -> Array:
        """The bound."""
        return bound(self.exact, np.broadcast_to(self.magnitude.total, self.exact.shape), self.dtype)

    @cached_property
    def regular(self) -> NDArray[np.bool_]:
        """Where both the result and the exact values are numbers, so that their distance counts."""
        return np.asarray(np.isfinite(self.actual) & np.isfinite(self.exact))

    @cached_property
    def is_right_special(self) -> NDArray[np.bool_]:
        """Where a result is right as NaN or Inf are: it is what the exact values, rounded to its dtype, are.

        Where a factor or term of the formula overflows float32, any NaN or Inf is right.
        """
        actual, exact = self.actual, self.exact
        with np.errstate(all="ignore"):
            right = (actual == self.nearest) | (np.isnan(actual) & np.isnan(self.nearest))
            # So close to the largest number that rounding up is within the bound.
            near_the_end = np.abs(exact) + self.limit > _LARGEST[self.dtype]
            right |= np.isinf(actual) & (np.copysign(exact, actual) == exact) & near_the_end
            peak = np.broadcast_to(self.magnitude.peak, exact.shape)
            right |= ~np.isfinite(actual) & (peak > _LARGEST["float32"])
        return np.asarray(right)

    def share_of(self, allowed: Array, error: Array | None = None) -> Array:
        """Error over what is allowed; where a special value stands, 0 if that is right and Inf if not."""
        with np.errstate(all="ignore"):
            ratio = (self.error if error is None else error) / allowed
        measured = self.regular & np.isfinite(allowed)
        return np.asarray(np.where(measured, ratio, np.where(self.is_right_special, 0.0, np.inf)))

    @cached_property
    def share_of_bound(self) -> Array:
        """Error over bound, element by element."""
        return self.share_of(self.limit)

    @cached_property
    def ulps(self) -> Array:
        """The signed error in ulp of the result's dtype at the exact value; NaN where there is no distance."""
        with np.errstate(all="ignore"):
            signed = (self.actual - self.exact) / ulp(self.exact, self.dtype)
        return np.asarray(np.where(self.regular, signed, np.nan))
