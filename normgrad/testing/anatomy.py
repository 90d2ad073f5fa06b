"""What an element of a result is made of: the inputs at its index, and the terms that its formula adds up.

For every operator a function of its arguments that gives one :class:`Anatomy` per output, by name. An element whose
terms are large and nearly cancel is hard to compute; one that is wrong although nothing cancels shows a bug.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from normgrad.oracle.batch_norm import channels
from normgrad.oracle.float64 import Array, as_ieee, float64, mean_over, or_ones, or_zeros
from normgrad.oracle.group_norm import positions
from normgrad.testing.lost_terms import Summands
from normgrad.testing.row_values import RowValue


@dataclass(frozen=True)
class Anatomy:
    """Values behind an output; every array broadcasts to ``shape``, which has the output's elements in its order."""

    shape: tuple[int, ...]
    inputs: dict[str, Array] = field(default_factory=dict)
    terms: dict[str, Array] = field(default_factory=dict)
    count: float = 0.0  # elements that a statistic is taken over
    summands: Summands | None = None
    row_values: Callable[[], dict[str, RowValue]] = dict
    row_length: int = 0

    def at(self, indices: np.ndarray) -> tuple[dict[str, Array], dict[str, Array]]:
        """The inputs and the terms of the elements at these indices of the flattened output."""
        index = np.unravel_index(indices, self.shape)

        def values(arrays: Mapping[str, Array]) -> dict[str, Array]:
            return {name: np.broadcast_to(array, self.shape)[index] for name, array in arrays.items()}

        return values(self.inputs), values(self.terms)


def _given(**arrays: Array | None) -> dict[str, Array]:
    return {name: array for name, array in arrays.items() if array is not None}


def _optional(array: Any, shape: tuple[int, ...]) -> Array | None:
    return None if array is None else float64(array).reshape(shape)


def _sum(what: str, values: Array, axes: tuple[int, ...], *nouns: str) -> Anatomy:
    """A sum of many terms: those of either sign, and the largest; ``nouns`` as :class:`Summands` has them."""
    positive = np.sum(np.where(values > 0, values, 0.0), axis=axes)
    negative = np.sum(np.where(values < 0, values, 0.0), axis=axes)
    largest = np.max(np.abs(values), axis=axes, initial=0.0)
    names = (f"Σ of {what} > 0", f"Σ of {what} < 0", f"largest |{what}|")
    terms = dict(zip(names, (positive, negative, largest), strict=True))
    return Anatomy(positive.shape, {}, terms, summands=Summands(values, axes, nouns))


def _backward(
    data: tuple[int, ...],
    statistics: tuple[int, ...],
    parameters: tuple[int, ...],
    row: dict[int, str],
    column: dict[int, str],
    arguments: Mapping[str, Any],
) -> dict[str, Anatomy]:
    """LayerNorm and GroupNorm alike: statistics over the axes ``row``, weights summed over the axes ``column``."""
    axes = tuple(row)
    dy, x = float64(arguments["grad_out"]).reshape(data), float64(arguments["input"]).reshape(data)
    mean, rstd = float64(arguments["mean"]).reshape(statistics), float64(arguments["rstd"]).reshape(statistics)
    g, x_hat = dy * or_ones(arguments["weight"], parameters), (x - mean) * rstd
    weight = _optional(arguments["weight"], parameters)
    terms = {
        "rstd·g": rstd * g,
        "−rstd·Σg/N": -rstd * mean_over(g, axes),
        "−rstd·x̂·Σ(g·x̂)/N": -rstd * x_hat * mean_over(g * x_hat, axes),
    }

    count = math.prod(data[axis] for axis in axes)

    def row_values() -> dict[str, RowValue]:
        g, x_hat = dy * or_ones(arguments["weight"], parameters), (x - mean) * rstd
        nouns = tuple(row.values())
        return {
            "Σg": RowValue(np.broadcast_to(-rstd / count, data), Summands(g, axes, nouns)),
            "Σ(g·x̂)": RowValue(-rstd * x_hat / count, Summands(g * x_hat, axes, nouns)),
        }

    inputs = _given(grad_out=dy, input=x, mean=mean, rstd=rstd, weight=weight)
    return {
        "grad_input": Anatomy(data, inputs, terms, row_values=row_values, row_length=count),
        "grad_weight": _sum("grad_out·x̂", dy * x_hat, tuple(column), *column.values()),
        "grad_bias": _sum("grad_out", dy, tuple(column), *column.values()),
    }


def _forward(
    data: tuple[int, ...],
    parameters: tuple[int, ...],
    row: tuple[int, ...],
    nouns: tuple[str, ...],
    arguments: Mapping[str, Any],
) -> dict[str, Anatomy]:
    """The output and its statistics over the axes ``row``, with ``nouns`` as :class:`Summands` has them."""
    x = float64(arguments["input"]).reshape(data)
    mean = mean_over(x, row)
    variance, eps = mean_over((x - mean) ** 2, row), np.asarray(float(arguments["eps"]))
    rstd = 1 / np.sqrt(variance + eps)
    weight, bias = (_optional(arguments.get(name), parameters) for name in ("weight", "bias"))
    terms = {
        "x̂·weight": (x - mean) * rstd * or_ones(weight, parameters),
        "bias": or_zeros(bias, parameters),
    }
    count = math.prod(data[axis] for axis in row)

    def row_values() -> dict[str, RowValue]:
        scale = np.broadcast_to(or_ones(weight, parameters), data)
        return {"mean": RowValue(-rstd * scale), "rstd": RowValue((x - mean) * scale)}

    inputs = _given(input=x, mean=mean, rstd=rstd, weight=weight, bias=bias)
    return {
        "output": Anatomy(data, inputs, terms, row_values=row_values, row_length=count),
        "mean": _sum("input/N", x / count, row, *nouns),
        "rstd": Anatomy(variance.shape, {}, {"variance": variance, "eps": eps}, count),
    }


def _layer_norm_shapes(arguments: Mapping[str, Any]) -> tuple[int, int]:
    columns = math.prod(arguments["normalized_shape"])
    shape = np.shape(arguments["input"])
    return math.prod(shape[: len(shape) - len(arguments["normalized_shape"])]), columns


def _layer_norm_backward(arguments: Mapping[str, Any]) -> dict[str, Anatomy]:
    rows, columns = _layer_norm_shapes(arguments)
    return _backward((rows, columns), (rows, 1), (1, columns), {1: "column"}, {0: "row"}, arguments)


def _layer_norm(arguments: Mapping[str, Any]) -> dict[str, Anatomy]:
    rows, columns = _layer_norm_shapes(arguments)
    return _forward((rows, columns), (1, columns), (1,), ("column",), arguments)


def _group_norm_shapes(arguments: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    samples, group = arguments["N"], arguments["group"]
    width = arguments["C"] // group
    return (samples, group, width, positions(samples, arguments["HxW"])), (1, group, width, 1)


def _group_norm_backward(arguments: Mapping[str, Any]) -> dict[str, Anatomy]:
    data, parameters = _group_norm_shapes(arguments)
    row, column = {2: "channel", 3: "position"}, {0: "sample", 3: "position"}
    return _backward(data, (*data[:2], 1, 1), parameters, row, column, arguments)


def _group_norm(arguments: Mapping[str, Any]) -> dict[str, Anatomy]:
    data, parameters = _group_norm_shapes(arguments)
    return _forward(data, parameters, (2, 3), ("channel", "position"), arguments)


_OF_A_CHANNEL = ("sample", "position")


def _batch_norm_elemt_backward(arguments: Mapping[str, Any]) -> dict[str, Anatomy]:
    dy, x = float64(arguments["grad_out"]), float64(arguments["input"])
    shape, _ = channels(x)
    mean, invstd, sum_dy, sum_dy_xmu = (
        float64(arguments[name]).reshape(shape) for name in ("mean", "invstd", "sum_dy", "sum_dy_xmu")
    )
    weight, n = _optional(arguments["weight"], shape), np.sum(float64(arguments["counter"]))
    scale = invstd * or_ones(weight, shape)
    statistics = _given(mean=mean, invstd=invstd, weight=weight, sum_dy=sum_dy, sum_dy_xmu=sum_dy_xmu, n=np.asarray(n))
    terms = {
        "grad_out·invstd·weight": dy * scale,
        "−sum_dy/n·invstd·weight": -sum_dy / n * scale,
        "−(x − mean)·invstd²·sum_dy_xmu/n·invstd·weight": -(x - mean) * invstd**2 * sum_dy_xmu / n * scale,
    }
    return {"grad_input": Anatomy(x.shape, {"grad_out": dy, "input": x, **statistics}, terms)}


def _batch_norm_stats(arguments: Mapping[str, Any]) -> dict[str, Anatomy]:
    x = float64(arguments["input"])
    shape, others = channels(x)
    found = _forward(x.shape, shape, others, _OF_A_CHANNEL[: len(others)], arguments)
    return {"mean": found["mean"], "invstd": found["rstd"]}


def _batch_norm_gather_stats_with_counts(arguments: Mapping[str, Any]) -> dict[str, Anatomy]:
    counts = float64(arguments["counts"]).reshape(-1, 1)
    n, momentum, eps = np.sum(counts), float(arguments["momentum"]), float(arguments["eps"])
    means, variances = float64(arguments["mean"]), 1 / float64(arguments["invstd"]) ** 2 - eps

    def weighted(values: Array) -> Array:
        return np.asarray(np.where(counts == 0, 0.0, values * counts))

    mean_all = np.sum(weighted(means), axis=0) / n
    within, between = (np.sum(weighted(v), axis=0) for v in (variances, (means - mean_all) ** 2))
    found = {
        "mean_all": _sum("mean·count/n", weighted(means) / n, (0,), "rank"),
        "invstd_all": Anatomy(
            mean_all.shape, {}, {"within ranks": within / n, "between ranks": between / n, "eps": np.asarray(eps)}, n
        ),
    }
    for name, new in (("running_mean", mean_all), ("running_var", (within + between) / (n - 1))):
        if arguments[name] is not None:
            old = float64(arguments[name])
            terms = {"(1 − momentum)·old": (1 - momentum) * old, "momentum·new": momentum * new}
            found[name] = Anatomy(old.shape, {name: old}, terms)
    return found


def _batch_norm_elemt(arguments: Mapping[str, Any]) -> dict[str, Anatomy]:
    x = float64(arguments["input"])
    shape, _ = channels(x)
    mean, invstd = (float64(arguments[name]).reshape(shape) for name in ("mean", "invstd"))
    weight, bias = (_optional(arguments[name], shape) for name in ("weight", "bias"))
    terms = {"x̂·weight": (x - mean) * invstd * or_ones(weight, shape), "bias": or_zeros(bias, shape)}
    return {"output": Anatomy(x.shape, _given(input=x, mean=mean, invstd=invstd, weight=weight, bias=bias), terms)}


def _batch_norm_reduce_backward(arguments: Mapping[str, Any]) -> dict[str, Anatomy]:
    dy, x = float64(arguments["grad_out"]), float64(arguments["input"])
    shape, others = channels(x)
    nouns = _OF_A_CHANNEL[: len(others)]
    xmu = x - float64(arguments["mean"]).reshape(shape)
    scaled = dy * xmu * float64(arguments["invstd"]).reshape(shape)
    sum_dy = _sum("grad_out", dy, others, *nouns)
    return {
        "sum_dy": sum_dy,
        "sum_dy_xmu": _sum("grad_out·(x − mean)", dy * xmu, others, *nouns),
        "grad_weight": _sum("grad_out·x̂", scaled, others, *nouns),
        "grad_bias": sum_dy,
    }


_ANATOMIES: dict[str, Callable[[Mapping[str, Any]], dict[str, Anatomy]]] = {
    function.__name__[1:]: function
    for function in (
        _layer_norm_backward,
        _group_norm_backward,
        _batch_norm_elemt_backward,
        _layer_norm,
        _group_norm,
        _batch_norm_stats,
        _batch_norm_gather_stats_with_counts,
        _batch_norm_elemt,
        _batch_norm_reduce_backward,
    )
}


@as_ieee
def anatomy(operator: str, arguments: Mapping[str, Any]) -> dict[str, Anatomy]:
    """The anatomy of every output of a call, by name."""
    return _ANATOMIES[operator](arguments)
