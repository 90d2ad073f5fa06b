"""LayerNorm in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from normgrad.oracle.float64 import Array, as_ieee, float64, mean_over, or_ones, or_zeros


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
) -> tuple[Array | None, Array | None, Array | None]:
    """With ``x̂ = (x − mean)·rstd`` and ``g = grad_out·weight``, sums over the N normalised elements of a row:

    ``grad_input = rstd·(g − Σg/N − x̂·Σ(g·x̂)/N)``, ``grad_weight = Σ grad_out·x̂`` and ``grad_bias = Σ grad_out``
    over the rows.
    """
    shape, columns = np.shape(input), math.prod(normalized_shape)
    rows = math.prod(shape[: len(shape) - len(normalized_shape)])
    dy, x = float64(grad_out).reshape(rows, columns), float64(input).reshape(rows, columns)
    rstd = float64(rstd).reshape(rows, 1)
    x_hat = (x - float64(mean).reshape(rows, 1)) * rstd
    g = dy * or_ones(weight, (1, columns))
    grad_input = rstd * (g - mean_over(g, (1,)) - x_hat * mean_over(g * x_hat, (1,)))
    return (
        grad_input.reshape(shape) if output_mask[0] else None,
        np.sum(dy * x_hat, axis=0).reshape(tuple(normalized_shape)) if output_mask[1] else None,
        np.sum(dy, axis=0).reshape(tuple(normalized_shape)) if output_mask[2] else None,
    )


@as_ieee
def layer_norm(
    input: ArrayLike,
    normalized_shape: Sequence[int],
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
) -> tuple[Array, Array, Array]:
    """``mean = Σx/N``, ``rstd = 1/√(Σ(x − mean)²/N + eps)``, ``output = (x − mean)·rstd·weight + bias``."""
    shape, columns = np.shape(input), math.prod(normalized_shape)
    outer = shape[: len(shape) - len(normalized_shape)]
    x = float64(input).reshape(math.prod(outer), columns)
    mean = mean_over(x, (1,))
    rstd = 1 / np.sqrt(mean_over((x - mean) ** 2, (1,)) + eps)
    output = (x - mean) * rstd * or_ones(weight, (1, columns)) + or_zeros(bias, (1, columns))
    statistics = (*outer, *(1 for _ in normalized_shape))
    return output.reshape(shape), mean.reshape(statistics), rstd.reshape(statistics)
