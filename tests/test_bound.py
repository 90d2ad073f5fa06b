"""The judge of results: what is within the bound passes, what is not fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from normgrad.testing import bound, compare, ulp
from normgrad.testing.terms import Magnitude
from support.dtypes import BF16, F16, F32, NUMPY

INF, NAN = np.inf, np.nan


def _passes(actual: Any, expected: float, terms: Any = None, dtype: str = F32) -> bool:
    return compare(np.array([actual], NUMPY[dtype]), np.array([expected]), terms).passed


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        (F32, 1.0, 2.0**-23),
        (F32, 1.999, 2.0**-23),
        (F32, 2.0, 2.0**-22),
        (F32, -3.0, 2.0**-22),
        (F32, 0.0, 2.0**-149),
        (F32, 2.0**-140, 2.0**-149),
        (F16, 1.0, 2.0**-10),
        (F16, 2.0**-20, 2.0**-24),
        (BF16, 1.0, 2.0**-7),
        (BF16, 2.0**-130, 2.0**-133),
    ],
)
def test_ulp(dtype: str, value: float, expected: float) -> None:
    assert ulp(value, dtype) == expected


def test_the_bound_is_half_an_ulp_and_eight_roundings_of_the_terms() -> None:
    assert bound(1.0, 10.0, F32) == 2.0**-24 + 8 * 2.0**-24 * 10


@pytest.mark.parametrize("sign", [1, -1])
def test_up_to_the_bound_and_no_further(sign: int) -> None:
    """With T = 1 the bound at 1 is 9·2⁻²⁴: four and a half ulps."""
    assert _passes(1 + sign * 4 * 2.0**-23, 1.0, np.ones(1)) is True
    assert _passes(1 + sign * 5 * 2.0**-23, 1.0, np.ones(1)) is False


def test_sixteen_bits_have_their_own_ulp() -> None:
    assert _passes(1 + 2.0**-10, 1 + 2.0**-11, dtype=F16)
    assert not _passes(1 + 2.0**-9, 1 + 2.0**-11, dtype=F16)


@pytest.mark.parametrize(("actual", "expected"), [(NAN, NAN), (INF, INF), (-INF, -INF)])
def test_special_values_in_their_place(actual: float, expected: float) -> None:
    assert _passes(actual, expected, np.ones(1))


@pytest.mark.parametrize(
    ("actual", "expected"), [(INF, -INF), (NAN, INF), (INF, NAN), (1.0, NAN), (1.0, INF), (NAN, 1.0), (INF, 1.0)]
)
def test_special_values_out_of_their_place(actual: float, expected: float) -> None:
    assert not _passes(actual, expected, np.ones(1))


def test_results_overflow_as_ieee_does() -> None:
    assert _passes(INF, 65520.0, dtype=F16)
    assert _passes(65504.0, 65519.0, dtype=F16)
    assert not _passes(INF, 65000.0, dtype=F16)
    assert not _passes(-INF, 65520.0, dtype=F16)


def test_a_factor_beyond_float32_excuses_inf_and_nan_alone() -> None:
    overflowing = Magnitude(np.ones(1), np.array([1e39]))
    assert _passes(INF, 1.0, overflowing)
    assert _passes(NAN, 1.0, overflowing)
    assert not _passes(1.1, 1.0, overflowing)


@pytest.mark.parametrize("terms", [NAN, INF])
def test_terms_without_a_size_excuse_no_number(terms: float) -> None:
    """As where 1/√Inf = 0: the right number passes, no other does."""
    assert _passes(0.0, 0.0, np.array([terms]))
    assert not _passes(0.5, 0.0, np.array([terms]))


def test_the_report_says_where_and_by_how_much() -> None:
    expected = np.ones((2, 3))
    actual = expected.astype(np.float32)
    actual[1, 2] = 2
    report = compare(actual, expected)
    assert not report
    assert (report.passed, report.wrong, report.index) == (False, 1, (1, 2))
    assert report.worst == pytest.approx(1 / (9 * 2.0**-24))
    assert "5 of 6 elements within the bound" in report.text
    assert "at (1, 2): 2.0 for 1" in report.text


def test_another_shape_is_wrong_altogether() -> None:
    report = compare(np.ones((3, 2), np.float32), np.ones((2, 3)))
    assert (report.passed, report.wrong) == (False, 6)
    assert "the shape is (3, 2), and must be (2, 3)" in report.text


def test_nothing_is_right() -> None:
    assert compare(np.ones((0, 3), np.float32), np.ones((0, 3)))
