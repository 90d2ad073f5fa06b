"""The error scales of the operators: U by hand, and which NaN and Inf they excuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from normgrad.testing import bound, compare, oracle, terms
from normgrad.testing.expected import as_tuple
from normgrad.testing.terms import Magnitude


@pytest.mark.parametrize(("value", "excused"), [(2.0**125, True), (2.0**124, False), (np.inf, True)])
def test_a_sum_of_2_to_the_126_or_an_infinite_one_excuses_nan_and_inf(value: float, excused: bool) -> None:
    grad_out = np.array([[value, 1], [value, 1], [value, 1]], np.float32)
    arguments = (grad_out, np.ones((3, 2), np.float32), [2], np.zeros(3, np.float32), np.ones(3, np.float32))
    expected, magnitude = oracle.layer_norm_backward(*arguments)[2], terms.layer_norm_backward(*arguments)[2]
    for special in (np.nan, np.inf, -np.inf):
        assert compare(np.array([special, 3], np.float32), expected, magnitude).passed is excused
        assert not compare(np.array([expected[0], special], np.float32), expected, magnitude).passed
    assert compare(expected.astype(np.float32), expected, magnitude).passed


TINY = 2.0**-140
F32 = np.float32


def _pair(low: float, high: float, *shape: int) -> np.ndarray:
    return np.array([low, high], F32).reshape(shape)


def _scalar(value: float) -> np.ndarray:
    return np.array([value], F32)


_ROW = {"grad_out": _pair(TINY, -3 * TINY, 1, 2), "input": _pair(0, 2, 1, 2), "weight": np.ones(2, F32)}
_STATISTICS = {"mean": _scalar(1), "invstd": _scalar(1), "weight": _scalar(1)}
_CHANNEL = {"grad_out": _pair(TINY, -3 * TINY, 1, 1, 2), "input": _pair(0, 2, 1, 1, 2), **_STATISTICS}
_SPREAD = {"input": _pair(-(2.0**-60), 2.0**-60, 1, 2), "weight": np.ones(2, F32), "bias": np.zeros(2, F32), "eps": 0.0}
_RANKS = {
    "input": np.zeros((1, 1), F32),
    "mean": _pair(TINY, 2 * TINY, 2, 1),
    "invstd": np.full((2, 1), 2.0**60, F32),
    "running_mean": _scalar(TINY),
    "running_var": _scalar(TINY),
    "momentum": 0.5,
    "eps": 0.0,
    "counts": np.array([1, 1], np.int32),
}

#: Calls, and U of each output by hand. In the backward calls |x − mean|, |x̂| and the weights are 1, and gradients are
#: too small to count.
BY_HAND: list[tuple[str, dict[str, Any], list[float]]] = [
    # 1 + 1 + 1·((1 + 1)·2), and 1 + 1 in the one row.
    ("layer_norm_backward", {**_ROW, "normalized_shape": (2,), "mean": _scalar(1), "rstd": _scalar(1)}, [6, 2, 0]),
    # Another 1 for the weight after the channel's sum.
    (
        "group_norm_backward",
        {**_ROW, "mean": _scalar(1), "rstd": _scalar(1), "N": 1, "C": 2, "HxW": 1, "group": 1},
        [7, 2, 0],
    ),
    # 1 + 1 + 1 + 1·(3 + 2·1 + 1).
    (
        "batch_norm_elemt_backward",
        {**_CHANNEL, "sum_dy": _scalar(0), "sum_dy_xmu": _scalar(0), "counter": np.array([2], np.int32)},
        [9],
    ),
    # 2 products; 1 + 2·2 for them and their sum's, 2 for the |x − mean|.
    ("batch_norm_reduce_backward", _CHANNEL, [0, 2, 7, 0]),
    # 1 + 4; x − mean is too small to count.
    (
        "batch_norm_elemt",
        {**_STATISTICS, "input": _pair(TINY, 0, 1, 1, 2), "mean": _scalar(0), "weight": _scalar(4), "bias": None},
        [5],
    ),
    # rstd = 2⁶⁰: 1 + rstd³ of rstd and |x − mean| of that in the output, beside 2 + rstd.
    ("layer_norm", {**_SPREAD, "normalized_shape": (2,)}, [2.0**120 + 2.0**60, 1, 2.0**180]),
    ("group_norm", {**_SPREAD, "N": 1, "C": 2, "HxW": 1, "group": 1}, [2.0**120 + 2.0**60, 1, 2.0**180]),
    ("batch_norm_stats", {"input": _SPREAD["input"].T, "eps": 0.0}, [1, 2.0**180]),
    ("batch_norm_stats", {"input": _pair(TINY, 2 * TINY, 2, 1), "eps": 1.0}, [1, 2]),
    # R·(1 + 1/n) = 3: 1 + 3; ½·invstd³·(1 + 2 + 3); 2 + ½·4; 2 + ½·(1 + 6·2).
    ("batch_norm_gather_stats_with_counts", _RANKS, [4, 3 * 2.0**180, 4, 8.5]),
]


@pytest.mark.parametrize(("operator", "arguments", "by_hand"), BY_HAND, ids=[operator for operator, _, _ in BY_HAND])
def test_underflow_allowance_by_hand(operator: str, arguments: dict[str, Any], by_hand: list[float]) -> None:
    moved = {name: arguments[name].astype(np.float64) for name in arguments if name.startswith("running")}
    magnitudes = as_tuple(getattr(terms, operator)(**arguments))
    exact = (*as_tuple(getattr(oracle, operator)(**{**arguments, **moved})), *moved.values())
    for values, magnitude, underflow in zip(exact, magnitudes, by_hand, strict=True):
        np.testing.assert_allclose(np.broadcast_to(magnitude.underflow, values.shape), underflow, rtol=1e-9)
        allowed = bound(values, magnitude.total, "float64", underflow)
        assert compare(values + 0.999 * allowed, values, magnitude).passed
        assert compare(values - 0.999 * allowed, values, magnitude).passed
        assert not compare(values + 1.001 * allowed, values, magnitude).passed
        if underflow > 0.01 * np.max(allowed) / 2.0**-126:
            assert not compare(values + 0.999 * allowed, values, magnitude.total).passed


def test_scales_keep_their_values_in_another_shape() -> None:
    reshaped = Magnitude(np.ones((2, 3)), np.array([[5.0], [0.0]]), underflow=np.array([1.0, 2, 3])).reshaped((6,))
    np.testing.assert_array_equal(reshaped.underflow, [1, 2, 3, 1, 2, 3])
    np.testing.assert_array_equal(reshaped.peak, [5, 5, 5, 1, 1, 1])


def _excused(operator: str, output: int, **arguments: Any) -> bool:
    """Return whether NaN passes for every element of an output; the exact values are finite."""
    exact, magnitude = (as_tuple(getattr(f, operator)(**arguments))[output] for f in (oracle, terms))
    assert np.all(np.isfinite(exact))
    nan = np.full(exact.shape, np.nan, F32)
    share = compare(nan, exact, magnitude)
    assert share.wrong in (0, exact.size)
    return share.passed


def test_regrouped_factors_are_no_terms() -> None:
    """NaN is wrong where rstd² or rstd·weight alone reaches 2¹²⁶, since no term of the formula does."""
    row = {"normalized_shape": (2,), "mean": _scalar(0), "weight": np.full(2, 2.0**70, F32)}
    tiny = {"grad_out": _pair(2.0**-80, 2.0**-82, 1, 2), "input": _pair(2.0**-70, -(2.0**-70), 1, 2)}
    assert not _excused("layer_norm_backward", 0, **tiny, **row, rstd=_scalar(2.0**70))
    channel = {"input": _pair(2.0**-70, -(2.0**-70), 1, 1, 2), "mean": _scalar(0), "bias": None}
    assert not _excused("batch_norm_elemt", 0, **channel, invstd=_scalar(2.0**70), weight=_scalar(2.0**70))


def test_factors_count_in_the_order_in_which_the_formula_is_written() -> None:
    channel = {
        "grad_out": _pair(TINY, TINY, 1, 1, 2),
        "input": _pair(TINY, TINY, 1, 1, 2),
        "mean": _scalar(0),
        "sum_dy": _scalar(0),
        "counter": np.array([2], np.int32),
    }
    # First invstd² reaches 2¹²⁶; then invstd²·sum_dy_xmu or invstd·weight does, which the formula does not multiply.
    weight = {"weight": _scalar(1), "sum_dy_xmu": _scalar(TINY)}
    assert _excused("batch_norm_elemt_backward", 0, **channel, **weight, invstd=_scalar(2.0**63))
    assert not _excused("batch_norm_elemt_backward", 0, **channel, **weight, invstd=_scalar(2.0**62.9))
    for scale, factor in ((2.0**-80, 2.0**10), (2.0**100, TINY)):
        weight = {"weight": _scalar(scale), "sum_dy_xmu": _scalar(factor)}
        assert not _excused("batch_norm_elemt_backward", 0, **channel, **weight, invstd=_scalar(2.0**62))


def test_variances_that_overflow_do_not_excuse_the_mean() -> None:
    ranks = {**_RANKS, "mean": np.zeros((2, 1), F32), "invstd": np.full((2, 1), 2.0**-63, F32)}
    ranks |= {"running_mean": None, "running_var": None}
    assert not _excused("batch_norm_gather_stats_with_counts", 0, **ranks)
    assert _excused("batch_norm_gather_stats_with_counts", 1, **ranks)
