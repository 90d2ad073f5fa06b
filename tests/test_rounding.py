"""Rounding from float64, against the nearest number found exactly, ties to even."""

from __future__ import annotations

import bisect
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from normgrad.reference import rounded
from support.dtypes import BF16, F16, F32, NUMPY

_INFINITY = {F16: 0x7C00, BF16: 0x7F80}  # its bits


def _numbers(dtype: str) -> list[float]:
    """Every finite number of a 16-bit dtype that is not negative, in order."""
    values = np.arange(_INFINITY[dtype], dtype=np.uint16).view(NUMPY[dtype]).astype(np.float64)
    return [float(value) for value in values]


NUMBERS = {dtype: _numbers(dtype) for dtype in (F16, BF16)}


def _nearest(value: float, dtype: str) -> float:
    """The nearest number; of two as near, the one whose last bit is 0 (its place in the list is even)."""
    numbers = NUMBERS[dtype]
    size = Fraction(abs(value))
    above = bisect.bisect_left(numbers, abs(value))
    if above == len(numbers):
        # Beyond the largest: Inf from half a step above it on, as if there were one more number.
        step = Fraction(numbers[-1]) - Fraction(numbers[-2])
        result = np.inf if size >= Fraction(numbers[-1]) + step / 2 else numbers[-1]
    else:
        candidates = [above] if above == 0 else [above - 1, above]
        result = numbers[min(candidates, key=lambda i: (abs(Fraction(numbers[i]) - size), i % 2))]
    return float(np.copysign(result, value))


def _check(values: np.ndarray, dtype: str) -> None:
    got = rounded(values, NUMPY[dtype]).astype(np.float64)
    expected = np.array([_nearest(float(value), dtype) for value in values])
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(expected))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_every_tie_and_its_neighbours(dtype: str) -> None:
    """Half-way between two numbers, and the float64 (and float32) numbers on either side of that."""
    numbers = np.array(NUMBERS[dtype])
    ties = (numbers[:-1] + numbers[1:]) / 2
    ties = ties[:: 1 if dtype == F16 else 3]
    near = [np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)]
    # So close to the tie that float32 cannot tell them apart: a second rounding would go wrong here.
    near += [ties * (1 + 2.0**-40), ties * (1 - 2.0**-40)]
    # Nearer to float32's next number than to the tie: from there the tie must not be taken again.
    step = np.spacing(ties.astype(np.float32)).astype(np.float64)
    near += [ties + 0.75 * step, ties - 0.75 * step]
    for values in (ties, -ties, *near):
        _check(values, dtype)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_every_number_stays(dtype: str) -> None:
    _check(np.array(NUMBERS[dtype]), dtype)


@pytest.mark.parametrize("dtype", [F16, BF16])
@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_any_number(dtype: str, value: float) -> None:
    _check(np.array([value]), dtype)


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_nan_and_inf_stay(dtype: str) -> None:
    got = rounded(np.array([np.nan, np.inf, -np.inf]), NUMPY[dtype]).astype(np.float64)
    np.testing.assert_array_equal(got, [np.nan, np.inf, -np.inf])


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_float32_is_the_nearest_too(value: float) -> None:
    with np.errstate(over="ignore", under="ignore"):
        expected = np.float32(value)
    assert rounded(np.array([value]), NUMPY[F32])[0] == expected
