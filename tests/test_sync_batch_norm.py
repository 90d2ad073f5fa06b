"""The steps of synchronised BatchNorm, over ranks of uneven size, against autograd on the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import normgrad
from normgrad.testing import compare, oracle

EPS, MOMENTUM, CHANNELS = 1e-5, 0.1, 3

#: Samples per rank.
SPLITS = [(7,), (2, 5), (1, 4, 3, 2, 6), (3, 0, 4)]
TAILS = [(), (5,), (2, 3), (2, 2, 2)]


@dataclass
class Truth:
    """An ordinary BatchNorm on the whole batch, differentiated by autograd in float64."""

    x: np.ndarray
    dy: np.ndarray
    weight: np.ndarray
    bias: np.ndarray
    y: np.ndarray
    grad_input: np.ndarray
    grad_weight: np.ndarray
    grad_bias: np.ndarray
    running_mean: np.ndarray
    running_var: np.ndarray


def _truth(samples: int, tail: tuple[int, ...]) -> Truth:
    rng = np.random.default_rng([samples, *tail])
    x, dy = (rng.normal(0.5, 2, (samples, CHANNELS, *tail)).astype(np.float32) for _ in range(2))
    weight, bias = (rng.normal(1, 0.5, CHANNELS).astype(np.float32) for _ in range(2))
    leaf, scale, shift = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, weight, bias))
    running_mean = torch.zeros(CHANNELS, dtype=torch.float64)
    running_var = torch.ones(CHANNELS, dtype=torch.float64)
    y = torch.nn.functional.batch_norm(
        leaf, running_mean, running_var, scale, shift, training=True, momentum=MOMENTUM, eps=EPS
    )
    y.backward(torch.tensor(dy, dtype=torch.float64))
    grads = [parameter.grad.numpy() for parameter in (leaf, scale, shift)]
    return Truth(x, dy, weight, bias, y.detach().numpy(), *grads, running_mean.numpy(), running_var.numpy())


def _ranks(array: np.ndarray, split: tuple[int, ...]) -> list[np.ndarray]:
    return np.split(array, np.cumsum(split)[:-1])


def _steps(ops: Any, t: Truth, split: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Every rank's part, and what the ranks exchange; ``ops`` is the oracle or the operators."""
    xs, dys = _ranks(t.x, split), _ranks(t.dy, split)
    places = int(np.prod(t.x.shape[2:], dtype=int))
    counts = np.array([samples * places for samples in split], np.int32)
    stats = [ops.batch_norm_stats(x, EPS) for x in xs]
    means, invstds = (np.stack([s[i] for s in stats]) for i in range(2))
    running_mean, running_var = np.zeros(CHANNELS, means.dtype), np.ones(CHANNELS, means.dtype)
    mean, invstd = ops.batch_norm_gather_stats_with_counts(
        xs[0], means, invstds, running_mean, running_var, MOMENTUM, EPS, counts
    )
    y = [ops.batch_norm_elemt(x, t.weight, t.bias, mean, invstd, EPS) for x in xs]
    sums = [ops.batch_norm_reduce_backward(dy, x, mean, invstd, t.weight) for dy, x in zip(dys, xs, strict=True)]
    sum_dy, sum_dy_xmu, grad_weight, grad_bias = (sum(s[i] for s in sums) for i in range(4))
    grad_input = [
        ops.batch_norm_elemt_backward(dy, x, mean, invstd, t.weight, sum_dy, sum_dy_xmu, counts)
        for dy, x in zip(dys, xs, strict=True)
    ]
    return {
        "y": np.concatenate(y),
        "grad_input": np.concatenate(grad_input),
        "grad_weight": grad_weight,
        "grad_bias": grad_bias,
        "running_mean": running_mean,
        "running_var": running_var,
    }


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("tail", TAILS)
def test_the_oracle_is_batch_norm_whatever_the_split(split: tuple[int, ...], tail: tuple[int, ...]) -> None:
    truth = _truth(sum(split), tail)
    for name, value in _steps(oracle, truth, split).items():
        np.testing.assert_allclose(value, getattr(truth, name), rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("split", SPLITS)
def test_the_operators_are_batch_norm_whatever_the_split(backend: str, split: tuple[int, ...]) -> None:
    truth = _truth(sum(split), (2, 3))
    for name, value in _steps(normgrad, truth, split).items():
        assert value.dtype == np.float32
        # Six steps, each rounded to float32: the size of the largest value stands for the terms of all of them.
        size = np.abs(getattr(truth, name)).max()
        np.testing.assert_allclose(value, getattr(truth, name), rtol=0, atol=64 * 2.0**-24 * size, err_msg=name)


def test_a_rank_without_samples_adds_nothing_whatever_its_statistics_hold(backend: str) -> None:
    x = np.zeros((4, 1), np.float32)
    odd = np.array([np.nan, np.inf, -3.0], np.float32)
    for value in odd:
        mean, invstd = np.array([[1], [value]], np.float32), np.array([[0.5], [value]], np.float32)
        got = normgrad.batch_norm_gather_stats_with_counts(
            x, mean, invstd, None, None, 0.1, 0.0, np.array([4, 0], np.int32)
        )
        assert [float(a[0]) for a in got] == [1.0, 0.5]


def test_the_combination_does_not_cancel(backend: str) -> None:
    """Ranks far from zero and close together, where E[x²] − E[x]² would keep no digit."""
    mean = np.array([[10000.0], [10000.5]], np.float32)
    invstd = np.array([[2.0], [2.0]], np.float32)
    counts = np.array([3, 5], np.int32)
    arguments = (np.zeros((8, 1), np.float32), mean, invstd, None, None, 0.1, 0.0, counts)
    got = normgrad.batch_norm_gather_stats_with_counts(*arguments)[1]
    expected = 1 / np.sqrt(0.25 + 0.25 * 3 * 5 / 64)
    assert compare(got, np.array([expected]), np.array([4 * expected]))
