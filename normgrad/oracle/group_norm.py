"""GroupNorm in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from normgrad.oracle.float64 import Array, as_ieee, float64, mean_over, or_ones, or_zeros

# Data as [sample, group, channel of the group, position]; channels of every sample as [1, group, channel, 1].
_GROUP = (2, 3)
_CHANNEL = (0, 3)


def positions(N: int, HxW: int) -> int:
    """Return the spatial positions of the data: none without samples, since NumPy bounds an empty array's sizes too."""
    return HxW if N else 0


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
) -> tuple[Array | None, Array | None, Array | None]:
    """With ``x̂ = (x − mean)·rstd`` and ``g = weight·grad_out``, means over the elements of a sample's group:

    ``grad_input = rstd·(g − mean(g) − x̂·mean(g·x̂))``, ``grad_weight = Σ grad_out·x̂`` and ``grad_bias = Σ grad_out``
    over the samples and positions of a channel.
    """
    grouped, statistics, channels = (
        (N, group, C // group, positions(N, HxW)),
        (N, group, 1, 1),
        (1, group, C // group, 1),
    )
    dy, x = float64(grad_out).reshape(grouped), float64(input).reshape(grouped)
    rstd = float64(rstd).reshape(statistics)
    x_hat = (x - float64(mean).reshape(statistics)) * rstd
    g = dy * or_ones(weight, channels)
    grad_input = rstd * (g - mean_over(g, _GROUP) - x_hat * mean_over(g * x_hat, _GROUP))
    parameter = (C,) if weight is None else np.shape(weight)
    return (
        grad_input.reshape(np.shape(input)) if output_mask[0] else None,
        np.sum(dy * x_hat, axis=_CHANNEL).reshape(parameter) if output_mask[1] else None,
        np.sum(dy, axis=_CHANNEL).reshape(parameter) if output_mask[2] else None,
    )


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
) -> tuple[Array, Array, Array]:
    """Per sample and group ``mean = mean(x)``, ``rstd = 1/√(mean((x − mean)²) + eps)``;

    ``output = (x − mean)·rstd·weight + bias`` with weight and bias per channel.
    """
    grouped, channels = (N, group, C // group, positions(N, HxW)), (1, group, C // group, 1)
    x = float64(input).reshape(grouped)
    mean = mean_over(x, _GROUP)
    rstd = 1 / np.sqrt(mean_over((x - mean) ** 2, _GROUP) + eps)
    output = (x - mean) * rstd * or_ones(weight, channels) + or_zeros(bias, channels)
    return output.reshape(np.shape(input)), mean.reshape(N, group), rstd.reshape(N, group)
