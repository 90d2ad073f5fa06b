"""Measure a result against the exact values, in float64: its error, the bound, and which NaN and Inf are correct."""

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
#: The dtypes of results that can be judged.
DTYPES = tuple(_FORMATS)
_LARGEST = {name: math.ldexp(2 - 2.0 ** (1 - digits), 1 - least) for name, (digits, least) in _FORMATS.items()}

#: float32's smallest normal number: a product or quotient below it may lose all its digits.
SMALLEST_NORMAL = 2.0**-126

#: The bound is promised where every term and every sum of terms is below this.
OVERFLOW = 2.0**126

Array = NDArray[np.float64]


def ulp(values: ArrayLike, dtype: str) -> Array:
    """Return the distance between neighbours of a dtype at these values."""
    digits, least = _FORMATS[dtype]
    fraction, exponent = np.frexp(np.asarray(values, np.float64))
    exponent = np.where(fraction == 0, least, np.maximum(exponent - 1, least))  # frexp gives 0 the exponent of 1/2
    return np.asarray(np.ldexp(1.0, exponent - (digits - 1)))


def bound(expected: ArrayLike, terms: ArrayLike, dtype: str, underflow: ArrayLike = 0.0) -> Array:
    """Return how far a result of a dtype may be from the exact values: ``½·ulp + 8·2⁻²⁴·T + 2⁻¹²⁶·U``."""
    scale, allowance = np.asarray(terms, np.float64), np.asarray(underflow, np.float64)
    return np.asarray(0.5 * ulp(expected, dtype) + 8 * 2.0**-24 * scale + SMALLEST_NORMAL * allowance)


def percent(share: float, decimals: int = 2) -> str:
    """A share in percent, rounded down: what is not all does not read as 100 %."""
    return f"{math.floor(round(share * 10 ** (decimals + 2), 6)) / 10**decimals:g} %"


def _counted(text: str, count: int) -> str:
    singular, plural = ("a number is", "number"), ("numbers are", "numbers")
    for one, many in zip(singular, plural, strict=True):
        text = text.replace(f"{{{one}}}", one if count == 1 else many)
    return text


@dataclass(frozen=True)
class Measured:
    """A result and the exact values, of the same shape.

    Attributes
    ----------
    result : array
        The result in its own dtype.
    exact : array
        The exact values.
    magnitude : Magnitude
        Their error scales.
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
        total, underflow = (
            np.broadcast_to(a, self.exact.shape) for a in (self.magnitude.total, self.magnitude.underflow)
        )
        return bound(self.exact, total, self.dtype, underflow)

    @cached_property
    def regular(self) -> NDArray[np.bool_]:
        """Where both the result and the exact values are numbers, so that their distance counts."""
        return np.asarray(np.isfinite(self.actual) & np.isfinite(self.exact))

    @cached_property
    def is_right_special(self) -> NDArray[np.bool_]:
        """Where a result is correct that has no distance to the exact value, or no finite bound on it.

        NaN or Inf is correct, whichever of the two, where the exact value is either, and where a term or a sum of
        terms is not below 2¹²⁶. Elsewhere Inf is correct where the bound reaches beyond the dtype on that side, and a
        number within the bound where the exact value itself overflows.
        """
        actual, exact = self.actual, self.exact
        with np.errstate(all="ignore"):
            limit = np.where(np.isfinite(self.limit), self.limit, 0.0)
            overflows = np.isinf(actual) & (np.copysign(1.0, actual) * exact + limit > _LARGEST[self.dtype])
            excused = ~np.isfinite(exact) | (np.broadcast_to(self.magnitude.peak, exact.shape) >= OVERFLOW)
            within = self.error <= limit
        return np.asarray((actual == self.nearest) | within | overflows | (excused & ~np.isfinite(actual)))

    @cached_property
    def is_misplaced(self) -> NDArray[np.bool_]:
        """Where NaN, Inf or a number stands and something else is correct."""
        special = ~(np.isfinite(self.actual) & np.isfinite(self.nearest))
        return np.asarray(special & ~self.is_right_special & ~(self.share_of_bound <= 1))

    @cached_property
    def misplaced(self) -> str:
        """How many these are, in words; empty where there are none."""
        is_nan, is_inf = np.isnan(self.actual), np.isinf(self.actual)
        is_number, overflows = np.isfinite(self.nearest), np.isfinite(self.exact)
        misplaced = {
            "NaN where {a number is} right": is_nan & is_number,
            "Inf where {a number is} right": is_inf & is_number,
            "NaN where Inf is right": is_nan & ~is_number,
            "Inf where Inf of the other sign is right": is_inf & ~is_number,
            "{number} where Inf is right": ~is_nan & ~is_inf & overflows,
            "{number} where NaN or Inf is right": ~is_nan & ~is_inf & ~overflows,
        }
        counts = {text: int(np.count_nonzero(self.is_misplaced & of)) for text, of in misplaced.items()}
        largest = _LARGEST[self.dtype]
        finite = self.actual[self.is_misplaced & ~is_nan & ~is_inf & overflows]
        saturates = finite.size and np.all(np.abs(finite) == largest)
        remark = f", all of them ±{largest:g}: the result saturates" if saturates else ""
        return ", ".join(f"{count} {_counted(text, count)}" for text, count in counts.items() if count) + remark

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
