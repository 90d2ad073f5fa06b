"""Calls on data of six channels and many places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from support.dtypes import NUMPY

SAMPLES, CHANNELS, PLACES, GROUPS = 2, 6, 5000, 2
_SIZES = {"N": SAMPLES, "C": CHANNELS, "HxW": PLACES, "group": GROUPS}


def _group_norm(x: np.ndarray, dy: np.ndarray, vector: Callable[[], np.ndarray]) -> dict[str, Any]:
    mean, rstd = (np.empty((SAMPLES, GROUPS), np.float32) for _ in range(2))
    outputs = {"output": np.empty_like(x), "mean": mean, "rstd": rstd}
    return {"input": x, "weight": vector(), "bias": vector(), **_SIZES, "eps": 1e-5, **outputs}


def _group_norm_backward(x: np.ndarray, dy: np.ndarray, vector: Callable[[], np.ndarray]) -> dict[str, Any]:
    statistics = {name: np.resize(vector(), (SAMPLES, GROUPS)) for name in ("mean", "rstd")}
    outputs = {"grad_input": np.empty_like(x), "grad_weight": vector(), "grad_bias": vector()}
    return {"grad_out": dy, "input": x, **statistics, "weight": vector(), **_SIZES, **outputs}


def _batch_norm_elemt(x: np.ndarray, dy: np.ndarray, vector: Callable[[], np.ndarray]) -> dict[str, Any]:
    vectors = {name: vector() for name in ("weight", "bias", "mean", "invstd")}
    return {"input": x, **vectors, "eps": 1e-5, "output": np.empty_like(x)}


def _batch_norm_elemt_backward(x: np.ndarray, dy: np.ndarray, vector: Callable[[], np.ndarray]) -> dict[str, Any]:
    vectors = {name: vector() for name in ("mean", "invstd", "weight", "sum_dy", "sum_dy_xmu")}
    counter = np.array([SAMPLES * PLACES], np.int32)
    return {"grad_out": dy, "input": x, **vectors, "counter": counter, "grad_input": np.empty_like(x)}


SIX_CHANNELS = {
    "group_norm": _group_norm,
    "group_norm_backward": _group_norm_backward,
    "batch_norm_elemt": _batch_norm_elemt,
    "batch_norm_elemt_backward": _batch_norm_elemt_backward,
}


def six_channels(operator: str, dtype: str, channels_last: bool) -> dict[str, Any]:
    """The arguments of a call, its outputs among them."""
    rng = np.random.default_rng(0)

    def data() -> np.ndarray:
        values = rng.normal(0.5, 2.0, (SAMPLES, CHANNELS, PLACES)).astype(NUMPY[dtype])
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(values, 1, -1)), -1, 1) if channels_last else values

    return SIX_CHANNELS[operator](data(), data(), lambda: rng.normal(size=CHANNELS).astype(np.float32))
