"""The data of a case: an operator's arguments, and the arrays that its results go to.

They are NumPy arrays for the CPU and PyTorch tensors for a CUDA device, where they are generated too.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from normgrad.bench.cases import CHANNELS_LAST, CONTIGUOUS, GATHER, Case
from normgrad.bench.patterns import NORMAL, Pattern, Values
from normgrad.bench.tensors import as_float32, as_float64, like, on_device
from normgrad.contract.arrays import aligned_empty
from normgrad.contract.dtypes import BFLOAT16, FLOAT16, FLOAT32, numpy_dtype
from normgrad.operators import OPERATORS, Operator

EPS = 1e-5
NUMPY_DTYPES = {dtype.name: numpy_dtype(dtype) for dtype in (FLOAT32, FLOAT16, BFLOAT16)}

# On the CPU random elements repeat after so many: a prime, so that no two rows or groups are equal.
_PERIOD = 4_194_301
_CHUNK = 1 << 22  # elements that are converted to float64 at a time


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
    """A case with its arguments, arrays and attributes, by parameter name.

    Attributes
    ----------
    device : str
        ``cpu`` (the arrays are NumPy's) or ``cuda`` (they are PyTorch's).
    """

    case: Case
    arguments: dict[str, Any]
    device: str = "cpu"

    @property
    def operator(self) -> Operator:
        return OPERATORS[self.case.operator]

    @property
    def traffic(self) -> Traffic:
        return TRAFFIC[self.case.operator]

    def outputs(self) -> tuple[Any, ...]:
        """Return fresh arrays for the results, in the order of the operator's outputs; full of NaN."""
        return tuple(self._output(name) for name in self.operator.signature.output_names)

    def _output(self, name: str) -> Any:
        case = self.case
        if name in ("grad_input", "output"):
            array = empty(case.shape, case.dtype, case.layout, self.device)
        elif name in ("grad_weight", "grad_bias"):
            array = empty(tuple(self.arguments["weight"].shape), _parameter_dtype(case), CONTIGUOUS, self.device)
        else:
            array = empty(self._statistics_shape(), "float32", CONTIGUOUS, self.device)
        array[...] = math.nan
        return array

    def _statistics_shape(self) -> tuple[int, ...]:
        case = self.case
        if case.operator == "layer_norm":
            return (case.shape[0], 1)
        if case.operator == "group_norm":
            return (case.shape[0], case.group)
        return (case.shape[1],)


def empty(shape: tuple[int, ...], dtype: str, layout: str, device: str = "cpu") -> Any:
    """Return an array of a shape whose memory is in the order of the layout."""
    if layout == CHANNELS_LAST:
        samples, channels, *spatial = shape
        last = empty((samples, *spatial, channels), dtype, CONTIGUOUS, device)
        return np.moveaxis(last, -1, 1) if device == "cpu" else last.movedim(-1, 1)
    if device == "cpu":
        return aligned_empty(shape, np.dtype(NUMPY_DTYPES[dtype]))
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


def tensor_of(pattern: Pattern, operator: str) -> str | None:
    """Return which argument of an operator a pattern changes; None where the operator does not take it."""
    tensor = pattern.tensor("grad_out" in _parameters(operator))
    return "mean" if operator == GATHER and tensor == "input" else tensor


def workload(case: Case, seed: int = 0, device: str = "cpu", pattern: Pattern = NORMAL) -> Workload:
    """Return normal data, changed as the pattern says, with the statistics and sums that training would give it."""
    random = np.random.default_rng(seed)
    complete = {"layer": _layer_norm, "group": _group_norm, "batch": _batch_norm}[case.operator.partition("_")[0]]
    taken = _parameters(case.operator)
    with np.errstate(all="ignore"):  # NaN and Inf are among the patterns, and 16-bit dtypes underflow
        if case.operator == GATHER:
            arguments = _gather(case, random, pattern)
        else:
            arguments = {name: _data(case, random, device) for name in ("input", "grad_out") if name in taken}
            if pattern.change is not None:
                _change(case, pattern, arguments[tensor_of(pattern, case.operator) or ""])
            arguments |= complete(case, random, arguments)
    given = {name: arguments[name] for name in taken if name in arguments}
    return Workload(
        case,
        {name: on_device(value, device) if isinstance(value, np.ndarray) else value for name, value in given.items()},
        device,
    )


def _parameters(operator: str) -> tuple[str, ...]:
    return tuple(inspect.signature(OPERATORS[operator]).parameters)


def _parameter_dtype(case: Case) -> str:
    """Return the dtype of weight and bias: the data's for LayerNorm and GroupNorm."""
    return "float32" if case.operator.startswith("batch_norm") else case.dtype


def _data(case: Case, random: np.random.Generator, device: str) -> Any:
    array = empty(case.shape, case.dtype, case.layout, device)
    if device != "cpu":
        import torch

        generator = torch.Generator(device).manual_seed(int(random.integers(1 << 62)))
        return array.normal_(generator=generator)
    block = random.standard_normal(min(array.size, _PERIOD), np.float32).astype(array.dtype)
    in_memory = np.moveaxis(array, 1, -1) if case.layout == CHANNELS_LAST else array
    flat = in_memory.reshape(-1)
    for start in range(0, flat.size, block.size):
        part = flat[start : start + block.size]
        part[...] = block[: part.size]
    return array


def _vector(size: int, dtype: str, random: np.random.Generator) -> np.ndarray:
    return random.standard_normal(size, np.float32).astype(NUMPY_DTYPES[dtype])


def _by_row(case: Case, data: Any) -> tuple[Any, int]:
    """Return a view with the rows (what shares statistics) first, and how many of its axes index them."""
    if case.operator.startswith("group_norm"):
        samples, channels, *spatial = case.shape
        return data.reshape(samples, case.group, channels // case.group, *spatial), 2  # a view in either layout
    if case.operator.startswith("batch_norm") and case.operator != GATHER:
        return data.swapaxes(0, 1), 1
    return data, 1


def _change(case: Case, pattern: Pattern, data: Any) -> None:
    assert pattern.change is not None
    values = as_float32(data)
    pattern.change(Values(values, *_by_row(case, values)))
    data[...] = values


def _chunks(data: Any) -> Iterator[slice]:
    """Yield slices of the first axis, each of about as many elements as are converted to float64 at a time."""
    step = max(1, _CHUNK * len(data) // math.prod(data.shape))
    for start in range(0, len(data), step):
        yield slice(start, start + step)


def _statistics(case: Case, x: Any) -> tuple[Any, Any]:
    """Return the mean and the reciprocal standard deviation of each row, in float32."""
    data, row_axes = _by_row(case, x)
    shape, others = tuple(data.shape[:row_axes]), tuple(range(row_axes, data.ndim))
    mean, rstd = (like(np.empty(shape, np.float32), x) for _ in range(2))
    for chunk in _chunks(data):
        part = as_float64(data[chunk])
        centre = part.mean(others, keepdims=True)
        variance = ((part - centre) ** 2).mean(others)
        mean[chunk] = centre.reshape(variance.shape)
        rstd[chunk] = (variance + EPS) ** -0.5
    return mean, rstd


def _sums(case: Case, dy: Any, x: Any, mean: Any) -> tuple[Any, Any]:
    """Return Σdy and Σdy·(x − mean) of each channel, in float32."""
    gradients, _ = _by_row(case, dy)
    data, _ = _by_row(case, x)
    others = tuple(range(1, data.ndim))
    sum_dy, sum_dy_xmu = (like(np.empty(len(data), np.float32), x) for _ in range(2))
    for chunk in _chunks(data):
        part = as_float64(gradients[chunk])
        centred = as_float64(data[chunk]) - as_float64(mean[chunk]).reshape(-1, *(1 for _ in others))
        sum_dy[chunk] = part.sum(others)
        sum_dy_xmu[chunk] = (part * centred).sum(others)
    return sum_dy, sum_dy_xmu


# Each returns what an operator takes beside the data.


def _layer_norm(case: Case, random: np.random.Generator, data: dict[str, Any]) -> dict[str, Any]:
    rows, columns = case.shape
    mean, rstd = _statistics(case, data["input"])
    return {
        "normalized_shape": (columns,),
        "mean": mean.reshape(rows, 1),
        "rstd": rstd.reshape(rows, 1),
        "weight": _vector(columns, case.dtype, random),
        "bias": _vector(columns, case.dtype, random),
        "eps": EPS,
    }


def _group_norm(case: Case, random: np.random.Generator, data: dict[str, Any]) -> dict[str, Any]:
    samples, channels, *spatial = case.shape
    mean, rstd = _statistics(case, data["input"])
    return {
        "mean": mean,
        "rstd": rstd,
        "weight": _vector(channels, case.dtype, random),
        "bias": _vector(channels, case.dtype, random),
        "N": samples,
        "C": channels,
        "HxW": math.prod(spatial),
        "group": case.group,
        "eps": EPS,
    }


def _batch_norm(case: Case, random: np.random.Generator, data: dict[str, Any]) -> dict[str, Any]:
    channels = case.shape[1]
    mean, invstd = _statistics(case, data["input"])
    arguments = {
        "mean": mean,
        "invstd": invstd,
        "weight": _vector(channels, "float32", random),
        "bias": _vector(channels, "float32", random),
        "counter": np.array([case.elements // channels], np.int32),
        "eps": EPS,
        "input_g": True,
        "weight_g": True,
        "bias_g": True,
    }
    if "grad_out" in data:
        arguments["sum_dy"], arguments["sum_dy_xmu"] = _sums(case, data["grad_out"], data["input"], mean)
    return arguments


def _gather(case: Case, random: np.random.Generator, pattern: Pattern) -> dict[str, Any]:
    ranks, channels = case.shape
    mean = random.standard_normal(case.shape, np.float32)
    if pattern.change is not None:
        _change(case, pattern, mean)
    return {
        "input": np.zeros((1, channels), np.float32),
        "mean": mean,
        "invstd": random.uniform(0.5, 2, case.shape).astype(np.float32),
        "running_mean": None,
        "running_var": None,
        "momentum": 0.1,
        "eps": EPS,
        "counts": random.integers(1, 1000, ranks).astype(np.float32),
    }
