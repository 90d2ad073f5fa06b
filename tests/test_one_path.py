"""The kernels of the CPU compute all values by the same arithmetic.

A power of two takes part in no rounding: where gradients or inputs of another scale change a bit of the results other
than the exponents, another path was taken. Nor may the values of other rows or samples change a bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from normgrad.bench.cases import CHANNELS_LAST, CONTIGUOUS, Case
from normgrad.bench.workload import workload
from normgrad.operators import OPERATORS
from normgrad.testing.expected import as_tuple
from support.dtypes import BF16, F16, F32, FLOATS, NUMPY

# Parts of vectors and whole ones, one position and many; the last of each is shared by several threads.
LAYER_NORM = [(7, 37), (5, 1), (20, 16), (97, 771)]
GROUP_NORM = [((3, 6, 5, 7), 3), ((4, 33, 1, 1), 11), ((2, 64, 7, 7), 2), ((3, 40, 33, 17), 5)]
BATCH_NORM = [(3, 5, 5, 7), (41, 70, 1, 1), (2, 3, 15, 20), (7, 33, 15, 20)]

GRADIENTS = ["layer_norm_backward", "group_norm_backward", "batch_norm_elemt_backward", "batch_norm_reduce_backward"]
SCALED = ("grad_out", "sum_dy", "sum_dy_xmu")


def _cases(operator: str, dtype: str) -> Iterator[Case]:
    if operator.startswith("layer_norm"):
        yield from (Case(operator, shape, dtype) for shape in LAYER_NORM)
        return
    shapes: Any = GROUP_NORM if operator.startswith("group_norm") else [(shape, 0) for shape in BATCH_NORM]
    yield from (
        Case(operator, shape, dtype, layout, group) for shape, group in shapes for layout in (CONTIGUOUS, CHANNELS_LAST)
    )


def _arguments(case: Case) -> dict[str, Any]:
    """Return normal data without elements so small that another scale makes them subnormal."""
    arguments = workload(case).arguments
    for name in ("grad_out", "input"):
        if name in arguments:
            arguments[name][np.abs(arguments[name].astype(np.float32)) < 0.01] = 0
    return arguments


def _times(array: np.ndarray, exponent: int) -> np.ndarray:
    return np.asarray((array.astype(np.float64) * 2.0**exponent).astype(array.dtype))


def _results(case: Case, arguments: dict[str, Any]) -> dict[str, np.ndarray]:
    function = OPERATORS[case.operator]
    return dict(zip(function.signature.output_names, as_tuple(function(**arguments)), strict=True))


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMGRAD_BACKEND", "cpu")


@pytest.mark.parametrize(("dtype", "exponent"), [(F32, -30), (F32, -90), (F32, 80), (BF16, -90), (BF16, 80), (F16, -4)])
@pytest.mark.parametrize("operator", GRADIENTS)
def test_gradients_of_another_scale_have_the_same_bits(operator: str, dtype: str, exponent: int) -> None:
    for case in _cases(operator, dtype):
        arguments = _arguments(case)
        scaled = {name: _times(value, exponent) if name in SCALED else value for name, value in arguments.items()}
        others = _results(case, scaled)
        for name, result in _results(case, arguments).items():
            if result.dtype != NUMPY[F16]:  # whose small results are subnormal at the other scale
                assert np.array_equal(others[name].astype(np.float64), result.astype(np.float64) * 2.0**exponent), case


@pytest.mark.parametrize(("dtype", "exponent"), [(F32, -40), (F32, 20), (BF16, -40), (BF16, 20), (F16, -4)])
@pytest.mark.parametrize("operator", ["layer_norm", "group_norm", "batch_norm_stats"])
def test_inputs_of_another_scale_have_the_same_bits(operator: str, dtype: str, exponent: int) -> None:
    """Of x·2^k with eps·4^k the output is that of x, the mean 2^k and rstd 2^-k times that of x."""
    factors = {"output": 1.0, "mean": 2.0**exponent, "rstd": 2.0**-exponent, "invstd": 2.0**-exponent}
    for case in _cases(operator, dtype):
        arguments = {**_arguments(case), "eps": 1e-5}
        scaled = {**arguments, "input": _times(arguments["input"], exponent), "eps": 1e-5 * 4.0**exponent}
        others = _results(case, scaled)
        for name, result in _results(case, arguments).items():
            assert np.array_equal(others[name].astype(np.float64), result.astype(np.float64) * factors[name]), case


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("operator", ["layer_norm_backward", "layer_norm", "group_norm_backward", "group_norm"])
def test_values_of_other_rows_change_no_bit(operator: str, dtype: str) -> None:
    for case in _cases(operator, dtype):
        arguments = _arguments(case)
        first = next(iter(_results(case, arguments).values())).copy()
        for value in (np.nan, np.inf, 0.0, 1e-40, 6e4):
            for name in ("grad_out", "input"):
                if name in arguments:
                    arguments[name][1::2] = value
            result = next(iter(_results(case, arguments).values()))
            assert np.array_equal(result[::2].astype(np.float32), first[::2].astype(np.float32)), case
