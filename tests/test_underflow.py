"""The underflow allowance U covers arithmetic that flushes products and quotients below 2⁻¹²⁶ to zero.

Each operator is evaluated by its formula in float64, its factors grouped in the ways that kernels group them, and every
product and quotient below 2⁻¹²⁶ becomes 0. So all errors are those of underflow, and must be within ½·ulp + 2⁻¹²⁶·U. On
some of the data they are beyond the whole bound with U = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from normgrad.testing import compare, oracle, terms
from normgrad.testing.expected import as_tuple
from normgrad.testing.terms import Magnitude

Arguments = Mapping[str, Any]
Results = dict[str, np.ndarray]

SEEDS = range(400)
SMALLEST_NORMAL = 2.0**-126


class Flushed:
    """Values whose products and quotients are flushed to zero below 2⁻¹²⁶."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values, np.float64)

    def __add__(self, other: Flushed) -> Flushed:
        return Flushed(self.values + other.values)

    def __sub__(self, other: Flushed) -> Flushed:
        return Flushed(self.values - other.values)

    def __mul__(self, other: Flushed) -> Flushed:
        return _flushed(self.values * other.values)

    def __truediv__(self, other: Flushed) -> Flushed:
        return _flushed(self.values / other.values)

    def sum(self, *axes: int) -> Flushed:
        return Flushed(np.sum(self.values, axis=axes, keepdims=True))

    def square_root(self) -> Flushed:
        return Flushed(np.sqrt(self.values))


def _flushed(exact: np.ndarray) -> Flushed:
    return Flushed(np.where(np.abs(exact) < SMALLEST_NORMAL, 0.0, exact))


ONE = Flushed(1.0)


@dataclass(frozen=True)
class Data:
    """The arguments of a call in the shapes in which they broadcast, ready for arithmetic."""

    arguments: Arguments
    shape: tuple[int, ...]
    parameters: tuple[int, ...]
    statistics: tuple[int, ...]

    def __getattr__(self, name: str) -> Flushed:
        shapes = dict.fromkeys(("grad_out", "input"), self.shape) | dict.fromkeys(("weight", "bias"), self.parameters)
        return Flushed(np.reshape(self.arguments[name], shapes.get(name, self.statistics)))


def scale(random: np.random.Generator, low: int, high: int) -> float:
    return 2.0 ** float(random.integers(low, high))


def normal(random: np.random.Generator, shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
    """Return normally distributed values of one scale, some of them much smaller."""
    values = random.standard_normal(shape) * scale(random, low, high)
    values *= np.where(random.random(shape) < 0.3, 2.0 ** -random.integers(0, 30, shape), 1.0)
    return values.astype(np.float32)


# LayerNorm and GroupNorm, backward. m is the mean of g·x̂.

ROWS, COLUMNS = 3, 8
GROUPED = (2, 2, 3, 4)  # samples, groups, channels of a group, positions


def own_statistics(x: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    mean = np.mean(x, axis=axes, keepdims=True, dtype=np.float64)
    rstd = 1 / np.sqrt(np.var(x, axis=axes, keepdims=True, dtype=np.float64))
    return mean.astype(np.float32), rstd.astype(np.float32)


def layer_norm_backward_data(random: np.random.Generator) -> Data:
    x = normal(random, (ROWS, COLUMNS), -50, 50)
    mean, rstd = own_statistics(x, (1,))
    grad_out = normal(random, x.shape, -145, -20)
    weight = normal(random, (COLUMNS,), -60, 20)
    arguments = {"grad_out": grad_out, "input": x, "normalized_shape": (COLUMNS,), "mean": mean, "rstd": rstd}
    return Data({**arguments, "weight": weight}, x.shape, (1, COLUMNS), (ROWS, 1))


def group_norm_backward_data(random: np.random.Generator) -> Data:
    samples, group, width, positions = GROUPED
    x = normal(random, GROUPED, -50, 50)
    mean, rstd = (a.reshape(samples, group) for a in own_statistics(x, (2, 3)))
    grad_out = normal(random, GROUPED, -145, -20)
    weight = normal(random, (group * width,), -60, 20)
    flat = (samples, group * width, positions)
    sizes = {"N": samples, "C": group * width, "HxW": positions, "group": group}
    arguments = {"grad_out": grad_out.reshape(flat), "input": x.reshape(flat), "mean": mean, "rstd": rstd}
    return Data({**arguments, "weight": weight, **sizes}, GROUPED, (1, group, width, 1), (samples, group, 1, 1))


def gradients(row: tuple[int, ...], column: tuple[int, ...]) -> dict[str, Callable[[Data], Results]]:
    """Return the groupings of LayerNorm's and GroupNorm's gradients."""

    def count(d: Data) -> Flushed:
        return Flushed(float(np.prod([d.shape[axis] for axis in row])))

    def means(d: Data) -> tuple[Flushed, Flushed, Flushed, Flushed]:
        x_hat, g = (d.input - d.mean) * d.rstd, d.grad_out * d.weight
        return x_hat, g, g.sum(*row) / count(d), (g * x_hat).sum(*row) / count(d)

    def results(d: Data, grad_input: Flushed, products: Flushed) -> Results:
        return {"grad_input": grad_input.values, "grad_weight": products.sum(*column).values}

    def as_written(d: Data) -> Results:
        x_hat, g, mean_g, m = means(d)
        return results(d, d.rstd * (g - mean_g - x_hat * m), d.grad_out * x_hat)

    def slope_of_x_hat(d: Data) -> Results:
        x_hat, g, mean_g, m = means(d)
        grad_input = d.rstd * g - d.rstd * mean_g - (d.rstd * m) * x_hat
        return results(d, grad_input, (d.grad_out * d.rstd) * (d.input - d.mean))

    def slope_of_x(d: Data) -> Results:
        x_hat, g, mean_g, m = means(d)
        grad_input = d.rstd * g - d.rstd * mean_g - (d.rstd * (d.rstd * m)) * (d.input - d.mean)
        return results(d, grad_input, d.grad_out * x_hat)

    return {"as written": as_written, "slope of x_hat": slope_of_x_hat, "slope of x": slope_of_x}


def weights_after_channel_sums(d: Data) -> Results:
    """Return GroupNorm's gradients, a weight multiplying the sums over its channel's positions."""
    x_hat, count = (d.input - d.mean) * d.rstd, Flushed(float(GROUPED[2] * GROUPED[3]))
    sum_g = (d.grad_out.sum(3) * d.weight).sum(2)
    sum_gx = ((d.grad_out * x_hat).sum(3) * d.weight).sum(2)
    grad_input = d.rstd * (d.grad_out * d.weight - (sum_g / count) - x_hat * (sum_gx / count))
    return {"grad_input": grad_input.values}


# The forward passes and BatchNorm's statistics.


def layer_norm_data(random: np.random.Generator) -> Data:
    x = normal(random, (ROWS, COLUMNS), *((-60, 50) if random.random() < 0.8 else (-149, -120)))
    weight, bias = normal(random, (COLUMNS,), -100, 20), normal(random, (COLUMNS,), -149, -120)
    arguments = {"input": x, "normalized_shape": (COLUMNS,), "weight": weight, "bias": bias, "eps": 2.0**-120}
    return Data(arguments, x.shape, (1, COLUMNS), ())


def group_norm_data(random: np.random.Generator) -> Data:
    samples, group, width, positions = GROUPED
    x = normal(random, GROUPED, *((-60, 50) if random.random() < 0.8 else (-149, -120)))
    sizes = {"N": samples, "C": group * width, "HxW": positions, "group": group, "eps": 2.0**-120}
    weight, bias = (normal(random, (group * width,), low, high) for low, high in ((-100, 20), (-149, -120)))
    arguments = {"input": x.reshape(samples, group * width, positions), "weight": weight, "bias": bias, **sizes}
    return Data(arguments, GROUPED, (1, group, width, 1), ())


def batch_norm_stats_data(random: np.random.Generator) -> Data:
    x = normal(random, (4, 3, 5), *((-60, 0) if random.random() < 0.5 else (-149, -120)))
    return Data({"input": x, "eps": 2.0**-120}, x.shape, (), ())


def moments(d: Data, row: tuple[int, ...]) -> tuple[Flushed, Flushed]:
    count = Flushed(float(np.prod([d.shape[axis] for axis in row])))
    mean = d.input.sum(*row) / count
    centred = d.input - mean
    variance = (centred * centred).sum(*row) / count
    return mean, ONE / (variance + Flushed(d.arguments["eps"])).square_root()


def normalised(row: tuple[int, ...]) -> dict[str, Callable[[Data], Results]]:
    """Return the groupings of a forward pass."""

    def as_written(d: Data) -> Results:
        mean, rstd = moments(d, row)
        output = (d.input - mean) * rstd * d.weight + d.bias
        return {"output": output.values, "mean": mean.values, "rstd": rstd.values}

    def scale_first(d: Data) -> Results:
        mean, rstd = moments(d, row)
        return {"output": ((d.input - mean) * (rstd * d.weight) + d.bias).values}

    return {"as written": as_written, "rstd times weight first": scale_first}


def batch_norm_stats(d: Data) -> Results:
    mean, invstd = moments(d, (0, 2))
    return {"mean": mean.values, "invstd": invstd.values}


def gather_data(random: np.random.Generator) -> Data:
    ranks, channels = 3, 4
    means = normal(random, (ranks, channels), *((-70, 0) if random.random() < 0.5 else (-149, -110)))
    invstd = (random.uniform(1, 2, (ranks, channels)) * scale(random, -20, 62)).astype(np.float32)
    arguments = {
        "input": np.zeros((1, channels), np.float32),
        "mean": means,
        "invstd": invstd,
        "running_mean": normal(random, (channels,), -149, -110),
        "running_var": np.abs(normal(random, (channels,), -149, -110)),
        "momentum": 0.25,
        "eps": 2.0**-120,
        "counts": random.integers(2, 9, ranks).astype(np.int32),
    }
    return Data(arguments, (), (), (ranks, channels))


def gathered(weighted: Callable[[Flushed, Flushed, Flushed], Flushed]) -> Callable[[Data], Results]:
    """Return the combined statistics, with a way to weight the ranks' values by their counts."""

    def results(d: Data) -> Results:
        counts = Flushed(np.reshape(d.arguments["counts"], (-1, 1)))
        n, eps, momentum = counts.sum(0), Flushed(d.arguments["eps"]), Flushed(d.arguments["momentum"])
        mean = weighted(d.mean, counts, n)
        between = d.mean - mean
        variance = weighted(ONE / (d.invstd * d.invstd) - eps + between * between, counts, n)
        unbiased = variance * n / (n - ONE)
        old_mean, old_var = (Flushed(d.arguments[name].reshape(1, -1)) for name in ("running_mean", "running_var"))
        return {
            "mean_all": mean.values,
            "invstd_all": (ONE / (variance + eps).square_root()).values,
            "running_mean": ((ONE - momentum) * old_mean + momentum * mean).values,
            "running_var": ((ONE - momentum) * old_var + momentum * unbiased).values,
        }

    return results


# BatchNorm, element-wise and reduction. The statistics are arguments: any values.


def channel_data(random: np.random.Generator, **ranges: tuple[int, int]) -> Data:
    shape = (4, 3, 5)
    arguments = {
        name: normal(random, shape if name in ("grad_out", "input") else (3,), *limits)
        for name, limits in ranges.items()
    }
    arguments["invstd"] = np.abs(arguments["invstd"])
    return Data(arguments, shape, (1, 3, 1), (1, 3, 1))


def elemt_data(random: np.random.Generator) -> Data:
    return channel_data(
        random, input=(-100, 20), weight=(-80, 20), bias=(-149, -120), mean=(-100, 20), invstd=(-60, 60)
    )


def elemt_backward_data(random: np.random.Generator) -> Data:
    ranges = {"grad_out": (-149, 0), "input": (-50, 20), "mean": (-50, 20), "invstd": (-60, 40), "weight": (-60, 20)}
    data = channel_data(random, **ranges, sum_dy=(-149, 0), sum_dy_xmu=(-149, 0))
    return Data({**data.arguments, "counter": np.array([7, 13], np.int32)}, data.shape, (1, 3, 1), (1, 3, 1))


def reduce_data(random: np.random.Generator) -> Data:
    return channel_data(random, grad_out=(-149, 0), input=(-80, 20), mean=(-80, 20), invstd=(-60, 60), weight=(0, 1))


def elemt_as_written(d: Data) -> Results:
    return {"output": ((d.input - d.mean) * d.invstd * d.weight + d.bias).values}


def elemt_scale_first(d: Data) -> Results:
    return {"output": ((d.input - d.mean) * (d.invstd * d.weight) + d.bias).values}


COUNT = Flushed(20.0)


def elemt_backward_as_written(d: Data) -> Results:
    term = (d.input - d.mean) * (d.invstd * d.invstd) * d.sum_dy_xmu / COUNT
    return {"grad_input": ((d.grad_out - d.sum_dy / COUNT - term) * d.invstd * d.weight).values}


def elemt_backward_means_first(d: Data) -> Results:
    term = (d.input - d.mean) * (d.invstd * d.invstd * (d.sum_dy_xmu / COUNT))
    return {"grad_input": ((d.grad_out - d.sum_dy / COUNT - term) * (d.invstd * d.weight)).values}


def elemt_backward_by_x_hat(d: Data) -> Results:
    term = ((d.input - d.mean) * d.invstd) * (d.invstd * (d.sum_dy_xmu / COUNT))
    return {"grad_input": ((d.grad_out - d.sum_dy / COUNT - term) * d.invstd * d.weight).values}


def reduce_as_written(d: Data) -> Results:
    centred = (d.grad_out * (d.input - d.mean)).sum(0, 2)
    return {"sum_dy_xmu": centred.values, "grad_weight": (centred * d.invstd).values}


def reduce_by_x_hat(d: Data) -> Results:
    return {"grad_weight": (d.grad_out * ((d.input - d.mean) * d.invstd)).sum(0, 2).values}


def reduce_by_scaled_gradients(d: Data) -> Results:
    return {"grad_weight": ((d.grad_out * d.invstd) * (d.input - d.mean)).sum(0, 2).values}


@dataclass(frozen=True)
class Formulas:
    """The data, groupings and names of the outputs of an operator; in-place outputs are last."""

    data: Callable[[np.random.Generator], Data]
    outputs: tuple[str, ...]
    groupings: dict[str, Callable[[Data], Results]]


GRADIENTS = ("grad_input", "grad_weight", "grad_bias")
FORWARD = ("output", "mean", "rstd")
FORMULAS = {
    "layer_norm_backward": Formulas(layer_norm_backward_data, GRADIENTS, gradients((1,), (0,))),
    "group_norm_backward": Formulas(
        group_norm_backward_data,
        GRADIENTS,
        {**gradients((2, 3), (0, 3)), "weights after channel sums": weights_after_channel_sums},
    ),
    "layer_norm": Formulas(layer_norm_data, FORWARD, normalised((1,))),
    "group_norm": Formulas(group_norm_data, FORWARD, normalised((2, 3))),
    "batch_norm_stats": Formulas(batch_norm_stats_data, ("mean", "invstd"), {"as written": batch_norm_stats}),
    "batch_norm_gather_stats_with_counts": Formulas(
        gather_data,
        ("mean_all", "invstd_all", "running_mean", "running_var"),
        {
            "as written": gathered(lambda values, counts, n: (values * counts).sum(0) / n),
            "shares of the counts": gathered(lambda values, counts, n: (values * (counts / n)).sum(0)),
        },
    ),
    "batch_norm_elemt": Formulas(
        elemt_data, ("output",), {"as written": elemt_as_written, "invstd times weight first": elemt_scale_first}
    ),
    "batch_norm_elemt_backward": Formulas(
        elemt_backward_data,
        ("grad_input",),
        {
            "as written": elemt_backward_as_written,
            "means first": elemt_backward_means_first,
            "by x_hat": elemt_backward_by_x_hat,
        },
    ),
    "batch_norm_reduce_backward": Formulas(
        reduce_data,
        ("sum_dy", "sum_dy_xmu", "grad_weight", "grad_bias"),
        {
            "as written": reduce_as_written,
            "by x_hat": reduce_by_x_hat,
            "by scaled gradients": reduce_by_scaled_gradients,
        },
    ),
}


def expected(operator: str, data: Data, names: tuple[str, ...]) -> dict[str, tuple[np.ndarray, Magnitude]]:
    """Return the oracle's values and the error scales by the name of the output."""
    arguments = dict(data.arguments)
    scales = as_tuple(getattr(terms, operator)(**arguments))
    moved = {name: arguments[name].astype(np.float64) for name in arguments if name.startswith("running")}
    exact = (*as_tuple(getattr(oracle, operator)(**{**arguments, **moved})), *moved.values())
    return dict(zip(names, zip(exact, scales, strict=True), strict=True))


@pytest.mark.parametrize(
    ("operator", "grouping"), [(name, grouping) for name, found in FORMULAS.items() for grouping in found.groupings]
)
def test_flushed_products_are_within_the_bound_and_would_not_be_without_u(operator: str, grouping: str) -> None:
    formulas = FORMULAS[operator]
    needed: dict[str, bool] = {}
    for seed in SEEDS:
        data = formulas.data(np.random.default_rng(seed))
        scales = expected(operator, data, formulas.outputs)
        with np.errstate(all="ignore"):
            results = formulas.groupings[grouping](data)
        for name, result in results.items():
            exact, magnitude = scales[name]
            assert np.all(magnitude.peak < 2.0**126)
            with np.errstate(under="ignore"):
                result = result.reshape(exact.shape).astype(np.float32)
            # Relative errors are those of float64: a share of 2^-24 of what T allows for.
            report = compare(result, exact, Magnitude(2.0**-24 * magnitude.total, underflow=magnitude.underflow))
            assert report.passed, (seed, name, report.text)
            needed[name] = needed.get(name, False) or not compare(result, exact, magnitude.total).passed
    assert all(needed.values()), needed
