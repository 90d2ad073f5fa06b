"""The size of what each formula adds up, element by element: what an error has to be measured against.

For every operator a function with the oracle's arguments and one :class:`Magnitude` per output (None where none is
wanted).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from normgrad.oracle.float64 import Array, as_ieee, float64, mean_over, or_ones, or_zeros
from normgrad.oracle.group_norm import places


class Magnitude:
    """The terms of one output, per element.

    Attributes
    ----------
    total : array
        T, the sum of their absolute values.
    peak : array
        The largest finite factor or term on the way; above float32's range, Inf and NaN are right results.
    """

    def __init__(self, total: ArrayLike, *factors: ArrayLike) -> None:
        self.total: NDArray[np.float64] = np.asarray(total, np.float64)
        peak = _finite_size(self.total)
        for factor in factors:
            peak = np.maximum(peak, _finite_size(factor))
        self.peak: NDArray[np.float64] = peak

    def reshaped(self, shape: Sequence[int]) -> Magnitude:
        """The same in another shape."""
        other = Magnitude(self.total.reshape(shape))
        other.peak = np.broadcast_to(self.peak, self.total.shape).reshape(shape)
        return other


def _finite_size(values: ArrayLike) -> NDArray[np.float64]:
    """Absolute values; 0 for what an infinite input made, since that is no overflow."""
    size = np.abs(values)
    return np.where(np.isfinite(size), size, 0.0)


Three = tuple[Magnitude | None, Magnitude | None, Magnitude | None]


def _normalised_backward(
    dy: Array, x: Array, mean: Array, rstd: Array, weight: Array, row: tuple[int, ...], column: tuple[int, ...]
) -> tuple[Magnitude, Magnitude, Magnitude]:
    """LayerNorm and GroupNorm alike: statistics over the axes ``row``, weights summed over the axes ``column``."""
    xmu = x - mean
    x_hat, g = xmu * rstd, dy * weight
    count = float(np.prod([x.shape[axis] for axis in row]))
    mean_g, mean_gx = mean_over(np.abs(g), row), mean_over(np.abs(g * x_hat), row)
    total = np.abs(rstd) * (np.abs(g) + mean_g + np.abs(x_hat) * mean_gx)
    # A sum that overflows spoils its whole row, or its whole column.
    spoil = [np.max(np.abs(a), axis=row, keepdims=True, initial=0.0) for a in (xmu, x_hat, g, g * x_hat)]
    sums = [mean_g * count, mean_gx * count]
    inner = np.abs(g) + mean_g + np.abs(x_hat) * mean_gx
    column_spoil = [np.max(np.abs(a), axis=column, initial=0.0) for a in (xmu, x_hat, dy * x_hat)]
    return (
        Magnitude(total, inner, *spoil, *sums),
        Magnitude(np.sum(np.abs(dy * x_hat), axis=column), *column_spoil),
        Magnitude(np.sum(np.abs(dy), axis=column)),
    )


def _wanted(magnitudes: tuple[Magnitude, ...], mask: Sequence[bool], shapes: Sequence[Sequence[int]]) -> Any:
    return tuple(m.reshaped(s) if keep else None for m, keep, s in zip(magnitudes, mask, shapes, strict=True))


@as_ieee
def layer_norm_backward(
    grad_out: ArrayLike,
    input: ArrayLike,
    normalized_shape: Sequence[int],
    mean: ArrayLike,
    rstd: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    output_mask: Sequence[bool] = (True, True, True),
) -> Three:
    """``rstd·(|g| + Σ|g|/N + |x̂|·Σ|g·x̂|/N)``, ``Σ|grad_out·x̂|`` and ``Σ|grad_out|``."""
    shape, columns = np.shape(input), math.prod(normalized_shape)
    rows = math.prod(shape[: len(shape) - len(normalized_shape)])
    magnitudes = _normalised_backward(
        float64(grad_out).reshape(rows, columns),
        float64(input).reshape(rows, columns),
        float64(mean).reshape(rows, 1),
        float64(rstd).reshape(rows, 1),
        or_ones(weight, (1, columns)),
        (1,),
        (0,),
    )
    return _wanted(magnitudes, output_mask, (shape, tuple(normalized_shape), tuple(normalized_shape)))


@as_ieee
def group_norm_backward(
    grad_out: ArrayLike,
    input: ArrayLike,
    mean: ArrayLike,
    rstd: ArrayLike,
    weight: ArrayLike | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool] = (True, True, True),
) -> Three:
    """As for LayerNorm, with a sample's group in place of a row."""
    grouped = (N, group, C // group, places(N, HxW))
    magnitudes = _normalised_backward(
        float64(grad_out).reshape(grouped),
        float64(input).reshape(grouped),
        float64(mean).reshape(N, group, 1, 1),
        float64(rstd).reshape(N, group, 1, 1),
        or_ones(weight, (1, group, C // group, 1)),
        (2, 3),
        (0, 3),
    )
    parameter = (C,) if weight is None else np.shape(weight)
    return _wanted(magnitudes, output_mask, (np.shape(input), parameter, parameter))


def _normalised(
    x: Array, eps: float, weight: Array, bias: Array, row: tuple[int, ...]
) -> tuple[Magnitude, Magnitude, Magnitude]:
    """A forward pass: of the output, the mean and the reciprocal deviation, whose terms are all of one sign."""
    mean = mean_over(x, row)
    squares = (x - mean) ** 2
    rstd = 1 / np.sqrt(mean_over(squares, row) + eps)
    total = mean_over(np.abs(x), row)
    count = float(np.prod([x.shape[axis] for axis in row]))
    sums = [np.abs(total) * count, np.sum(squares, axis=row, keepdims=True)]
    scaled = (x - mean) * rstd
    return (
        Magnitude(np.abs(scaled * weight) + np.abs(bias), scaled, rstd, *sums),
        Magnitude(total, *sums[:1]),
        Magnitude(np.abs(rstd), *sums),
    )


@as_ieee
def layer_norm(
    input: ArrayLike,
    normalized_shape: Sequence[int],
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
) -> Three:
    """``|x̂·weight| + |bias|``, ``Σ|x|/N`` and ``rstd``."""
    shape, columns = np.shape(input), math.prod(normalized_shape)
    outer = shape[: len(shape) - len(normalized_shape)]
    x = float64(input).reshape(math.prod(outer), columns)
    magnitudes = _normalised(x, eps, or_ones(weight, (1, columns)), or_zeros(bias, (1, columns)), (1,))
    statistics = (*outer, *(1 for _ in normalized_shape))
    return _wanted(magnitudes, (True, True, True), (shape, statistics, statistics))


@as_ieee
def group_norm(
    input: ArrayLike,
    weight: ArrayLike | None,
    bias: ArrayLike | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float = 1e-5,
) -> Three:
    """As for LayerNorm, with a sample's group in place of a row."""
    channels = (1, group, C // group, 1)
    x = float64(input).reshape(N, group, C // group, places(N, HxW))
    magnitudes = _normalised(x, eps, or_ones(weight, channels), or_zeros(bias, channels), (2, 3))
    return _wanted(magnitudes, (True, True, True), (np.shape(input), (N, group), (N, group)))


def _channels(data: Array) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of a statistic beside the data, and the axes that it is a sum over."""
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
) -> Magnitude:
    """``(|grad_out| + |sum_dy/n| + |(x − mean)·invstd²·sum_dy_xmu/n|)·|invstd·weight|``."""
    dy, x = float64(grad_out), float64(input)
    shape, _ = _channels(x)
    invstd, weight = float64(invstd).reshape(shape), or_ones(weight, shape)
    n = np.sum(float64(counter))
    mean_dy, mean_dy_xmu = float64(sum_dy).reshape(shape) / n, float64(sum_dy_xmu).reshape(shape) / n
    xmu = x - float64(mean).reshape(shape)
    inner = np.abs(dy) + np.abs(mean_dy) + np.abs(xmu * invstd**2 * mean_dy_xmu)
    factors = (
        inner,
        xmu,
        invstd**2,
        xmu * invstd**2,
        invstd**2 * mean_dy_xmu,
        mean_dy_xmu,
        inner * invstd,
        invstd * weight,
    )
    return Magnitude(inner * np.abs(invstd * weight), *factors, np.sum(np.abs(float64(counter))))


@as_ieee
def batch_norm_stats(input: ArrayLike, eps: float = 1e-5) -> tuple[Magnitude, Magnitude]:
    """``Σ|x|/n`` and ``invstd``."""
    x = float64(input)
    shape, others = _channels(x)
    _, mean, invstd = _normalised(x, eps, np.ones(shape), np.zeros(shape), others)
    return mean.reshaped((-1,)), invstd.reshaped((-1,))


@as_ieee
def batch_norm_gather_stats_with_counts(
    input: ArrayLike,
    mean: ArrayLike,
    invstd: ArrayLike,
    running_mean: ArrayLike | None,
    running_var: ArrayLike | None,
    momentum: float,
    eps: float,
    counts: ArrayLike,
) -> tuple[Magnitude, Magnitude, Magnitude | None, Magnitude | None]:
    """Of the two results and of the two running statistics.

    ``Σ|mean·counts|/n``; with V the terms of the variance, ``invstd_all³·V``; then what the running values add up.
    """
    counts = float64(counts).reshape(-1, 1)
    n = np.sum(counts)

    def total(values: Array) -> Array:
        return np.asarray(np.sum(np.where(counts == 0, 0.0, np.abs(values * counts)), axis=0))

    means, inverse = float64(mean), 1 / float64(invstd) ** 2
    mean_all = np.sum(np.where(counts == 0, 0.0, means * counts), axis=0) / n
    squares = np.sum(np.where(counts == 0, 0.0, (inverse - eps + (means - mean_all) ** 2) * counts), axis=0)
    terms = total(np.abs(inverse) + abs(eps) + (means - mean_all) ** 2)
    invstd_all = 1 / np.sqrt(squares / n + eps)
    spoil = (total(np.abs(means)), terms, n)

    def moved(running: ArrayLike | None, new: Array) -> Magnitude | None:
        if running is None:
            return None
        return Magnitude(np.abs((1 - momentum) * float64(running)) + np.abs(momentum * new), new, *spoil)

    return (
        Magnitude(total(means) / n, *spoil),
        Magnitude(invstd_all**3 * (terms / n + abs(eps)), *spoil, invstd_all),
        moved(running_mean, total(means) / n),
        moved(running_var, terms / (n - 1)),
    )


@as_ieee
def batch_norm_elemt(
    input: ArrayLike,
    weight: ArrayLike | None,
    bias: ArrayLike | None,
    mean: ArrayLike,
    invstd: ArrayLike,
    eps: float = 1e-5,
) -> Magnitude:
    """``|(x − mean)·invstd·weight| + |bias|``."""
    x = float64(input)
    shape, _ = _channels(x)
    xmu = x - float64(mean).reshape(shape)
    x_hat = xmu * float64(invstd).reshape(shape)
    scale = float64(invstd).reshape(shape) * or_ones(weight, shape)
    return Magnitude(np.abs(x_hat * or_ones(weight, shape)) + np.abs(or_zeros(bias, shape)), xmu, x_hat, scale)


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
) -> tuple[Magnitude | None, Magnitude | None, Magnitude | None, Magnitude | None]:
    """``Σ|dy|``, ``Σ|dy·(x − mean)|``, that times ``|invstd|``, and ``Σ|dy|``."""
    dy, x = float64(grad_out), float64(input)
    shape, others = _channels(x)
    xmu = x - float64(mean).reshape(shape)
    sum_dy, sum_dy_xmu = np.sum(np.abs(dy), axis=others), np.sum(np.abs(dy * xmu), axis=others)
    spoil = (np.max(np.abs(xmu), axis=others, initial=0.0), sum_dy_xmu)
    return (
        Magnitude(sum_dy) if input_g else None,
        Magnitude(sum_dy_xmu, *spoil) if input_g else None,
        Magnitude(sum_dy_xmu * np.abs(float64(invstd)), *spoil) if weight_g else None,
        Magnitude(sum_dy) if bias_g else None,
    )
