"""How much of the bound float32 results take on the backend ``cpu``: as much as the roundings made, no more.

A rounding takes at most 1/9 of the bound (½ ulp of the ½ ulp + 8·2⁻²⁴·T, where all of T is one term), and the last one
cannot be spared. PyTorch's kernels have three or four. Gradients have a budget of two. The outputs of GroupNorm and
BatchNorm have one of three: of x - mean, of rstd*weight and of the result.
"""

from __future__ import annotations

import numpy as np
import pytest

from normgrad.operators import OPERATORS
from normgrad.testing.cases import make_cases
from normgrad.testing.comparison import measure
from normgrad.testing.expected import as_tuple, checked, exact_results, magnitudes
from support.dtypes import BF16, F16, NUMPY

ONE = 1 / 9 + 0.001
TWO = 2 / 9 + 0.005  # the terms that are small beside the others are rounded too
THREE = 3 / 9 + 0.005

BUDGETS = {
    ("layer_norm_backward", "long-rows"): {"grad_input": TWO, "grad_weight": ONE, "grad_bias": ONE},
    ("layer_norm_backward", "normal"): {"grad_input": TWO, "grad_weight": ONE, "grad_bias": ONE},
    ("group_norm_backward", "long-rows"): {"grad_input": TWO},
    ("group_norm", "long-rows"): {"output": THREE, "mean": ONE, "rstd": ONE},
    ("group_norm", "offset"): {"output": THREE, "mean": ONE, "rstd": ONE},
    ("batch_norm_elemt", "normal"): {"output": THREE},
    ("batch_norm_reduce_backward", "normal"): {"sum_dy": ONE, "sum_dy_xmu": ONE, "grad_weight": ONE, "grad_bias": ONE},
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("operator", "kind"), BUDGETS)
def test_errors_are_those_of_few_roundings(
    operator: str, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NORMGRAD_BACKEND", "cpu")
    function = OPERATORS[operator]
    case = next(case for case in make_cases(operator, seed, [kind]) if case.name == f"{kind}-float32")
    call = checked(function, case.arguments, None)
    exact, sizes = exact_results(function, call), magnitudes(function, call)
    results = dict(zip(function.signature.output_names, as_tuple(function(**case.arguments)), strict=True))
    for name, budget in BUDGETS[operator, kind].items():
        measured = measure(
            results[name], exact[name].reshape(results[name].shape), sizes[name].reshaped(results[name].shape)
        )
        assert np.max(measured.share_of_bound) <= budget, name


@pytest.mark.parametrize("seed", range(4))
def test_one_large_number_among_few_is_summed_without_a_rounding(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one term is nearly the whole sum, each rounding of it is seen in full."""
    monkeypatch.setenv("NORMGRAD_BACKEND", "cpu")
    random = np.random.default_rng(seed)
    x, dy = (random.standard_normal((6, 19, 11, 7)).astype(np.float16) for _ in range(2))
    dy[2, :, 3, 5] = 60000 + 32 * random.integers(0, 100, 19)
    mean, invstd = random.standard_normal((2, 19)).astype(np.float32)
    function = OPERATORS["batch_norm_reduce_backward"]
    arguments = {"grad_out": dy, "input": x, "mean": mean, "invstd": invstd, "weight": None}
    call = checked(function, arguments, None)
    exact, sizes = exact_results(function, call), magnitudes(function, call)
    results = dict(zip(function.signature.output_names, function(**arguments), strict=True))
    for name, value in results.items():
        assert np.max(measure(value, exact[name], sizes[name]).share_of_bound) <= ONE, name


@pytest.mark.parametrize(("rows", "columns"), [(64, 16), (64, 40), (80, 3000)])
def test_rows_that_are_lost_one_by_one_are_few(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows too small to change a sum that has begun with 1 would take the whole bound if 15 of them met it in turn."""
    monkeypatch.setenv("NORMGRAD_BACKEND", "cpu")
    grad_out = np.full((rows, columns), 0.99 * 2.0**-24, np.float32)
    grad_out[::16] = 1
    function = OPERATORS["layer_norm_backward"]
    statistics = {"mean": np.zeros((rows, 1), np.float32), "rstd": np.ones((rows, 1), np.float32)}
    arguments = {
        "grad_out": grad_out,
        "input": np.ones_like(grad_out),
        "normalized_shape": (columns,),
        **statistics,
        "weight": np.ones(columns, np.float32),
    }
    call = checked(function, arguments, None)
    exact, sizes = exact_results(function, call), magnitudes(function, call)
    results = dict(zip(function.signature.output_names, function(**arguments), strict=True))
    for name in ("grad_weight", "grad_bias"):
        assert np.max(measure(results[name], exact[name], sizes[name]).share_of_bound) <= 4 / 9, name


@pytest.mark.parametrize(("dtype", "half_step"), [(F16, 2.0**-11), (BF16, 2.0**-8)])
def test_16_bit_weight_gradients_are_rounded_once(
    dtype: str, half_step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum is just above the middle of two elements, and float32 would round it to the middle."""
    monkeypatch.setenv("NORMGRAD_BACKEND", "cpu")
    grad_out = np.array([[1], [half_step], [2.0**-24]]).astype(NUMPY[dtype])
    statistics = {"mean": np.zeros((3, 1), np.float32), "rstd": np.ones((3, 1), np.float32)}
    _, grad_weight, grad_bias = OPERATORS["layer_norm_backward"](
        grad_out=grad_out, input=np.ones_like(grad_out), normalized_shape=(1,), weight=None, **statistics
    )
    assert float(grad_weight[0]) == float(grad_bias[0]) == 1 + 2 * half_step
