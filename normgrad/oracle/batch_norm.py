"""The steps of synchronised BatchNorm in float64. Dimension 1 of the data is the channel."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from normgrad.oracle.float64 import Array, as_ieee, float64, mean_over, or_ones, or_zeros


def channels(data: Array) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a per-channel parameter beside the data, and the axes of a sum over a channel."""
    return (1, data.shape[1], *(1 for _ in data.shape[2:])), (0, *range(2, data.ndim))


@as_ieee
def batch_norm_elemt_backward(
    grad_out: ArrayLike,
    input: ArrayLike,
    mean: ArrayLike,
    invstd: ArrayLike,
    weight: ArrayLike | None,
    sum_dy: ArrayLike,
    sum_dy_xmu: ArrayLike,
    counter: ArrayLike,
) -> Array:
    """``grad_input = (grad_out − sum_dy/n − (x − mean)·invstd²·sum_dy_xmu/n)·invstd·weight``, ``n = Σ counter``."""
    dy, x = float64(grad_out), float64(input)
    shape, _ = channels(x)
    mean, invstd = float64(mean).reshape(shape), float64(invstd).reshape(shape)
    n = np.sum(float64(counter))
    mean_dy, mean_dy_xmu = float64(sum_dy).reshape(shape) / n, float64(sum_dy_xmu).reshape(shape) / n
    return (dy - mean_dy - (x - mean) * invstd**2 * mean_dy_xmu) * invstd * or_ones(weight, shape)


@as_ieee
def batch_norm_stats(input: ArrayLike, eps: float = 1e-5) -> tuple[Array, Array]:
    """Per channel ``mean = Σx/n`` and ``invstd = 1/√(Σ(x − mean)²/n + eps)``."""
    x = float64(input)
    _, others = channels(x)
    mean = mean_over(x, others)
    invstd = 1 / np.sqrt(mean_over((x - mean) ** 2, others) + eps)
    return mean.reshape(-1), invstd.reshape(-1)


@as_ieee
def batch_norm_gather_stats_with_counts(
    input: ArrayLike,
    mean: ArrayLike,
    invstd: ArrayLike,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
    counts: ArrayLike,
) -> tuple[Array, Array]:
    """The statistics of the whole batch from those of its ranks; a rank with count 0 adds nothing, whatever it holds.

    ``n = Σ counts``, ``mean_all = Σ mean·counts/n``, ``var = 1/invstd² − eps``,
    ``S = Σ (var + (mean − mean_all)²)·counts``, ``invstd_all = 1/√(S/n + eps)``. ``running_mean`` and
    ``running_var``, where given, move in place to ``(1 − momentum)·running + momentum·new`` with ``mean_all`` and
    ``S/(n − 1)``.
    """
    counts = float64(counts).reshape(-1, 1)
    n = np.sum(counts)

    def total(values: Array) -> Array:
        return np.asarray(np.sum(np.where(counts == 0, 0.0, values * counts), axis=0))

    means = float64(mean)
    mean_all = total(means) / n
    variances = 1 / float64(invstd) ** 2 - eps
    squares = total(variances + (means - mean_all) ** 2)
    for running, new in ((running_mean, mean_all), (running_var, squares / (n - 1))):
        if running is not None:
            running[...] = (1 - momentum) * float64(running) + momentum * new
    return mean_all, 1 / np.sqrt(squares / n + eps)


@as_ieee
def batch_norm_elemt(
    input: ArrayLike,
    weight: ArrayLike | None,
    bias: ArrayLike | None,
    mean: ArrayLike,
    invstd: ArrayLike,
    eps: float = 1e-5,
) -> Array:
    """``output = (x − mean)·invstd·weight + bias``; ``eps`` takes no part, since invstd holds it already."""
    x = float64(input)
    shape, _ = channels(x)
    x_hat = (x - float64(mean).reshape(shape)) * float64(invstd).reshape(shape)
    return x_hat * or_ones(weight, shape) + or_zeros(bias, shape)


@as_ieee
def batch_norm_reduce_backward(
    grad_out: ArrayLike,
    input: ArrayLike,
    mean: ArrayLike,
    invstd: ArrayLike,
    weight: ArrayLike | None,
    input_g: bool = True,
    weight_g: bool = True,
    bias_g: bool = True,
) -> tuple[Array | None, Array | None, Array | None, Array | None]:
    """``sum_dy = Σdy``, ``sum_dy_xmu = Σdy·(x − mean)``, ``grad_weight = sum_dy_xmu·invstd``, ``grad_bias = Σdy``.

    Without data all of them are 0, also where invstd is Inf or NaN.
    """
    dy, x = float64(grad_out), float64(input)
    shape, others = channels(x)
    sum_dy = np.sum(dy, axis=others)
    sum_dy_xmu = np.sum(dy * (x - float64(mean).reshape(shape)), axis=others)
    return (
        sum_dy if input_g else None,
        sum_dy_xmu if input_g else None,
        sum_dy_xmu * (float64(invstd).reshape(-1) if x.size else 1.0) if weight_g else None,
        sum_dy.copy() if bias_g else None,
    )
