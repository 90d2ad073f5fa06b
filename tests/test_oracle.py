"""The oracle is right: against autograd in float64, and against finite differences, which know no formula."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from normgrad.testing import oracle

LAYER_SHAPES = [((4, 6), 1), ((2, 3, 5), 1), ((2, 3, 5), 2), ((2, 3, 5), 3), ((7,), 1), ((2, 1, 2, 1, 2, 1, 2, 3), 4)]
GROUP_SHAPES = [(2, 6, 5, 3), (3, 4, 1, 4), (1, 4, 9, 1), (2, 6, 7, 2), (4, 1, 3, 1)]
EPS = 1e-5


def _random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(0.3, 1.7, shape)


def _close(actual: np.ndarray | None, expected: torch.Tensor | np.ndarray) -> None:
    assert actual is not None
    np.testing.assert_allclose(actual, np.asarray(expected), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("shape", "count"), LAYER_SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_against_autograd(shape: tuple[int, ...], count: int, affine: bool) -> None:
    normalized = shape[len(shape) - count :]
    x, dy = _random(*shape), _random(*shape, seed=1)
    weight, bias = (_random(*normalized, seed=2), _random(*normalized, seed=3)) if affine else (None, None)
    leaf = torch.tensor(x, requires_grad=True)
    parameters = [None if p is None else torch.tensor(p, requires_grad=True) for p in (weight, bias)]
    y = torch.nn.functional.layer_norm(leaf, normalized, *parameters, eps=EPS)
    y.backward(torch.tensor(dy))

    output, mean, rstd = oracle.layer_norm(x, normalized, weight, bias, EPS)
    grad_input, grad_weight, grad_bias = oracle.layer_norm_backward(dy, x, normalized, mean, rstd, weight, bias)
    _close(output, y.detach())
    assert leaf.grad is not None
    _close(grad_input, leaf.grad)
    if parameters[0] is not None and parameters[1] is not None:
        _close(grad_weight, parameters[0].grad)
        _close(grad_bias, parameters[1].grad)


@pytest.mark.parametrize(("N", "C", "HxW", "group"), GROUP_SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_against_autograd(N: int, C: int, HxW: int, group: int, affine: bool) -> None:
    x, dy = _random(N, C, HxW), _random(N, C, HxW, seed=1)
    weight, bias = (_random(C, seed=2), _random(C, seed=3)) if affine else (None, None)
    leaf = torch.tensor(x, requires_grad=True)
    parameters = [None if p is None else torch.tensor(p, requires_grad=True) for p in (weight, bias)]
    # Spelled out: PyTorch's own refuses one value per group.
    grouped = leaf.reshape(N, group, -1)
    centred = grouped - grouped.mean(-1, keepdim=True)
    y = (centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + EPS)).reshape(N, C, HxW)
    if parameters[0] is not None and parameters[1] is not None:
        y = y * parameters[0][:, None] + parameters[1][:, None]
    y.backward(torch.tensor(dy))

    output, mean, rstd = oracle.group_norm(x, weight, bias, N, C, HxW, group, EPS)
    grad_input, grad_weight, grad_bias = oracle.group_norm_backward(dy, x, mean, rstd, weight, N, C, HxW, group)
    _close(output, y.detach())
    assert leaf.grad is not None
    _close(grad_input, leaf.grad)
    if parameters[0] is not None and parameters[1] is not None:
        _close(grad_weight, parameters[0].grad)
        _close(grad_bias, parameters[1].grad)


@pytest.mark.parametrize(("N", "C", "HxW", "group"), [(2, 6, 5, 3), (3, 4, 2, 4)])
def test_group_norm_against_pytorchs_own(N: int, C: int, HxW: int, group: int) -> None:
    x, dy, weight = _random(N, C, HxW), _random(N, C, HxW, seed=1), _random(C, seed=2)
    leaf, gamma = torch.tensor(x, requires_grad=True), torch.tensor(weight, requires_grad=True)
    torch.nn.functional.group_norm(leaf, group, gamma, eps=EPS).backward(torch.tensor(dy))
    _, mean, rstd = oracle.group_norm(x, weight, None, N, C, HxW, group, EPS)
    grad_input, grad_weight, _ = oracle.group_norm_backward(dy, x, mean, rstd, weight, N, C, HxW, group)
    assert leaf.grad is not None
    assert gamma.grad is not None
    _close(grad_input, leaf.grad)
    _close(grad_weight, gamma.grad)


def _slopes(loss: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
    """The gradient by central differences of fourth order."""
    slopes, step = np.empty_like(at), 1e-3
    for index in np.ndindex(at.shape):

        def moved(steps: int, index: tuple[int, ...] = index) -> float:
            there = at.copy()
            there[index] += steps * step
            return loss(there)

        slopes[index] = (8 * (moved(1) - moved(-1)) - (moved(2) - moved(-2))) / (12 * step)
    return slopes


def test_layer_norm_against_finite_differences() -> None:
    x, dy, weight, bias = _random(3, 4), _random(3, 4, seed=1), _random(4, seed=2), _random(4, seed=3)
    _, mean, rstd = oracle.layer_norm(x, (4,), weight, bias, EPS)
    gradients = oracle.layer_norm_backward(dy, x, (4,), mean, rstd, weight, bias)

    def loss(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> float:
        return float(np.sum(dy * oracle.layer_norm(x, (4,), weight, bias, EPS)[0]))

    numeric = (
        _slopes(lambda v: loss(v, weight, bias), x),
        _slopes(lambda v: loss(x, v, bias), weight),
        _slopes(lambda v: loss(x, weight, v), bias),
    )
    for gradient, slopes in zip(gradients, numeric, strict=True):
        np.testing.assert_allclose(gradient, slopes, rtol=1e-7, atol=1e-8)


def test_group_norm_against_finite_differences() -> None:
    sizes = (2, 4, 3, 2)
    x, dy, weight, bias = _random(2, 4, 3), _random(2, 4, 3, seed=1), _random(4, seed=2), _random(4, seed=3)
    _, mean, rstd = oracle.group_norm(x, weight, bias, *sizes, EPS)
    gradients = oracle.group_norm_backward(dy, x, mean, rstd, weight, *sizes)

    def loss(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> float:
        return float(np.sum(dy * oracle.group_norm(x, weight, bias, *sizes, EPS)[0]))

    numeric = (
        _slopes(lambda v: loss(v, weight, bias), x),
        _slopes(lambda v: loss(x, v, bias), weight),
        _slopes(lambda v: loss(x, weight, v), bias),
    )
    for gradient, slopes in zip(gradients, numeric, strict=True):
        np.testing.assert_allclose(gradient, slopes, rtol=1e-7, atol=1e-8)
