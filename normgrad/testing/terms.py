"""Compute the error scales of every operator: what the bound on an output element is made of.

For every operator there is a function with the oracle's arguments that returns one :class:`Magnitude` per output (None
where an output is not wanted).

The model is the standard one of error analysis with underflow. A float32 product or quotient is
``fl(a∘b) = (a∘b)·(1 + δ) + η`` with ``|δ| ≤ 2⁻²⁴`` and ``|η| ≤ 2⁻¹²⁶`` (the result may be flushed to zero). Sums have
no η. The relative errors δ add up to at most a small multiple of ``2⁻²⁴·T``, T being the sum of the absolute values of
the terms. Each absolute error η reaches the element multiplied by the factors that its product meets later. The sum of
the absolute values of these factors over all products and quotients is U. Implementations group the factors of a
product differently, so U here is the sum over the groupings that the comments name. One grouping is left out on
purpose: ``grad_out·(x − mean)`` before the product with rstd, because it loses digits that the result has where x is
tiny and rstd large. (Where a formula itself is written that way, it is covered.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from normgrad.oracle.batch_norm import channels
from normgrad.oracle.float64 import Array, as_ieee, float64, mean_over, or_ones, or_zeros
from normgrad.oracle.group_norm import positions


class Magnitude:
    """The error scales of one output, per element.

    Parameters
    ----------
    total : array
        T, the sum of the absolute values of the terms.
    *factors : array
        Terms, sums of terms and intermediate products of the formula in the order in which it is written; the peak is
        the largest of them and T.
    underflow : array
        U, the underflow allowance in units of 2⁻¹²⁶. 0 for a formula without products and quotients.

    Attributes
    ----------
    total, underflow : array
        T and U.
    peak : array
        The largest finite term, sum of terms or intermediate product. The bound is promised where it is below 2¹²⁶.
    """

    def __init__(self, total: ArrayLike, *factors: ArrayLike, underflow: ArrayLike = 0.0) -> None:
        self.total: NDArray[np.float64] = np.asarray(total, np.float64)
        self.underflow: NDArray[np.float64] = np.asarray(underflow, np.float64)
        peak = _finite_size(self.total)
        for factor in factors:
            peak = np.maximum(peak, _finite_size(factor))
        self.peak: NDArray[np.float64] = peak

    def reshaped(self, shape: Sequence[int]) -> Magnitude:
        """Return the same scales in another shape."""

        def reshape(values: Array) -> Array:
            return np.broadcast_to(values, self.total.shape).reshape(shape)

        return Magnitude(reshape(self.total), reshape(self.peak), underflow=reshape(self.underflow))


def _finite_size(values: ArrayLike) -> NDArray[np.float64]:
    """Return absolute values, and 0 for what an infinite input made, since that is no overflow."""
    size = np.abs(values)
    return np.where(np.isfinite(size), size, 0.0)


Three = tuple[Magnitude | None, Magnitude | None, Magnitude | None]


def _normalised_backward(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    weight: Array,
    row: tuple[int, ...],
    column: tuple[int, ...],
    channel_weight: Array | float = 0.0,
) -> tuple[Magnitude, Magnitude, Magnitude]:
    """Return the scales of LayerNorm's and GroupNorm's gradients.

    Statistics are over the axes ``row``, grad_weight and grad_bias are sums over the axes ``column``.
    ``channel_weight`` is the mean of ``|weight|`` where a weight may multiply a channel's sum of ``grad_out·x̂``
    instead of its elements.
    """
    xmu, rstd_size = x - mean, np.abs(rstd)
    x_hat, g = xmu * rstd, dy * weight
    count = float(np.prod([x.shape[axis] for axis in row]))
    mean_g, mean_gx = mean_over(np.abs(g), row), mean_over(np.abs(g * x_hat), row)
    inner = np.abs(g) + mean_g + np.abs(x_hat) * mean_gx
    # A sum that overflows affects its whole row, or its whole column.
    row_peaks = [np.max(np.abs(a), axis=row, keepdims=True, initial=0.0) for a in (xmu, x_hat, g, g * x_hat)]
    sums = (mean_g * count, mean_gx * count, (mean_g + np.abs(x_hat) * mean_gx) * count)
    column_peaks = [np.max(np.abs(a), axis=column, initial=0.0) for a in (xmu, x_hat, dy * x_hat)]
    # In grad_input, m being the mean of g·x_hat: 1 for the last product; |x - mean| for rstd^2·m; rstd for g and for
    # the quotient of its mean; rstd·|x_hat| for g·x_hat and for the quotient of m; rstd·|x_hat|·mean|g| for the x_hat
    # in the sum; rstd·mean|g·x_hat| for the x_hat that m is multiplied by; rstd·|x_hat|·mean|weight| for grad_out·x_hat
    # where the weight comes later.
    underflow = 1 + np.abs(xmu) + rstd_size * ((1 + np.abs(x_hat)) * (2 + mean_g) + mean_gx)
    underflow = underflow + rstd_size * np.abs(x_hat) * channel_weight
    # In grad_weight, for each row: 1 for grad_out·x_hat, |grad_out| for x_hat, |x - mean| for grad_out·rstd.
    weight_underflow = np.sum(1 + np.abs(dy) + np.abs(xmu), axis=column)
    return (
        Magnitude(rstd_size * inner, inner, *row_peaks, *sums, underflow=underflow),
        Magnitude(np.sum(np.abs(dy * x_hat), axis=column), *column_peaks, underflow=weight_underflow),
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
    """Return the scales of grad_input, grad_weight and grad_bias.

    T is ``rstd·(|g| + Σ|g|/N + |x̂|·Σ|g·x̂|/N)``, ``Σ|grad_out·x̂|`` and ``Σ|grad_out|``. U is
    ``1 + |x − mean| + rstd·((1 + |x̂|)·(2 + mean|g|) + mean|g·x̂|)``, ``M + Σ(|grad_out| + |x − mean|)`` and 0.
    """
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
    """Return the scales of grad_input, grad_weight and grad_bias: LayerNorm's, with a sample's group for a row.

    U of grad_input has ``rstd·|x̂|·mean|weight|`` more, the mean over the group's channels, for weights that multiply a
    channel's sum of ``grad_out·x̂``.
    """
    grouped = (N, group, C // group, positions(N, HxW))
    gamma = or_ones(weight, (1, group, C // group, 1))
    magnitudes = _normalised_backward(
        float64(grad_out).reshape(grouped),
        float64(input).reshape(grouped),
        float64(mean).reshape(N, group, 1, 1),
        float64(rstd).reshape(N, group, 1, 1),
        gamma,
        (2, 3),
        (0, 3),
        mean_over(np.abs(gamma), (2, 3)),
    )
    parameter = (C,) if weight is None else np.shape(weight)
    return _wanted(magnitudes, output_mask, (np.shape(input), parameter, parameter))


def _normalised(
    x: Array, eps: float, weight: Array, bias: Array, row: tuple[int, ...]
) -> tuple[Magnitude, Magnitude, Magnitude]:
    """Return the scales of a forward pass: of the output, the mean and the reciprocal deviation."""
    mean = mean_over(x, row)
    squares = (x - mean) ** 2
    variance = mean_over(squares, row) + eps
    rstd = 1 / np.sqrt(variance)
    mean_size = mean_over(np.abs(x), row)
    count = float(np.prod([x.shape[axis] for axis in row]))
    sum_x, sum_squares = mean_size * count, np.sum(squares, axis=row, keepdims=True)
    xmu, scaled, weight_size = np.abs(x - mean), (x - mean) * rstd, np.abs(weight)
    # The squares and the quotient of the variance are worth 1 each; half of rstd^3 of that reaches rstd, to first
    # order. An error of the mean cancels out of the variance to first order.
    rstd_underflow = 1 + rstd**3
    # 1 for the last product, |weight| for x_hat, |x - mean| for rstd·weight, then what the statistics bring.
    underflow = 1 + weight_size + xmu + weight_size * (np.abs(rstd) + xmu * rstd_underflow)
    return (
        Magnitude(
            np.abs(scaled * weight) + np.abs(bias), scaled, rstd, variance, sum_x, sum_squares, underflow=underflow
        ),
        Magnitude(mean_size, sum_x, underflow=1.0),
        Magnitude(np.abs(rstd), variance, sum_x, sum_squares, underflow=rstd_underflow),
    )


@as_ieee
def layer_norm(
    input: ArrayLike,
    normalized_shape: Sequence[int],
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
) -> Three:
    """Return the scales of the output, the mean and rstd.

    T is ``|x̂·weight| + |bias|``, ``Σ|x|/N`` and ``rstd``. U is
    ``1 + |weight| + |x − mean| + |weight|·(rstd + |x − mean|·(1 + rstd³))``, 1 and ``1 + rstd³``.
    """
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
    """Return the scales of the output, the mean and rstd: LayerNorm's, with a sample's group for a row."""
    channels = (1, group, C // group, 1)
    x = float64(input).reshape(N, group, C // group, positions(N, HxW))
    magnitudes = _normalised(x, eps, or_ones(weight, channels), or_zeros(bias, channels), (2, 3))
    return _wanted(magnitudes, (True, True, True), (np.shape(input), (N, group), (N, group)))


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
    """Return the scales of grad_input, with ``b = sum_dy_xmu/n``.

    T is ``I·|invstd·weight|`` with ``I = |grad_out| + |sum_dy/n| + |(x − mean)·invstd²·b|``. U is
    ``1 + |weight| + |x − mean| + I
    + |invstd·weight|·(3 + (1 + invstd)·(|b| + |x̂|) + |x − mean|·(1 + |b|))``.
    """
    dy, x = float64(grad_out), float64(input)
    shape, _ = channels(x)
    invstd, weight = float64(invstd).reshape(shape), or_ones(weight, shape)
    n = np.sum(float64(counter))
    sum_dy, sum_dy_xmu = float64(sum_dy).reshape(shape), float64(sum_dy_xmu).reshape(shape)
    xmu = x - float64(mean).reshape(shape)
    chain = xmu * invstd**2 * sum_dy_xmu
    inner = np.abs(dy) + np.abs(sum_dy / n) + np.abs(chain / n)
    scale = np.abs(invstd * weight)
    # 1 and |weight| for the last two products as written. Where they are combined first: |x - mean| for
    # invstd^3·weight·b, and the sum in parentheses for invstd·weight.
    b, xmu_size, x_hat = np.abs(sum_dy_xmu / n), np.abs(xmu), np.abs(xmu * invstd)
    underflow = 1 + np.abs(weight) + xmu_size + inner
    # Inside the parentheses: 3 for sum_dy/n and for the last product and the quotient of the other term. Of the factors
    # of that term: |b| for (x - mean)·invstd^2, |x - mean|·|b| for invstd^2, |x_hat|·invstd for b, |x - mean| for
    # invstd^2·b; as x_hat·(invstd·b), invstd·|b| for x_hat and |x_hat| for invstd·b.
    underflow = underflow + scale * (3 + (1 + np.abs(invstd)) * (b + x_hat) + xmu_size * (1 + b))
    factors = (inner, xmu, invstd**2, xmu * invstd**2, chain, inner * invstd, np.sum(np.abs(float64(counter))))
    return Magnitude(inner * scale, *factors, underflow=underflow)


@as_ieee
def batch_norm_stats(input: ArrayLike, eps: float = 1e-5) -> tuple[Magnitude, Magnitude]:
    """Return the scales of the mean and invstd: T is ``Σ|x|/n`` and ``invstd``, U is 1 and ``1 + invstd³``."""
    x = float64(input)
    shape, others = channels(x)
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
    """Return the scales of mean_all, invstd_all and the two running statistics (None where they are absent).

    T is ``Σ|mean·counts|/n``; with V the sum of the absolute values of the terms of the variance, ``invstd_all³·V``;
    for a running statistic the two terms of its update.

    With R the number of ranks that have a count and ``k = Σ|counts|/n``, which is 1 unless counts are negative, U of
    mean_all is ``1 + R·(1 + 1/n)``. The variance has ``v = 1 + 2·k + R·(1 + 1/n)``, so invstd_all has
    ``1 + ½·invstd_all³·v``. running_mean has ``2 + momentum·U(mean_all)``, and running_var
    ``2 + momentum·(1 + v·n/(n − 1))``.
    """
    counts = float64(counts).reshape(-1, 1)
    n = np.sum(counts)

    def total(values: Array) -> Array:
        return np.asarray(np.sum(np.where(counts == 0, 0.0, np.abs(values * counts)), axis=0))

    means, squared_invstd = float64(mean), float64(invstd) ** 2
    inverse = 1 / squared_invstd
    mean_all = np.sum(np.where(counts == 0, 0.0, means * counts), axis=0) / n
    squares = np.sum(np.where(counts == 0, 0.0, (inverse - eps + (means - mean_all) ** 2) * counts), axis=0)
    terms = total(np.abs(inverse) + abs(eps) + (means - mean_all) ** 2)
    variance = squares / n + eps
    invstd_all = 1 / np.sqrt(variance)
    sum_means, sum_counts = total(means), np.sum(np.abs(counts))
    variance_peaks = (
        sum_means,
        terms,
        sum_counts,
        variance,
        np.max(np.where(counts == 0, 0.0, squared_invstd), axis=0, initial=0.0),
    )
    # A rank's mean·count is worth 1/n and mean·(count/n) is worth 1; the quotient by n is worth 1. In the variance
    # 1/invstd^2 and (mean - mean_all)^2 are each worth count/n. invstd^2 itself underflows only where 1/invstd^2
    # exceeds 2^126.
    weighted = np.count_nonzero(counts) * (1 + 1 / np.abs(n))
    mean_underflow = 1 + weighted
    variance_underflow = mean_underflow + 2 * sum_counts / np.abs(n)

    def moved(running: ArrayLike | None, new: Array, new_underflow: Array, *peaks: Array) -> Magnitude | None:
        if running is None:
            return None
        size = np.abs((1 - momentum) * float64(running)) + np.abs(momentum * new)
        return Magnitude(size, new, *peaks, underflow=2 + abs(momentum) * new_underflow)

    return (
        Magnitude(sum_means / np.abs(n), sum_means, sum_counts, underflow=mean_underflow),
        Magnitude(
            invstd_all**3 * (terms / np.abs(n) + abs(eps)),
            *variance_peaks,
            invstd_all,
            underflow=1 + 0.5 * invstd_all**3 * variance_underflow,
        ),
        moved(running_mean, sum_means / n, mean_underflow, sum_means, sum_counts),
        moved(running_var, terms / (n - 1), 1 + variance_underflow * np.abs(n / (n - 1)), *variance_peaks),
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
    """Return the scales of the output.

    T is ``|(x − mean)·invstd·weight| + |bias|``. U is ``1 + |weight| + |x − mean|``: for the last product, for x̂ and
    for ``invstd·weight`` where that is multiplied first.
    """
    x = float64(input)
    shape, _ = channels(x)
    weight = or_ones(weight, shape)
    xmu = x - float64(mean).reshape(shape)
    x_hat = xmu * float64(invstd).reshape(shape)
    underflow = 1 + np.abs(weight) + np.abs(xmu)
    return Magnitude(np.abs(x_hat * weight) + np.abs(or_zeros(bias, shape)), xmu, x_hat, underflow=underflow)


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
    """Return the scales of sum_dy, sum_dy_xmu, grad_weight and grad_bias.

    T is ``Σ|dy|``, ``Σ|dy·(x − mean)|``, that times ``|invstd|``, and ``Σ|dy|``. U is 0, the number n of elements of a
    channel, ``1 + n·(1 + invstd) + Σ(|dy| + |x − mean|)`` and 0: grad_weight may be the centred sum times invstd, as
    the formula is written, or the sum of ``dy·x̂`` as in LayerNorm.
    """
    dy, x = float64(grad_out), float64(input)
    shape, others = channels(x)
    xmu, invstd_size = x - float64(mean).reshape(shape), np.abs(float64(invstd))
    sum_dy, sum_dy_xmu = np.sum(np.abs(dy), axis=others), np.sum(np.abs(dy * xmu), axis=others)
    peaks = (np.max(np.abs(xmu), axis=others, initial=0.0), sum_dy_xmu)
    n = float(np.prod([x.shape[axis] for axis in others]))
    weight_underflow = 1 + n * (1 + invstd_size) + sum_dy + np.sum(np.abs(xmu), axis=others)
    return (
        Magnitude(sum_dy) if input_g else None,
        Magnitude(sum_dy_xmu, *peaks, underflow=n) if input_g else None,
        Magnitude(sum_dy_xmu * invstd_size, *peaks, underflow=weight_underflow) if weight_g else None,
        Magnitude(sum_dy) if bias_g else None,
    )
