"""The calls that ``normgrad demo`` makes: values to check by hand, and tensors as models have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from normgrad.operators import (
    Operator,
    batch_norm_elemt_backward,
    batch_norm_gather_stats_with_counts,
    batch_norm_reduce_backward,
    batch_norm_stats,
    group_norm,
    group_norm_backward,
    layer_norm,
    layer_norm_backward,
)

F32 = np.float32


@dataclass(frozen=True)
class Case:
    """One call, and what its data is."""

    operator: Operator
    title: str
    arguments: dict[str, Any]


def every_case() -> Iterator[Case]:
    """Two cases for each of the three backward operators."""
    random = np.random.default_rng(0)
    yield layer_norm_by_hand()
    yield transformer(random)
    yield group_norm_by_hand()
    yield diffusion(random)
    yield batch_norm_by_hand()
    yield convolution(random)


def layer_norm_by_hand() -> Case:
    """Statistics that are not the input's own: the formula is all that counts."""
    x = np.array([[2, 3], [4, 5]], F32)
    mean, rstd = np.array([[2], [3]], F32), np.array([[4], [5]], F32)
    arguments = {"input": x, "normalized_shape": [2], "mean": mean, "rstd": rstd, "weight": np.ones(2, F32)}
    return Case(layer_norm_backward, "values to check by hand", {"grad_out": x, **arguments})


def group_norm_by_hand() -> Case:
    """One group, whose gradient is its own normalised input: grad_input is nearly 0."""
    x = np.arange(1, 25, dtype=F32).reshape(2, 3, 4)
    mean, rstd, weight = np.array([6.5, 18.5], F32), np.full(2, 0.2896827, F32), np.ones(3, F32)
    arguments = {"input": x, "mean": mean, "rstd": rstd, "weight": weight, "N": 2, "C": 3, "HxW": 4, "group": 1}
    return Case(group_norm_backward, "values to check by hand (grad_input ≈ 0)", {"grad_out": x, **arguments})


def batch_norm_by_hand() -> Case:
    """Ten elements per channel, five on each of two ranks."""
    x = np.arange(8, dtype=F32).reshape(1, 2, 4)
    zero, one = np.zeros(2, F32), np.ones(2, F32)
    arguments = {"input": x, "mean": zero, "invstd": one, "weight": one, "sum_dy": zero, "sum_dy_xmu": one}
    counter = np.array([5, 5], np.int32)
    return Case(batch_norm_elemt_backward, "values to check by hand", {"grad_out": x, **arguments, "counter": counter})


def transformer(random: np.random.Generator) -> Case:
    """LayerNorm over the width of a transformer."""
    shape, width = (4, 128, 768), (768,)
    grad_out, x = _normal(random, shape, ml_dtypes.bfloat16), _normal(random, shape, ml_dtypes.bfloat16)
    weight = _normal(random, width, ml_dtypes.bfloat16)
    _, mean, rstd = layer_norm(x, width)
    arguments = {"input": x, "normalized_shape": width, "mean": mean, "rstd": rstd, "weight": weight}
    return Case(layer_norm_backward, "a transformer", {"grad_out": grad_out, **arguments})


def diffusion(random: np.random.Generator) -> Case:
    """GroupNorm as diffusion models use it: 32 groups, float32 statistics beside 16-bit data."""
    shape = (2, 320, 32, 32)
    sizes: dict[str, Any] = {"N": 2, "C": 320, "HxW": 32 * 32, "group": 32}
    grad_out, x = _normal(random, shape, np.float16), _normal(random, shape, np.float16)
    weight = _normal(random, (320,), np.float16)
    _, mean, rstd = group_norm(x, None, None, **sizes)
    arguments = {"input": x, "mean": mean, "rstd": rstd, "weight": weight, **sizes}
    return Case(group_norm_backward, "a diffusion model", {"grad_out": grad_out, **arguments})


def convolution(random: np.random.Generator) -> Case:
    """Synchronised BatchNorm over two ranks of unequal size, seen from the first."""
    ranks = [(5, 64, 28, 28), (3, 64, 28, 28)]
    data = [(_normal(random, shape, F32), _normal(random, shape, F32)) for shape in ranks]
    counts = np.array([n * h * w for n, _, h, w in ranks], F32)
    weight = _normal(random, (64,), F32)
    grad_out, x = data[0]
    means, invstds = zip(*(batch_norm_stats(x) for _, x in data), strict=True)
    mean, invstd = batch_norm_gather_stats_with_counts(
        x, np.stack(means), np.stack(invstds), None, None, 0.1, 1e-5, counts
    )
    parts = [batch_norm_reduce_backward(dy, x, mean, invstd, weight, weight_g=False, bias_g=False) for dy, x in data]
    arguments = {
        "input": x,
        "mean": mean,
        "invstd": invstd,
        "weight": weight,
        "sum_dy": parts[0][0] + parts[1][0],
        "sum_dy_xmu": parts[0][1] + parts[1][1],
        "counter": counts,
    }
    return Case(batch_norm_elemt_backward, "one rank of two", {"grad_out": grad_out, **arguments})


def _normal(random: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return random.standard_normal(shape, F32).astype(dtype)
