"""NaN, Inf, overflow, underflow and zero counts: each result is what the contract asks for, by the judge of results.

Where the oracle's value is NaN or Inf the result is either; the tests state where that is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import normgrad
from normgrad.operators import OPERATORS
from normgrad.testing import judge
from normgrad.testing.expected import as_tuple
from support.dtypes import BF16, F16, F32, FLOATS, NUMPY

INF, NAN = np.inf, np.nan
_SMALLEST = {F32: 2.0**-149, F16: 2.0**-24, BF16: 2.0**-133}
_LARGEST_TERM = {F32: 2.0**126 * (1 - 2.0**-24), F16: 65504.0, BF16: 2.0**126 * (1 - 2.0**-8)}


def _f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def _judged(operator: str, **arguments: Any) -> tuple[np.ndarray, ...]:
    """Run an operator and judge its results; return those that are wanted."""
    function = OPERATORS[operator]
    given = {name: value.copy() if name.startswith("running") else value for name, value in arguments.items()}
    results = dict(zip(function.signature.output_names, as_tuple(function(**given)), strict=True))
    results |= {name: given[name] for name in given if name.startswith("running")}
    found = {name: value for name, value in results.items() if value is not None}
    judgement = judge(operator, arguments, found)
    assert judgement, [(output.name, output.report.text) for output in judgement.outputs]
    return tuple(found.values())


def _assert_finite(results: np.ndarray, *expected: bool) -> None:
    np.testing.assert_array_equal(np.isfinite(results.astype(np.float64)).ravel(), expected)


def _columns(dy: np.ndarray) -> dict[str, Any]:
    """Return a LayerNorm backward call over rows of zeros, whose grad_bias is all that matters."""
    rows, columns = dy.shape
    zero = np.zeros((rows, 1), dy.dtype)
    statistics = {"mean": zero, "rstd": zero + 1, "normalized_shape": [columns]}
    return {"grad_out": dy, "input": np.zeros_like(dy), **statistics, "output_mask": (False, False, True)}


def test_a_nan_affects_its_row_and_its_columns_only(backend: str) -> None:
    x = np.ones((3, 4), np.float32)
    dy = x.copy()
    dy[1, 2] = NAN
    statistics = {"mean": np.zeros((3, 1), np.float32), "rstd": np.ones((3, 1), np.float32)}
    results = _judged("layer_norm_backward", grad_out=dy, input=x, normalized_shape=[4], **statistics)
    _assert_finite(results[0], *[True] * 4, *[False] * 4, *[True] * 4)
    for sums in results[1:]:
        _assert_finite(sums, True, True, False, True)


def test_an_inf_in_grad_out(backend: str) -> None:
    statistics = {"mean": _f32(0)[None], "rstd": _f32(1)[None]}
    results = _judged(
        "layer_norm_backward", grad_out=_f32(INF, 1)[None], input=_f32(0, 0)[None], normalized_shape=[2], **statistics
    )
    _assert_finite(results[0], False, False)
    for sums in results[1:]:
        _assert_finite(sums, False, True)


def test_an_inf_in_grad_out_of_a_group(backend: str) -> None:
    sizes = {"N": 1, "C": 2, "HxW": 1, "group": 1}
    data = {"grad_out": _f32(-INF, 1), "input": _f32(1, 1), "mean": _f32(0), "rstd": _f32(1), "weight": None}
    results = _judged("group_norm_backward", **data, **sizes)
    _assert_finite(results[0], False, False)
    for sums in results[1:]:
        _assert_finite(sums, False, True)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_that_overflow_are_not_finite(backend: str, dtype: str) -> None:
    largest = np.full((8, 2), _LARGEST_TERM[dtype], NUMPY[dtype])
    largest[:, 1] *= -1
    (grad_bias,) = _judged("layer_norm_backward", **_columns(largest))
    _assert_finite(grad_bias, False, False)


def test_results_beyond_their_dtype_are_inf_with_the_right_sign(backend: str) -> None:
    """The sums of float16 values are far below 2¹²⁶."""
    half = np.full((3, 2), 65504 / 2, np.float16)
    half[:, 1] *= -1
    (grad_bias,) = _judged("layer_norm_backward", **_columns(half))
    np.testing.assert_array_equal(grad_bias, [INF, -INF])


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_sums_of_the_promise_are_finite(backend: str, dtype: str) -> None:
    (grad_bias,) = _judged("layer_norm_backward", **_columns(np.array([[_LARGEST_TERM[dtype]], [0.0]], NUMPY[dtype])))
    _assert_finite(grad_bias, True)
    assert float(grad_bias[0]) == _LARGEST_TERM[dtype]


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_of_the_smallest_values_are_exact(backend: str, dtype: str) -> None:
    """A sum has no product that may underflow: its U is 0."""
    x, one = np.array([[1.0, -3.0, 7.0]]).T * _SMALLEST[dtype], np.ones(1, NUMPY[dtype])
    x = x.astype(NUMPY[dtype])
    channel = {"input": 0 * x, "mean": 0 * one, "invstd": one, "weight": one}
    results = _judged("batch_norm_reduce_backward", grad_out=x, **channel)
    assert float(results[0][0]) == float(results[3][0]) == 5 * _SMALLEST[dtype]


@pytest.mark.parametrize("dtype", FLOATS)
def test_products_of_the_smallest_values(backend: str, dtype: str) -> None:
    """float16's smallest values are normal in float32, so that their products keep their digits."""
    exact = np.array([[1.0, -3.0, 7.0]]).T * _SMALLEST[dtype]
    x, one = exact.astype(NUMPY[dtype]), np.ones(1, NUMPY[dtype])
    statistics = {"mean": 0 * one, "invstd": one, "weight": one}
    (output,) = _judged("batch_norm_elemt", input=x, bias=0 * one, **statistics)
    sums = {"sum_dy": 0 * one, "sum_dy_xmu": 0 * one, "counter": np.array([3], np.int32)}
    (gradient,) = _judged("batch_norm_elemt_backward", grad_out=x, input=0 * x, **statistics, **sums)
    if dtype == F16:
        np.testing.assert_array_equal(output.astype(np.float64), exact)
        np.testing.assert_array_equal(gradient.astype(np.float64), exact)


@pytest.mark.parametrize("counter", [[0], [0, 0], [], [3, -3]])
def test_a_counter_that_sums_to_zero_divides_by_it(backend: str, counter: list[int]) -> None:
    x, one = np.ones((1, 3, 1), np.float32), np.ones(3, np.float32)
    channel = {"mean": 0 * one, "invstd": one, "weight": None, "sum_dy": _f32(0, 2, -2)}
    for data, sum_dy_xmu in ((0 * x, 0 * one), (x, _f32(1, 1, -1))):
        (gradient,) = _judged(
            "batch_norm_elemt_backward",
            grad_out=x, input=data, **channel, sum_dy_xmu=sum_dy_xmu, counter=np.array(counter, np.int32),
        )  # fmt: skip
        _assert_finite(gradient, False, False, False)


def test_counts_that_sum_to_zero_or_one(backend: str) -> None:
    # No counts: S = 0, so S/(n − 1) = 0/−1; one count: S/0.
    for count, finite in ((0, (False, False, True)), (1, (True, True, False))):
        results = _judged(
            "batch_norm_gather_stats_with_counts",
            input=np.zeros((1, 1), np.float32), mean=_f32(2)[None], invstd=_f32(1)[None], running_mean=_f32(1),
            running_var=_f32(1), momentum=1.0, eps=0.0, counts=np.array([count], np.int32),
        )  # fmt: skip
        _assert_finite(np.stack([results[0], results[1], results[3]]), *finite)


def test_statistics_of_nothing_are_not_finite(backend: str) -> None:
    for statistic in _judged("batch_norm_stats", input=np.zeros((0, 2, 3), np.float32)):
        _assert_finite(statistic, False, False)


def test_a_variance_of_zero_without_eps(backend: str) -> None:
    output, mean, rstd = _judged("layer_norm", input=np.full((1, 3), 5, np.float32), normalized_shape=[3], eps=0.0)
    assert float(mean[0, 0]) == 5.0
    _assert_finite(rstd, False)
    _assert_finite(output, False, False, False)


def test_many_rows_do_not_make_the_sums_worse(backend: str) -> None:
    """A float32 running sum of 2^18 tenths would be off by hundreds of ulps; of ones and a large one, by all."""
    _judged("layer_norm_backward", **_columns(np.full((2**18, 1), 0.1, np.float32)))


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
@pytest.mark.parametrize("dtype", FLOATS)
def test_any_nan_in_a_parameter_gives_no_finite_result(backend: str, dtype: str, bits: int) -> None:
    """Rounded to bfloat16 by adding half a step, NaNs with a payload would become finite."""
    x = np.random.default_rng(0).normal(size=(2, 64, 33)).astype(NUMPY[dtype])
    one, odd = np.ones(64, np.float32), np.ones(64, np.float32)
    odd[3:4].view(np.uint32)[:] = bits
    for weight, bias in ((one, odd), (odd, one)):
        results = [
            normgrad.layer_norm(np.moveaxis(x, 1, 2), [64], weight, bias)[0][..., 3],
            normgrad.group_norm(x, weight, bias, 2, 64, 33, 4)[0][:, 3],
            normgrad.batch_norm_elemt(x, weight, bias, one, one)[:, 3],
        ]
        assert not any(np.isfinite(result.astype(np.float32)).any() for result in results)


@pytest.mark.parametrize("columns", [8, 48, 1000])
@pytest.mark.parametrize(("gradient", "weight"), [(3e38, 1e-40), (3e38, 1e-36), (1e37, 1e-35)])
def test_huge_gradients_with_tiny_weights_are_finite(
    backend: str, gradient: float, weight: float, columns: int
) -> None:
    """Only their product is in range: a sum of the gradients alone would overflow."""
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((2, columns)).astype(np.float32)
    _, mean, rstd = normgrad.layer_norm(x, [columns])
    (grad_input,) = _judged(
        "layer_norm_backward",
        grad_out=(gradient * rng.choice([-1, 1], x.shape)).astype(np.float32),
        input=x,
        normalized_shape=[columns],
        mean=mean,
        rstd=rstd,
        weight=(weight * rng.standard_normal(columns)).astype(np.float32),
        output_mask=(True, False, False),
    )
    assert np.isfinite(grad_input).all()
