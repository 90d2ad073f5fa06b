"""The data of a case: an operator's arguments, and the arrays that its results go to."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from normgrad.bench.cases import CHANNELS_LAST, GATHER, Case
from normgrad.contract.arrays import aligned_empty
from normgrad.contract.dtypes import BFLOAT16, FLOAT16, FLOAT32, numpy_dtype
from normgrad.operators import OPERATORS, Operator

EPS = 1e-5
NUMPY_DTYPES = {dtype.name: numpy_dtype(dtype) for dtype in (FLOAT32, FLOAT16, BFLOAT16)}

# Random numbers repeat after so many: a prime, so that no two rows or groups are alike.
_PERIOD = 4_194_301
_CHUNK = 1 << 22  # elements that are widened at a time


@dataclass(frozen=True)
class Traffic:
    """How often an operator must read and write a tensor of the data's size."""

    reads: int
    writes: int


TRAFFIC = {
    "layer_norm_backward": Traffic(2, 1),
    "group_norm_backward": Traffic(2, 1),
    "batch_norm_elemt_backward": Traffic(2, 1),
    "layer_norm": Traffic(1, 1),
    "group_norm": Traffic(1, 1),
    "batch_norm_elemt": Traffic(1, 1),
    "batch_norm_stats": Traffic(1, 0),
    "batch_norm_reduce_backward": Traffic(2, 0),
    GATHER: Traffic(2, 0),
}


@dataclass(frozen=True)
class Workload:
    """A case with its arguments as NumPy arrays and attributes by parameter name."""

    case: Case
    arguments: dict[str, Any]

    @property
    def operator(self) -> Operator[..., Any]:
        return OPERATORS[self.case.operator]

    @property
    def traffic(self) -> Traffic:
        return TRAFFIC[self.case.operator]

    def outputs(self) -> tuple[np.ndarray, ...]:
        """Fresh arrays for the results, in the order of the operator's outputs; full of NaN."""
        return tuple(self._output(name) for name in self.operator.signature.output_names)

    def _output(self, name: str) -> np.ndarray:
        case = self.case
        parameters = self.arguments.get("weight")
        if name in ("grad_input", "output"):
            array = empty(case.shape, case.dtype, case.layout)
        elif name in ("grad_weight", "grad_bias") and parameters is not None:
            array = np.empty_like(parameters)
        else:
            array = np.empty(self._statistics_shape(), np.float32)
        array[...] = np.nan
        return array

    def _statistics_shape(self) -> tuple[int, ...]:
        case = self.case
        if case.operator == "layer_norm":
            return (case.shape[0], 1)
        if case.operator == "group_norm":
            return (case.shape[0], case.group)
        return (case.shape[1],)


def empty(shape: tuple[int, ...], dtype: str, layout: str) -> np.ndarray:
    """An array of a shape whose elements lie in memory in the order of the layout."""
    if layout != CHANNELS_LAST:
        return aligned_empty(shape, np.dtype(NUMPY_DTYPES[dtype]))
    samples, channels, *places = shape
    return np.moveaxis(aligned_empty((samples, *places, channels), np.dtype(NUMPY_DTYPES[dtype])), -1, 1)


def workload(case: Case, seed: int = 0) -> Workload:
    """Normal data with the statistics that the forward pass would give it."""
    random = np.random.default_rng(seed)
    make = {"layer": _layer_norm, "group": _group_norm, "batch": _batch_norm}[case.operator.partition("_")[0]]
    taken = inspect.signature(OPERATORS[case.operator]).parameters
    arguments = _gather(case, random) if case.operator == GATHER else make(case, random)
    return Workload(case, {name: value for name, value in arguments.items() if name in taken})


def _data(case: Case, random: np.random.Generator) -> np.ndarray:
    array = empty(case.shape, case.dtype, case.layout)
    block = random.standard_normal(min(array.size, _PERIOD), np.float32).astype(array.dtype)
    in_memory = np.moveaxis(array, 1, -1) if case.layout == CHANNELS_LAST else array
    flat = in_memory.reshape(-1)
    for start in range(0, flat.size, block.size):
        part = flat[start : start + block.size]
        part[...] = block[: part.size]
    return array


def _vector(size: int, dtype: str, random: np.random.Generator) -> np.ndarray:
    return random.standard_normal(size, np.float32).astype(NUMPY_DTYPES[dtype])


def _statistics(data: np.ndarray, kept: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the reciprocal deviation over all but the first ``kept`` axes, in float32."""
    shape, others = data.shape[:kept], tuple(range(kept, data.ndim))
    mean, rstd = np.empty(shape, np.float32), np.empty(shape, np.float32)
    step = max(1, _CHUNK * len(data) // data.size)
    for start in range(0, len(data), step):
        part = data[start : start + step].astype(np.float64)
        mean[start : start + step] = part.mean(others)
        rstd[start : start + step] = 1 / np.sqrt(part.var(others) + EPS)
    return mean, rstd


def _layer_norm(case: Case, random: np.random.Generator) -> dict[str, Any]:
    rows, columns = case.shape
    x = _data(case, random)
    mean, rstd = _statistics(x, 1)
    return {
        "grad_out": _data(case, random),
        "input": x,
        "normalized_shape": (columns,),
        "mean": mean.reshape(rows, 1),
        "rstd": rstd.reshape(rows, 1),
        "weight": _vector(columns, case.dtype, random),
        "bias": _vector(columns, case.dtype, random),
        "eps": EPS,
    }


def _group_norm(case: Case, random: np.random.Generator) -> dict[str, Any]:
    samples, channels, *places = case.shape
    x = _data(case, random)
    grouped = x.reshape(samples, case.group, channels // case.group, *places)  # a view in either order
    mean, rstd = _statistics(grouped, 2)
    return {
        "grad_out": _data(case, random),
        "input": x,
        "mean": mean,
        "rstd": rstd,
        "weight": _vector(channels, case.dtype, random),
        "bias": _vector(channels, case.dtype, random),
        "N": samples,
        "C": channels,
        "HxW": math.prod(places),
        "group": case.group,
        "eps": EPS,
    }


def _batch_norm(case: Case, random: np.random.Generator) -> dict[str, Any]:
    channels = case.shape[1]
    x, grad_out = _data(case, random), _data(case, random)
    mean, invstd = _statistics(np.moveaxis(x, 1, 0), 1)
    count = case.elements // channels
    # Any sums would do; those of so many products of normal numbers are about as large.
    sum_dy, sum_dy_xmu = random.standard_normal((2, channels), np.float32) * np.float32(math.sqrt(count))
    return {
        "grad_out": grad_out,
        "input": x,
        "mean": mean,
        "invstd": invstd,
        "weight": _vector(channels, "float32", random),
        "bias": _vector(channels, "float32", random),
        "sum_dy": sum_dy,
        "sum_dy_xmu": sum_dy_xmu,
        "counter": np.array([count], np.int32),
        "eps": EPS,
        "input_g": True,
        "weight_g": True,
        "bias_g": True,
    }


def _gather(case: Case, random: np.random.Generator) -> dict[str, Any]:
    ranks, channels = case.shape
    return {
        "input": np.zeros((1, channels), np.float32),
        "mean": random.standard_normal(case.shape, np.float32),
        "invstd": random.uniform(0.5, 2, case.shape).astype(np.float32),
        "running_mean": None,
        "running_var": None,
        "momentum": 0.1,
        "eps": EPS,
        "counts": random.integers(1, 1000, ranks).astype(np.float32),
    }
