"""The decisions where other documents are silent or wrong: one test each, in the order of the contract."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import normgrad
from normgrad import ContractError, Product
from normgrad.testing import compare, oracle, terms
from support.dtypes import BF16, F16, FLOATS, NUMPY

_rng = np.random.default_rng(8)
_X = _rng.normal(1.0, 2.0, (4, 3, 5)).astype(np.float32)
_DY = _rng.normal(0.5, 1.0, (4, 3, 5)).astype(np.float32)
_WEIGHT = np.array([0.5, -2.0, 3.0], np.float32)


def _batch_norm_arguments() -> tuple[np.ndarray, ...]:
    """A whole batch's statistics and sums, as float32."""
    mean, invstd = normgrad.batch_norm_stats(_X)
    sum_dy, sum_dy_xmu, _, _ = normgrad.batch_norm_reduce_backward(_DY, _X, mean, invstd, _WEIGHT)
    return _DY, _X, mean, invstd, _WEIGHT, sum_dy, sum_dy_xmu


def _batch_norm_gradient() -> np.ndarray:
    """By autograd, in float64."""
    leaf = torch.tensor(_X, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor(_WEIGHT, dtype=torch.float64)
    torch.nn.functional.batch_norm(leaf, None, None, weight, training=True, eps=1e-5).backward(torch.tensor(_DY))
    assert leaf.grad is not None
    return leaf.grad.numpy()


def _is_gradient(got: np.ndarray, expected: np.ndarray) -> bool:
    # The statistics are rounded to float32 on the way, hence an error of a few units of the largest value.
    return bool(np.abs(got - expected).max() <= 32 * 2.0**-24 * np.abs(expected).max())


def test_batch_norm_elemt_backward_is_the_true_gradient(backend: str) -> None:
    dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu = _batch_norm_arguments()
    got = normgrad.batch_norm_elemt_backward(*_batch_norm_arguments(), np.array([20], np.int32))
    assert _is_gradient(got, _batch_norm_gradient())
    c = (slice(None), None)
    outside = dy - (sum_dy[c] / 20 + (x - mean[c]) * invstd[c] ** 2 * sum_dy_xmu[c] / 20) * (invstd * weight)[c]
    assert not _is_gradient(outside, _batch_norm_gradient())


@pytest.mark.parametrize("counter", [[20], [5, 15], [1, 2, 3, 4, 10], [[12, 8], [0, 0]]])
def test_the_counter_counts_by_its_sum(backend: str, counter: list[int]) -> None:
    got = normgrad.batch_norm_elemt_backward(*_batch_norm_arguments(), np.array(counter, np.int32))
    assert _is_gradient(got, _batch_norm_gradient())


def test_sum_dy_and_sum_dy_xmu_are_sums(backend: str) -> None:
    *rest, sum_dy, sum_dy_xmu = _batch_norm_arguments()
    counter = np.array([20], np.int32)
    assert _is_gradient(normgrad.batch_norm_elemt_backward(*rest, sum_dy, sum_dy_xmu, counter), _batch_norm_gradient())
    averages = normgrad.batch_norm_elemt_backward(*rest, sum_dy / 20, sum_dy_xmu / 20, counter)
    assert not _is_gradient(averages, _batch_norm_gradient())


def test_group_norm_backward_is_the_true_gradient(backend: str) -> None:
    x, dy = (_rng.normal(3.0, 2.0, (2, 6, 5)).astype(np.float32) for _ in range(2))
    weight = _rng.normal(1, 1, 6).astype(np.float32)
    _, mean, rstd = normgrad.group_norm(x, weight, None, 2, 6, 5, 3)
    got, _, _ = normgrad.group_norm_backward(dy, x, mean, rstd, weight, 2, 6, 5, 3)
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(weight, dtype=torch.float64)
    torch.nn.functional.group_norm(leaf, 3, scale, eps=1e-5).backward(torch.tensor(dy))
    assert leaf.grad is not None
    assert _is_gradient(got, leaf.grad.numpy())


@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 6, 1), (1, 2, 1, 3, 1, 1, 1, 1)])
def test_grad_bias_of_group_norm_has_the_weights_shape(backend: str, shape: tuple[int, ...]) -> None:
    x = np.ones((2, 6, 5), np.float32)
    statistics = np.ones((2, 3), np.float32)
    _, grad_weight, grad_bias = normgrad.group_norm_backward(
        x, x, statistics, statistics, np.ones(shape, np.float32), 2, 6, 5, 3
    )
    assert grad_weight.shape == grad_bias.shape == shape
    without = normgrad.group_norm_backward(x, x, statistics, statistics, None, 2, 6, 5, 3)
    assert without[1].shape == without[2].shape == (6,)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("rows", "columns"), [(0, 4), (3, 0), (0, 0)])
def test_layer_norm_takes_empty_tensors(rows: int, columns: int) -> None:
    x, statistics = np.ones((rows, columns), np.float32), np.ones((rows, 1), np.float32)
    grad_input, grad_weight, grad_bias = normgrad.layer_norm_backward(x, x, [columns], statistics, statistics)
    assert grad_input.shape == (rows, columns)
    np.testing.assert_array_equal(grad_weight, np.zeros(columns))
    np.testing.assert_array_equal(grad_bias, np.zeros(columns))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("N", "HxW"), [(0, 5), (2, 0), (0, 0), (0, 2**40)])
def test_group_norm_takes_empty_tensors(N: int, HxW: int) -> None:
    x, statistics = np.ones((N, 6, HxW if N else 0), np.float32), np.ones((N, 3), np.float32)
    grad_input, grad_weight, grad_bias = normgrad.group_norm_backward(x, x, statistics, statistics, None, N, 6, HxW, 3)
    assert grad_input.shape == x.shape
    np.testing.assert_array_equal(grad_weight, np.zeros(6))
    np.testing.assert_array_equal(grad_bias, np.zeros(6))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", [(0, 6, 5), (2, 6, 0), (0, 6)])
@pytest.mark.parametrize("flags", [(True, True, True), (False, True, False), (True, False, True)])
def test_the_sums_of_batch_norm_over_nothing_are_0(shape: tuple[int, ...], flags: tuple[bool, bool, bool]) -> None:
    """Also grad_weight, though the invstd of no data is NaN."""
    x = np.ones(shape, np.float32)
    mean, invstd = normgrad.batch_norm_stats(x)
    assert np.isnan(invstd).all()
    for result in normgrad.batch_norm_reduce_backward(x, x, mean, invstd, None, *flags):
        if result is not None:
            np.testing.assert_array_equal(result, np.zeros(6))
    exact = oracle.batch_norm_reduce_backward(x, x, mean, invstd, None)
    np.testing.assert_array_equal(exact, np.zeros((4, 6)))


def test_a_short_workspace_and_a_spent_plan_are_refused(backend: str) -> None:
    x, statistics, out = np.ones((3, 4), np.float32), np.ones((3, 1), np.float32), np.zeros((3, 4), np.float32)
    plan = normgrad.layer_norm_backward.plan(
        x, x, [4], statistics, statistics, output_mask=(True, False, False), out=(out, None, None)
    )
    if plan.workspace_size:
        with pytest.raises(ContractError, match="workspace") as caught:
            plan.run(np.empty(plan.workspace_size - 1, np.uint8))
        assert caught.value.status == 161002
    plan.run()
    with pytest.raises(ContractError, match="runs once") as caught:
        plan.run()
    assert caught.value.status == 161002


def test_batch_norm_elemt_backward_in_float16_computes_wider(backend: str) -> None:
    """Intermediate values far above float16's largest number, 65504, and a result that is small."""
    dy, x = np.full((1, 1, 3), 1, np.float16), np.full((1, 1, 3), 300, np.float16)
    one = np.ones(1, np.float16)
    arguments = (dy, x, 0 * one, one, one, 0 * one, 1000 * one, np.array([60000, 60000], np.float16))
    got = normgrad.batch_norm_elemt_backward(*arguments)
    assert got.dtype == np.float16
    assert compare(got, np.full((1, 1, 3), 1 - 300 * 1000 / 120000), terms.batch_norm_elemt_backward(*arguments))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_16_bit_weight_beside_float32_statistics(backend: str, dtype: str) -> None:
    x, weight = np.ones((2, 6, 5), NUMPY[dtype]), np.ones(6, NUMPY[dtype])
    statistics = np.ones((2, 3), np.float32)
    arguments = (x, x, statistics, statistics, weight, 2, 6, 5, 3)
    _, grad_weight, grad_bias = normgrad.group_norm_backward(*arguments)
    assert grad_weight.dtype == grad_bias.dtype == NUMPY[dtype]
    with pytest.raises(ContractError, match=r"weight is .*mean's dtype") as caught:
        normgrad.group_norm_backward(*arguments, product=Product.ASCEND_950)
    assert (caught.value.status, caught.value.parameter) == (161002, "weight")


def test_float64_is_refused(backend: str) -> None:
    x, statistics = np.ones((3, 4)), np.ones((3, 1))
    with pytest.raises(ContractError, match="float64") as caught:
        normgrad.layer_norm_backward(x, x, [4], statistics, statistics)
    assert (caught.value.status, caught.value.parameter) == (161002, "grad_out")
    assert all(dtype in str(caught.value) for dtype in FLOATS)
