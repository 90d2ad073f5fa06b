"""Values to compute with, by style; all from one seed."""

from __future__ import annotations

import numpy as np

#: How the values of a call are chosen. "special" replaces elements of any tensor by NaN and Inf.
STYLES = ("plain", "wide", "offset", "whole", "constant", "tiny", "huge", "special")

_SMALL = {"float16": 2.0**-18}  # subnormal in float16, normal in float32
_LARGE = {"float16": 2.0**12}


def data(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, style: str) -> np.ndarray:
    """Values of data: gradients, inputs, weights, means."""
    values = rng.standard_normal(shape)
    if style == "wide":
        return values * 10.0 ** rng.uniform(-3, 3, shape)
    if style == "offset":
        return values + rng.choice((-300.0, 300.0))
    if style == "whole":
        return np.round(values * 4)
    if style == "constant":
        return np.full(shape, rng.choice((0.0, -0.0, 1.0, -2.5)))
    if style == "tiny":
        # Of other dtypes also values whose products, and that themselves, are below float32's smallest normal number.
        return values * _SMALL.get(dtype, 2.0 ** float(rng.integers(-140, -30)))
    if style == "huge":
        return values * _LARGE.get(dtype, 1e15)
    if style == "special":
        return sprinkled(rng, values)
    return values


def scales(rng: np.random.Generator, shape: tuple[int, ...], style: str) -> np.ndarray:
    """Values of reciprocal standard deviations."""
    values = 2.0 ** rng.uniform(-3, 3, shape)
    return sprinkled(rng, values) if style == "special" and rng.random() < 0.2 else values


def counts(rng: np.random.Generator, shape: tuple[int, ...], style: str) -> np.ndarray:
    """Elements per rank; some have none, all of them now and then."""
    values = rng.integers(0, 40, shape).astype(np.float64)
    return values * 0 if style == "special" and rng.random() < 0.3 else values


def sprinkled(rng: np.random.Generator, values: np.ndarray) -> np.ndarray:
    """Some values replaced by NaN, Inf and zero."""
    odd = rng.choice(np.array((np.nan, np.inf, -np.inf, 0.0)), values.shape)
    return np.where(rng.random(values.shape) < 0.08, odd, values)
