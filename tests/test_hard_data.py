"""Data on which short ways in float32 are not good enough: outliers, numbers at the mean, factors out of range."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import normgrad
from normgrad.testing import compare, oracle, terms
from normgrad.testing.expected import as_tuple
from support.arena import as_float64
from support.dtypes import FLOATS, NUMPY


def _check(operator: str, **arguments: Any) -> None:
    """All results of a call within the bound."""
    results = getattr(normgrad, operator)(**arguments)
    wide = {name: as_float64(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
    exact, magnitudes = getattr(oracle, operator)(**wide), getattr(terms, operator)(**wide)
    for result, values, magnitude in zip(*map(as_tuple, (results, exact, magnitudes)), strict=True):
        report = compare(result, values, magnitude)
        assert report, report.text


def _in_order(data: np.ndarray, order: str) -> np.ndarray:
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(data, 1, -1)), -1, 1) if order == "columns" else data


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("places", [49, 196, 784, 3136])
def test_statistics_with_outliers(backend: str, dtype: str, order: str, places: int) -> None:
    """The first numbers say nothing about the others, and the others' mean is near 0."""
    generator = np.random.default_rng(places)
    data = generator.normal(size=(3, 96, places))
    data *= np.where(generator.random(data.shape) < 0.002, 1000, 1)
    data[0, ::3, 0] = 3000
    data[0, 1::3, :3] = -700
    data[1, 2::5, :32] = 90
    data[2, 3::7, ::128] = 2000
    data[:, 4::11] += 500
    _check("batch_norm_stats", input=_in_order(data.astype(NUMPY[dtype]), order), eps=1e-5)


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_statistics_of_constants_behind_a_beginning_about_zero(backend: str, dtype: str, order: str) -> None:
    """Squares about 0 are many times those about the mean, and each of them is rounded the same way."""
    generator = np.random.default_rng(7)
    data = np.broadcast_to(generator.uniform(1, 2, size=(1, 96, 1)), (1, 96, 2048)).copy()
    data[..., :32] = 1e-3 * generator.normal(size=(1, 96, 32))
    _check("batch_norm_stats", input=_in_order(data.astype(NUMPY[dtype]), order), eps=1e-5)


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("channels", "places", "group"), [(6, 15, 3), (1, 49, 1), (32, 49, 4), (32, 196, 32), (2, 3136, 2)]
)
def test_group_norm_of_numbers_at_the_mean(
    backend: str, dtype: str, order: str, channels: int, places: int, group: int
) -> None:
    """The result is the bias and nothing else, however large the weight."""
    generator = np.random.default_rng(channels)
    data = np.round(3 * generator.normal(size=(40, channels, places)))
    data -= data.reshape(40, group, -1).sum(-1).repeat(channels // group, axis=1)[..., None] * (np.arange(places) == 0)
    data += np.arange(-20, 20)[:, None, None]
    weight, bias = np.full(channels, 1e14, np.float32), generator.normal(size=channels).astype(np.float32)
    sizes = {"N": 40, "C": channels, "HxW": places, "group": group}
    _check(
        "group_norm", input=_in_order(data.astype(NUMPY[dtype]), order), weight=weight, bias=bias, **sizes, eps=1e-12
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [3, 49, 100, 127, 333, 1000, 70001])
def test_layer_norm_of_numbers_at_the_mean(backend: str, dtype: str, columns: int) -> None:
    generator = np.random.default_rng(columns)
    data = np.round(3 * generator.normal(size=(20, columns)))
    data[:, -1] -= data.sum(1)
    data += np.arange(-10, 10)[:, None]
    keep = np.abs(data[:, -1]) < 256  # bfloat16 has the others not exactly
    weight, bias = np.full(columns, 1e14, np.float32), generator.normal(size=columns).astype(np.float32)
    rows = data[keep].astype(NUMPY[dtype])
    _check("layer_norm", input=rows, normalized_shape=[columns], weight=weight, bias=bias, eps=1e-12)


@pytest.mark.parametrize("columns", [8, 100, 1000, 300000])
@pytest.mark.parametrize(
    ("data_size", "gradient_size", "weight_size"),
    [
        (1e15, 1.0, 1e-20),
        (1e15, 1e-20, 1.0),
        (1e17, 1e-10, 1e-3),
        (1e-7, 1e26, 1.0),
        (1e-8, 1.0, 1e21),
        (1e-6, 1e20, 10.0),
    ],
)
def test_layer_norm_backward_of_large_and_small_factors(
    backend: str, data_size: float, gradient_size: float, weight_size: float, columns: int
) -> None:
    """rstd² times a sum is out of float32's range where no term of the formula is."""
    generator = np.random.default_rng(columns)
    draw = lambda *shape: generator.normal(size=shape).astype(np.float32)  # noqa: E731
    data = draw(3, columns) * np.float32(data_size)
    wide = data.astype(np.float64)
    mean, rstd = (v.astype(np.float32) for v in (wide.mean(1, keepdims=True), 1 / wide.std(1, keepdims=True)))
    gradient, weight = draw(3, columns) * np.float32(gradient_size), draw(columns) * np.float32(weight_size)
    _check(
        "layer_norm_backward",
        grad_out=gradient, input=data, normalized_shape=[columns], mean=mean, rstd=rstd, weight=weight, bias=None,
    )  # fmt: skip


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("samples", [4, 200])
def test_weights_near_the_largest_number(backend: str, order: str, samples: int) -> None:
    """rstd·weight overflows float32 where no term of the formula does: the data is tiny."""
    x = _in_order((np.random.default_rng(0).normal(size=(samples, 40, 9)) * 1e-10).astype(np.float32), order)
    zero, sums, invstd = np.zeros(40, np.float32), np.full(40, 1e-10, np.float32), np.full(40, 1.5, np.float32)
    weight, eps, groups = np.full(40, 3e38, np.float32), 0.2, {"N": samples, "C": 40, "HxW": 9, "group": 4}
    _check("batch_norm_elemt", input=x, weight=weight, bias=None, mean=zero, invstd=invstd)
    _check(
        "batch_norm_elemt_backward", grad_out=x, input=x, mean=zero, invstd=invstd, weight=weight, sum_dy=zero,
        sum_dy_xmu=sums, counter=np.array([9], np.int32),
    )  # fmt: skip
    _check("group_norm", input=x, weight=weight, bias=None, **groups, eps=eps)
    mean, rstd = np.zeros((samples, 4), np.float32), np.full((samples, 4), 1.5, np.float32)
    _check("group_norm_backward", grad_out=x, input=x, mean=mean, rstd=rstd, weight=weight, **groups)
    _check("layer_norm", input=x[..., 0], normalized_shape=[40], weight=weight, bias=None, eps=eps)
    mean, rstd = np.zeros((samples, 1), np.float32), np.full((samples, 1), 1.5, np.float32)
    _check("layer_norm_backward", grad_out=x[..., 0], input=x[..., 0], normalized_shape=[40], mean=mean, rstd=rstd,
           weight=weight)  # fmt: skip


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("weight_size", [3e-44, 1e-40, 1e-38])
@pytest.mark.parametrize("invstd_size", [1e20, 1e30, 1e38])
def test_subnormal_weights_with_a_large_invstd(
    backend: str, order: str, weight_size: float, invstd_size: float
) -> None:
    """A subnormal weight has few bits, but they are exact: invstd·weight is an ordinary number."""
    generator = np.random.default_rng(0)
    x = _in_order(generator.normal(size=(4, 40, 9)).astype(np.float32), order)
    mean, weight = (generator.normal(size=40).astype(np.float32) for _ in range(2))
    weight *= np.float32(weight_size)
    invstd, sums = np.full(40, invstd_size, np.float32), np.full(40, invstd_size**-2, np.float32)
    _check("batch_norm_elemt", input=x, weight=weight, bias=None, mean=mean, invstd=invstd)
    _check(
        "batch_norm_elemt_backward", grad_out=x, input=x, mean=mean, invstd=invstd, weight=weight, sum_dy=mean,
        sum_dy_xmu=sums, counter=np.array([9], np.int32),
    )  # fmt: skip


@pytest.mark.parametrize("order", ["rows", "columns"])
def test_large_terms_that_cancel_overflow_only_where_the_result_does(backend: str, order: str) -> None:
    """In float16, whose range is short: gradients are all alike, and what is left of them is small."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(16, 40, 33)).astype(np.float16)
    mean, invstd = (v.astype(np.float32) for v in oracle.batch_norm_stats(x.astype(np.float64), 1e-5))
    gradient = np.full(x.shape, 1e4, np.float16)
    weight = (generator.normal(size=40) * 1e12).astype(np.float32)
    count = np.array([x.size // 40], np.int32)
    _check(
        "batch_norm_elemt_backward",
        grad_out=_in_order(gradient, order), input=_in_order(x, order), mean=mean, invstd=invstd, weight=weight,
        sum_dy=np.full(40, 1e4 * count[0], np.float32), sum_dy_xmu=np.full(40, 1e-10 * count[0], np.float32),
        counter=count,
    )  # fmt: skip


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("shape", [(7, 3), (5, 40, 50), (3, 16, 700)])
def test_invstd_of_tiny_elements_without_eps_is_finite(backend: str, order: str, shape: tuple[int, ...]) -> None:
    """Their squares are below float32's range, and sums of them about a shift may come out negative."""
    data = (np.random.default_rng(5).normal(size=shape) * 1e-25).astype(np.float32)
    _, invstd = normgrad.batch_norm_stats(_in_order(data, order), 0.0)
    assert np.isfinite(invstd).all()


@pytest.mark.parametrize("order", ["rows", "columns"])
def test_statistics_of_large_constant_channels(backend: str, order: str) -> None:
    values = np.float32([-1.9012227e15, -1.2895378e15, -1.841735e15])
    mean, invstd = normgrad.batch_norm_stats(_in_order(np.broadcast_to(values, (7, 3)).copy(), order))
    assert (mean == values).all()
    np.testing.assert_allclose(invstd, 1e-5**-0.5, rtol=1e-6)
