"""GroupNorm's gradients where rows are short, channels are dead, or numbers lie at the ends of their range."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import normgrad
from normgrad.operators import OPERATORS
from normgrad.testing.comparison import measure
from normgrad.testing.expected import checked, exact_results, magnitudes
from support.dtypes import BF16, FLOATS, NUMPY

_OPERATOR = OPERATORS["group_norm_backward"]

# Groups of one vector and of parts of vectors; rows of one vector and less, of several and a part, and of many. Of the
# last three, many samples whose groups are small: several groups, or all, are summed together on a CPU.
SHAPES = [
    *[((2, 64, 7, 7), 1), ((3, 70, 7, 7), 7), ((2, 24, 5, 5), 3), ((2, 40, 9, 5), 4), ((2, 37, 12, 12), 1)],
    *[((197, 30, 3, 3), 30), ((130, 33, 1, 5), 11), ((5, 42, 13, 13), 42)],
]


def _arguments(shape: tuple[int, ...], groups: int, dtype: str, channels_last: bool) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    samples, channels, *places = shape
    order = (0, 2, 3, 1) if channels_last else (0, 1, 2, 3)
    laid = [np.ascontiguousarray(rng.standard_normal(shape).transpose(order)).astype(NUMPY[dtype]) for _ in range(2)]
    grad_out, data = (values.transpose(np.argsort(order)) for values in laid)
    statistics = {name: rng.uniform(0.5, 2.0, (samples, groups)).astype(np.float32) for name in ("mean", "rstd")}
    weight = rng.uniform(0.5, 2.0, channels).astype(np.float32)
    sizes = {"N": samples, "C": channels, "HxW": math.prod(places), "group": groups}
    return {"grad_out": grad_out, "input": data, **statistics, "weight": weight, **sizes}


def _results(arguments: dict[str, Any], **options: Any) -> dict[str, np.ndarray]:
    outputs = _OPERATOR(**arguments, **options)
    return dict(zip(_OPERATOR.signature.output_names, outputs, strict=True))


def _assert_right(arguments: dict[str, Any], **options: Any) -> None:
    call = checked(_OPERATOR, arguments, None)
    exact, sizes = exact_results(_OPERATOR, call), magnitudes(_OPERATOR, call)
    for name, result in _results(arguments, **options).items():
        if result is not None:
            expected = exact[name].reshape(result.shape)
            measured = measure(result, expected, sizes[name].reshaped(result.shape))
            assert np.max(measured.share_of_bound) <= 1, name


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> tuple[tuple[int, ...], int]:
    found: tuple[tuple[int, ...], int] = request.param
    return found


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
class TestGradients:
    def test_of_plain_data(self, backend: str, shape: Any, dtype: str, channels_last: bool) -> None:
        _assert_right(_arguments(*shape, dtype, channels_last))

    def test_of_the_weights_alone(self, backend: str, shape: Any, dtype: str, channels_last: bool) -> None:
        _assert_right(_arguments(*shape, dtype, channels_last), output_mask=(False, True, True))

    def test_of_dead_channels(self, backend: str, shape: Any, dtype: str, channels_last: bool) -> None:
        arguments = _arguments(*shape, dtype, channels_last)
        arguments["grad_out"][:, 1::3] = 0
        _assert_right(arguments)

    def test_that_cancel_in_a_channel(self, backend: str, shape: Any, dtype: str, channels_last: bool) -> None:
        """A sum of 0 says nothing about its terms, which may be too small for float32."""
        arguments = _arguments(*shape, dtype, channels_last)
        tiny = np.array(2.0**-10 if dtype == "float16" else 2.0**-120).astype(NUMPY[dtype])
        arguments["grad_out"][:, 2] = tiny
        arguments["grad_out"][:, 2, ::2] = -tiny
        _assert_right(arguments)

    def test_of_small_numbers(self, backend: str, shape: Any, dtype: str, channels_last: bool) -> None:
        """Results and products at the lower end of float32's range."""
        arguments = _arguments(*shape, dtype, channels_last)
        small = np.array(2.0**-20 if dtype == "float16" else 2.0**-128).astype(NUMPY[dtype])
        arguments["grad_out"][...] = (arguments["grad_out"] * small).astype(NUMPY[dtype])
        _assert_right(arguments)

    def test_with_weights_out_of_range(self, backend: str, shape: Any, dtype: str, channels_last: bool) -> None:
        arguments = _arguments(*shape, dtype, channels_last)
        arguments["weight"][[0, 3, 20]] = 2.0**-140, 0.0, -(2.0**-130)
        _assert_right(arguments)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_weight_that_is_no_number_spoils_its_group_alone(backend: str, value: float, channels_last: bool) -> None:
    arguments = _arguments((2, 64, 7, 7), 4, "float32", channels_last)
    expected = _results(arguments)
    arguments["weight"][20] = value
    results = _results(arguments)
    spoilt = ~np.isfinite(results["grad_input"]).all(axis=(0, 2, 3))
    np.testing.assert_array_equal(spoilt, (np.arange(64) // 16) == 1)
    np.testing.assert_allclose(
        results["grad_input"][:, ~spoilt], expected["grad_input"][:, ~spoilt], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(results["grad_weight"], expected["grad_weight"], rtol=1e-5)


@pytest.mark.parametrize("channels_last", [False, True])
def test_an_infinite_rstd_spoils_its_group_alone(backend: str, channels_last: bool) -> None:
    arguments = _arguments((2, 64, 7, 7), 4, "float32", channels_last)
    arguments["rstd"][1, 2] = np.inf
    results = _results(arguments)
    spoilt = ~np.isfinite(results["grad_input"]).all(axis=(2, 3))
    np.testing.assert_array_equal(spoilt, np.arange(64) // 16 == np.array([[9], [2]]))
    np.testing.assert_array_equal(np.isfinite(results["grad_weight"]), np.arange(64) // 16 != 2)
    assert np.isfinite(results["grad_bias"]).all()


@pytest.mark.parametrize("channels_last", [False, True])
def test_results_on_top_of_an_input_are_the_same_bits(backend: str, channels_last: bool) -> None:
    """A subnormal result is made again by the exact way, which must not read what was stored before."""
    arguments = _arguments((2, 64, 7, 7), 1, BF16, channels_last)
    arguments["grad_out"][0] = (arguments["grad_out"][0] * np.float32(2.0**-126)).astype(NUMPY[BF16])
    expected = _results(arguments)["grad_input"].astype(np.float32)
    grad_weight, grad_bias = (np.empty(64, np.float32) for _ in range(2))
    normgrad.group_norm_backward(**arguments, out=(arguments["grad_out"], grad_weight, grad_bias))
    np.testing.assert_array_equal(arguments["grad_out"].astype(np.float32), expected)
