"""NaN, Inf, overflow, subnormal numbers and zero counts go where the formula sends them."""

from __future__ import annotations

import numpy as np
import pytest

import normgrad
from support.dtypes import BF16, F16, F32, FLOATS, NUMPY

INF, NAN = np.inf, np.nan
_SMALLEST = {F32: 2.0**-149, F16: 2.0**-24, BF16: 2.0**-133}
_LARGEST = {F32: 3.4028234663852886e38, F16: 65504.0, BF16: 3.3895313892515355e38}


def _f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def _row(dy: np.ndarray, x: np.ndarray, mean: float = 0.0, rstd: float = 1.0) -> tuple[np.ndarray, ...]:
    return normgrad.layer_norm_backward(dy[None], x[None], [len(x)], _f32(mean)[None], _f32(rstd)[None])


def test_a_nan_spoils_its_row_and_its_columns_only(backend: str) -> None:
    x = np.ones((3, 4), np.float32)
    dy = x.copy()
    dy[1, 2] = NAN
    statistics = np.ones((3, 1), np.float32)
    grad_input, grad_weight, grad_bias = normgrad.layer_norm_backward(dy, x, [4], 0 * statistics, statistics)
    np.testing.assert_array_equal(np.isnan(grad_input), [[False] * 4, [True] * 4, [False] * 4])
    np.testing.assert_array_equal(np.isnan(grad_weight), [False, False, True, False])
    np.testing.assert_array_equal(np.isnan(grad_bias), [False, False, True, False])


def test_an_inf_in_grad_out(backend: str) -> None:
    grad_input, grad_weight, grad_bias = _row(_f32(INF, 1), _f32(0, 0))
    np.testing.assert_array_equal(grad_input, [[NAN, NAN]])  # Inf − Inf, and 0·(Inf·0)
    np.testing.assert_array_equal(grad_weight, [NAN, 0])
    np.testing.assert_array_equal(grad_bias, [INF, 1])


def test_an_inf_beside_zeros_keeps_its_sign(backend: str) -> None:
    grad_input, _, _ = normgrad.group_norm_backward(_f32(-INF, 1), _f32(1, 1), _f32(0), _f32(1), None, 1, 2, 1, 1)
    # Σg/m = −Inf and x̂·Σ(g·x̂)/m = −Inf: 1 + Inf + Inf, and −Inf + Inf + Inf.
    np.testing.assert_array_equal(grad_input, [NAN, INF])


@pytest.mark.parametrize("dtype", FLOATS)
def test_results_overflow_to_inf(backend: str, dtype: str) -> None:
    half = np.full((3, 2), _LARGEST[dtype] / 2, NUMPY[dtype])
    half[:, 1] *= -1
    zero, one = np.zeros((3, 1), NUMPY[dtype]), np.ones((3, 1), NUMPY[dtype])
    grad_bias = normgrad.layer_norm_backward(half, 0 * half, [2], zero, one, output_mask=(False, False, True))[2]
    np.testing.assert_array_equal(grad_bias.astype(np.float64), [INF, -INF])


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_number_stays(backend: str, dtype: str) -> None:
    largest = np.array([[_LARGEST[dtype]], [0.0]], NUMPY[dtype])
    zero, one = np.zeros((2, 1), NUMPY[dtype]), np.ones((2, 1), NUMPY[dtype])
    grad_bias = normgrad.layer_norm_backward(largest, 0 * largest, [1], zero, one, output_mask=(False, False, True))[2]
    assert float(grad_bias[0]) == _LARGEST[dtype]


@pytest.mark.parametrize("dtype", FLOATS)
def test_subnormals_are_kept(backend: str, dtype: str) -> None:
    tiny = np.array([[1.0, -3.0, 7.0]]).T * _SMALLEST[dtype]
    x, one = tiny.astype(NUMPY[dtype]), np.ones(1, NUMPY[dtype])
    np.testing.assert_array_equal(normgrad.batch_norm_elemt(x, one, 0 * one, 0 * one, one).astype(np.float64), tiny)
    gradient = normgrad.batch_norm_elemt_backward(
        x, 0 * x, 0 * one, one, one, 0 * one, 0 * one, np.array([3], np.int32)
    )
    np.testing.assert_array_equal(gradient.astype(np.float64), tiny)
    sums = normgrad.batch_norm_reduce_backward(x, 0 * x, 0 * one, one, one)
    assert float(sums[3][0]) == 5 * _SMALLEST[dtype]


@pytest.mark.parametrize("counter", [[0], [0, 0], [], [3, -3]])
def test_a_counter_that_sums_to_zero_divides_by_it(backend: str, counter: list[int]) -> None:
    x, one = np.ones((1, 3, 1), np.float32), np.ones(3, np.float32)
    got = normgrad.batch_norm_elemt_backward(
        x, 0 * x, 0 * one, one, None, _f32(0, 2, -2), 0 * one, np.array(counter, np.int32)
    )
    # 0/0, 2/0 and −2/0; the last term is 0·(0/0).
    np.testing.assert_array_equal(got.ravel(), [NAN, NAN, NAN])
    only_mean = normgrad.batch_norm_elemt_backward(
        x, x, 0 * one, one, None, _f32(0, 2, -2), _f32(1, 1, -1), np.array(counter, np.int32)
    )
    np.testing.assert_array_equal(only_mean.ravel(), [NAN, -INF, INF])


def test_counts_that_sum_to_zero_or_one(backend: str) -> None:
    x, mean, invstd = np.zeros((1, 1), np.float32), _f32(2)[None], _f32(1)[None]
    # No counts: S = 0, so S/(n − 1) = 0/−1; one count: S/0.
    for count, expected in ((0, (NAN, NAN, 0.0)), (1, (2.0, 1.0, INF))):
        running = _f32(1)
        got = normgrad.batch_norm_gather_stats_with_counts(
            x, mean, invstd, None, running, 1.0, 0.0, np.array([count], np.int32)
        )
        np.testing.assert_array_equal([float(got[0][0]), float(got[1][0]), float(running[0])], expected)


def test_statistics_of_nothing_are_nan(backend: str) -> None:
    mean, invstd = normgrad.batch_norm_stats(np.zeros((0, 2, 3), np.float32))
    assert np.isnan(mean).all()
    assert np.isnan(invstd).all()


def test_a_variance_of_zero_without_eps(backend: str) -> None:
    output, mean, rstd = normgrad.layer_norm(np.full((1, 3), 5, np.float32), [3], eps=0.0)
    assert (float(mean[0, 0]), float(rstd[0, 0])) == (5.0, INF)
    assert np.isnan(output).all()


def test_many_rows_do_not_make_the_sums_worse(backend: str) -> None:
    """A float32 running sum of 2^18 tenths would be off by hundreds of ulps; of ones and a large one, by all."""
    rows = 2**18
    dy = np.full((rows, 1), 0.1, np.float32)
    zero, one = np.zeros((rows, 1), np.float32), np.ones((rows, 1), np.float32)
    grad_bias = normgrad.layer_norm_backward(dy, zero, [1], zero, one, output_mask=(False, False, True))[2]
    exact = rows * float(np.float32(0.1))
    assert abs(float(grad_bias[0]) - exact) <= 2.0**-24 * exact * 9
