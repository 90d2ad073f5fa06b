"""Every standard on both sides of its limits, and NaN and Inf by all of them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from normgrad.testing import LEVELS, STANDARDS, compare, ulp
from normgrad.testing.measured import percent

F32, F16, BF16 = np.float32, np.float16, ml_dtypes.bfloat16
WITHOUT_BASELINE = [name for name in STANDARDS if name != "cann-double"]


def around(exact: np.ndarray, error: float, dtype: type = F32, count: int | None = None) -> np.ndarray:
    """Results that are off by an error, all of them or the first few."""
    off = exact.copy()
    off[: exact.size if count is None else count] += error
    return off.astype(dtype)


def test_the_default_is_strict_and_says_what_it_said() -> None:
    exact = np.array([1.0, 2.0, 3.0])
    report = compare(exact.astype(F32), exact)
    assert (report.passed, report.wrong, report.worst, report.index) == (True, 0, 0.0, (0,))
    assert report.text == "3 of 3 elements within the bound; the worst error is 0 of it"
    report = compare(np.array([1, 2, 3.1], F32), exact)
    assert (report.passed, report.wrong, report.index, report.standard) == (False, 1, (2,), "strict")
    assert report.text.endswith("; worst at (2,): 3.0999999 for 3")


@pytest.mark.parametrize("side", [0.99, 1.01])
def test_strict_at_its_bound(side: float) -> None:
    exact, terms = np.full(8, 1.5), np.full(8, 4096.0)
    limit = 0.5 * 2.0**-23 + 8 * 2.0**-24 * 4096
    assert compare(around(exact, side * limit), exact, terms).passed == (side < 1)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "limit"), [(F16, 2.0**-9, 0.1), (BF16, 2.0**-6, 1.0), (F32, 2.0**-10, 0.01)]
)
def test_cann(dtype: type, tolerance: float, limit: float) -> None:
    absolute = 2.0**-16 if dtype is F32 else tolerance
    exact = np.zeros(1000)
    assert compare(around(exact, absolute, dtype), exact, standard="cann").passed
    assert not compare(around(exact, 1.02 * absolute, dtype), exact, standard="cann").passed
    # One in a hundred may be further off, but not beyond the limit.
    assert compare(around(exact, 0.95 * limit, dtype, 10), exact, standard="cann").passed
    assert not compare(around(exact, 0.95 * limit, dtype, 11), exact, standard="cann").passed
    assert not compare(around(exact, 1.05 * limit, dtype, 1), exact, standard="cann").passed
    ones = np.ones(1000)
    assert compare(around(ones, 0.9 * (absolute + tolerance), dtype), ones, standard="cann").passed
    assert not compare(around(ones, 1.6 * (absolute + tolerance), dtype), ones, standard="cann").passed


def test_shares_are_rounded_down() -> None:
    exact = np.ones(100_000)
    result = exact.astype(F32)
    result[7] = 1.005
    report = compare(result, exact, standard="cann")
    assert report.text.startswith("99.99 % of the elements within the tolerance")
    assert [percent(share) for share in (1, 0.57, 0.999999, 0)] == ["100 %", "57 %", "99.99 %", "0 %"]


def test_cann_allows_a_large_value_32_ulp() -> None:
    exact = np.full(1000, 2.0**20)
    step = float(ulp(2.0**20, "float32"))
    assert step * 31 > 0.01
    assert compare(around(exact, 31 * step), exact, standard="cann").passed
    # Within 0.1 % of the value, but further off than any single element may be.
    assert not compare(around(exact, 33 * step, count=1), exact, standard="cann").passed


@pytest.mark.parametrize(("dtype", "threshold"), [(F16, 2.0**-10), (BF16, 2.0**-7), (F32, 2.0**-13)])
def test_cann_mere(dtype: type, threshold: float) -> None:
    exact = np.ones(1000)
    assert not compare(around(exact, 2 * threshold, dtype), exact, standard="cann-mere").passed
    assert compare(around(exact, 2 * threshold, dtype, 100), exact, standard="cann-mere").passed
    assert compare(around(exact, 9 * threshold, dtype, 1), exact, standard="cann-mere").passed
    assert not compare(around(exact, 11 * threshold, dtype, 1), exact, standard="cann-mere").passed


@pytest.mark.parametrize("level", LEVELS)
def test_cann_double(level: str) -> None:
    rng = np.random.default_rng(0)
    exact, noise = rng.normal(size=4000), rng.normal(size=4000) * 1e-4
    base = (exact + noise).astype(F32)

    def passes(actual: np.ndarray) -> bool:
        return compare(actual, exact, standard="cann-double", baseline=base, level=level).passed

    limits = LEVELS[level]
    mean = limits.mean
    assert passes((exact + 0.98 * mean * noise).astype(F32))
    assert not passes((exact + 1.02 * mean * noise).astype(F32))
    worst = int(np.argmax(np.abs(noise) / (np.abs(exact) + 1e-7)))
    for factor, good in ((0.98, True), (1.02, False)):
        one = (exact + noise).astype(F32)
        one[worst] = exact[worst] + factor * limits.largest * noise[worst]
        assert passes(one) == good


def test_cann_double_asks_no_more_than_rounding_right() -> None:
    exact = np.random.default_rng(1).normal(size=100)
    assert compare(exact.astype(F16), exact, standard="cann-double", baseline=exact, level="L2").passed
    with pytest.raises(ValueError, match="needs the results of a second implementation"):
        compare(exact.astype(F16), exact, standard="cann-double")


def test_bitwise() -> None:
    exact = np.array([1 / 3, 1.0, -0.0, np.nan])
    right = exact.astype(F32)
    assert compare(right, exact, standard="bitwise").passed
    assert compare(-right[3:], exact[3:], standard="bitwise").passed  # a NaN of the other sign
    assert not compare(np.nextafter(right, F32(2)), exact, standard="bitwise").passed
    assert not compare(np.array([0.0], F32), exact[2:3], standard="bitwise").passed
    other = np.nextafter(right, F32(2))
    assert compare(other, exact, standard="bitwise", baseline=other.copy()).passed
    assert not compare(right, exact, standard="bitwise", baseline=other).passed


@pytest.mark.parametrize(
    ("theirs", "ours"), [(torch.float32, F32), (torch.float16, F16), (torch.bfloat16, BF16)], ids=["f32", "f16", "bf16"]
)
@pytest.mark.parametrize("size", [0.0, 1.0, 100.0])
def test_torch_agrees_with_assert_close(theirs: torch.dtype, ours: type, size: float) -> None:
    tolerances = {F32: (1.3e-6, 1e-5), F16: (1e-3, 1e-5), BF16: (1.6e-2, 1e-5)}[ours]
    allowed = tolerances[1] + tolerances[0] * size
    exact = np.full(16, size)
    for factor in (0.0, 0.5, 2.5):
        actual = exact.copy()
        actual[3] += factor * allowed
        result = actual.astype(ours)
        tensors = [torch.tensor(values).to(theirs) for values in (actual, exact)]
        try:
            torch.testing.assert_close(*tensors)
            good = True
        except AssertionError:
            good = False
        assert compare(result, exact, standard="torch").passed == good
        assert good == (factor < 1)


@pytest.mark.parametrize("standard", WITHOUT_BASELINE)
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_belong_where_the_exact_value_is_not_finite(standard: str, special: float) -> None:
    terms = np.linspace(1, 2, 1000)
    exact = terms.copy()
    exact[5] = special
    right = exact.astype(F32)
    assert compare(right, exact, terms, standard=standard).passed
    for other in (np.nan, np.inf, -np.inf):
        right[5] = other
        same_bits = np.array_equal(right[5], F32(special), equal_nan=True)
        assert compare(right, exact, terms, standard=standard).passed is (standard != "bitwise" or same_bits)
    for place, value in ((5, 1.0), (6, special)):
        wrong = exact.astype(F32)
        wrong[place] = value
        report = compare(wrong, exact, terms, standard=standard)
        assert not report.passed, (place, value)
        assert report.index == (place,)


@pytest.mark.parametrize("standard", WITHOUT_BASELINE)
def test_a_value_beyond_the_dtype_is_inf(standard: str) -> None:
    exact = np.full(1000, 2.0)
    exact[1] = 1e6
    with np.errstate(over="ignore"):
        assert compare(exact.astype(F16), exact, standard=standard).passed
    assert not compare(np.minimum(exact, 65504).astype(F16), exact, standard=standard).passed


@pytest.mark.parametrize("standard", STANDARDS)
def test_nothing_is_right(standard: str) -> None:
    empty = np.empty((0, 3))
    report = compare(empty.astype(F32), empty, standard=standard, baseline=empty.astype(F32))
    assert (report.passed, report.wrong, report.worst) == (True, 0, 0.0)


def test_what_is_not_known() -> None:
    one = np.ones(1, F32)
    with pytest.raises(ValueError, match="unknown standard 'lenient'; known are strict, cann"):
        compare(one, one, standard="lenient")
    with pytest.raises(ValueError, match="unknown level 'L9'; known are L0, L1, L2"):
        compare(one, one, standard="cann-double", baseline=one, level="L9")


def test_shapes() -> None:
    report = compare(np.ones(2, F32), np.ones(3), standard="cann")
    assert (report.passed, report.text) == (False, "the shape is (2,), and must be (3,)")
    report = compare(np.ones(3, F32), np.ones(3), standard="bitwise", baseline=np.ones(2, F32))
    assert (report.passed, report.text) == (False, "the shape of the baseline is (2,), and must be (3,)")
