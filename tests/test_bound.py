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


def test_the_bound_is_half_an_ulp_eight_roundings_of_the_terms_and_the_underflow_allowance() -> None:
    assert bound(1.0, 10.0, F32) == 2.0**-24 + 8 * 2.0**-24 * 10
    assert bound(0.0, 0.0, F32, 3.0) == 2.0**-150 + 3 * 2.0**-126
    assert bound(2.0**-120, 2.0**-120, F32, 3.0) == 2.0**-144 + 2.0**-141 + 3 * 2.0**-126


@pytest.mark.parametrize("sign", [1, -1])
def test_up_to_the_bound_and_no_further(sign: int) -> None:
    """With T = 1 the bound at 1 is 9·2⁻²⁴: four and a half ulps."""
    assert _passes(1 + sign * 4 * 2.0**-23, 1.0, np.ones(1)) is True
    assert _passes(1 + sign * 5 * 2.0**-23, 1.0, np.ones(1)) is False


def test_sixteen_bits_have_their_own_ulp() -> None:
    assert _passes(1 + 2.0**-10, 1 + 2.0**-11, dtype=F16)
    assert not _passes(1 + 2.0**-9, 1 + 2.0**-11, dtype=F16)


@pytest.mark.parametrize("expected", [NAN, INF, -INF])
@pytest.mark.parametrize("actual", [NAN, INF, -INF])
def test_nan_and_inf_are_interchangeable(actual: float, expected: float) -> None:
    assert _passes(actual, expected, np.ones(1))


@pytest.mark.parametrize("finite", [0.0, 1.0, 3.0e38])
@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_only_finite_results_are_correct_where_the_exact_value_is_finite(special: float, finite: float) -> None:
    assert not _passes(finite, special, np.ones(1))
    assert not _passes(special, finite, np.ones(1))


def test_results_that_overflow_their_dtype_are_inf_with_the_sign_of_the_exact_value() -> None:
    assert not _passes(NAN, 65520.0, dtype=F16)
    assert _passes(INF, 65520.0, dtype=F16)
    assert _passes(65504.0, 65519.0, dtype=F16)
    assert not _passes(INF, 65000.0, dtype=F16)
    assert not _passes(-INF, 65520.0, dtype=F16)


def test_where_the_bound_reaches_beyond_the_dtype_so_may_the_result() -> None:
    """Terms of 2^50 that cancel: the computed sum is of either sign, and so is its overflow."""
    cancelling = Magnitude([2.0**50])
    for exact in (1e6, -1e6, 0.0):
        for within in (INF, -INF, 60000.0):
            assert _passes(within, exact, cancelling, dtype=F16)
        assert not _passes(NAN, exact, cancelling, dtype=F16)
    assert not _passes(INF, -1e9, cancelling, dtype=F16)
    assert compare(np.full(1, 60000, F16), np.full(1, 1e6), cancelling, standard="cann").text.count("is right") == 0


@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_a_term_of_2_to_the_126_excuses_nan_and_inf_and_no_finite_result(special: float) -> None:
    overflowing = Magnitude(np.ones(1), np.array([2.0**126]))
    assert _passes(special, 1.0, overflowing)
    assert _passes(1.0, 1.0, overflowing)
    assert not _passes(1.1, 1.0, overflowing)
    below = Magnitude(np.ones(1), np.array([np.nextafter(2.0**126, 0)]))
    assert not _passes(special, 1.0, below)


@pytest.mark.parametrize("scale", [NAN, INF])
def test_scales_that_are_not_finite_excuse_no_error(scale: float) -> None:
    """Where 1/√Inf = 0, the rounded exact value passes and no other result does."""
    for terms in (Magnitude([scale]), Magnitude([0.0], underflow=[scale])):
        assert _passes(0.0, 0.0, terms)
        for wrong in (0.5, NAN, INF, -INF):
            assert not _passes(wrong, 0.0, terms)


def test_the_report_says_where_and_by_how_much() -> None:
    expected = np.ones((2, 3))
    actual = expected.astype(np.float32)
    actual[1, 2] = 2
    report = compare(actual, expected)
    assert not report
    assert (report.passed, report.wrong, report.index) == (False, 1, (1, 2))
    assert report.worst == pytest.approx(1 / (9 * 2.0**-24))
    assert "5 of 6 elements within the bound" in report.text
    assert "; worst at (1, 2): 2 for 1" in report.text


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64, np.object_])
def test_another_dtype_is_wrong_altogether(dtype: type) -> None:
    report = compare(np.ones(3).astype(dtype), np.ones(3))
    assert (report.passed, report.wrong) == (False, 3)
    assert report.text.startswith("the dtype is ")
    assert report.text.endswith(", and must be float32, float16, bfloat16 or float64")


@pytest.mark.parametrize("standard", ["cann", "cann-mere"])
def test_a_dtype_that_a_standard_does_not_know(standard: str) -> None:
    with pytest.raises(ValueError, match=f"the standard {standard} is for .*, and the result is float64"):
        compare(np.ones(3), np.ones(3), standard=standard)


def test_another_shape_is_wrong_altogether() -> None:
    report = compare(np.ones((3, 2), np.float32), np.ones((2, 3)))
    assert (report.passed, report.wrong) == (False, 6)
    assert "the shape is (3, 2), and must be (2, 3)" in report.text


def test_nothing_is_right() -> None:
    assert compare(np.ones((0, 3), np.float32), np.ones((0, 3)))
