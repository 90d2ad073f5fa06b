"""What the oracle's formulas have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Function = TypeVar("Function", bound=Callable[..., Any])


def float64(array: ArrayLike) -> Array:
    """The array in float64."""
    return np.asarray(array).astype(np.float64)


def or_ones(array: ArrayLike | None, shape: tuple[int, ...]) -> Array:
    """An optional factor: one where it is absent."""
    return np.ones(shape) if array is None else float64(array).reshape(shape)


def or_zeros(array: ArrayLike | None, shape: tuple[int, ...]) -> Array:
    """An optional term: zero where it is absent."""
    return np.zeros(shape) if array is None else float64(array).reshape(shape)


def mean_over(array: Array, axes: tuple[int, ...]) -> Array:
    """The mean over axes, kept as axes of size 1; NaN where there is nothing to sum."""
    count = np.prod([array.shape[axis] for axis in axes], dtype=np.float64)
    return np.asarray(np.sum(array, axis=axes, keepdims=True) / count)


def as_ieee(function: Function) -> Function:
    """Let NaN and Inf go where the formula sends them, without warnings."""

    @functools.wraps(function)
    def quiet(*args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return quiet  # type: ignore[return-value]
