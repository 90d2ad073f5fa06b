"""A small kernel in NumPy, blocked as kernels on accelerators are, and ten classic bugs to plant in it.

The kernel is GroupNorm's backward pass; LayerNorm's is the same with one group, a row for a sample and one place per
channel. Rows go through blocks of lanes with a mask for the last; weights are summed by several workers, and their
partial sums by one. Everything is float32 but what is loaded and stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from normgrad.operators import OPERATORS
from normgrad.testing import compare
from normgrad.testing.cases import TestCase
from normgrad.testing.expected import checked, exact_results, magnitudes

F32 = np.float32
BLOCK = 64
WORKERS = 5


@dataclass(frozen=True)
class Kernel:
    """The steps in which a bug may sit; as they stand here they are right."""

    upcast: bool = True
    divisor: Callable[[int], int] = lambda count: count
    lanes_summed: Callable[[int], int] = lambda count: count
    statistics: Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]] = lambda mean, rstd, m: (
        mean,
        rstd,
    )
    partials: Callable[[np.ndarray], np.ndarray] = lambda partials: partials
    offset: Callable[[np.ndarray], np.ndarray] = lambda offset: offset
    masked: bool = True
    clears_accumulator: bool = True
    parameter: Callable[[np.ndarray, int], np.ndarray] = lambda channel, width: channel

    def __call__(self, operator: str, arguments: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The three gradients of a call of LayerNorm or GroupNorm."""
        with np.errstate(all="ignore"):
            return self._run(_Shape.of(operator, arguments), arguments)

    def _run(self, shape: _Shape, arguments: Mapping[str, Any]) -> dict[str, np.ndarray]:
        dy, x = (self._rows(arguments[name], shape) for name in ("grad_out", "input"))
        mean, rstd = (np.asarray(arguments[name]).astype(F32).reshape(-1, 1) for name in ("mean", "rstd"))
        mean, rstd = self.statistics(mean, rstd, shape.length)
        weight = self._weights(arguments["weight"], shape)
        g, x_hat = dy * weight, (x - mean) * rstd
        count = F32(self.divisor(shape.length))
        sum_g, sum_gx = self._row_sum(g, arguments), self._row_sum(g * x_hat, arguments)
        grad_input = rstd * (g - sum_g / count - x_hat * (sum_gx / count))
        dtype = arguments["input"].dtype
        parameter_dtype = arguments["weight"].dtype if arguments["weight"] is not None else dtype
        return {
            "grad_input": grad_input.astype(dtype).reshape(np.shape(arguments["input"])),
            "grad_weight": self._weight_sum(dy * x_hat, shape).astype(parameter_dtype),
            "grad_bias": self._weight_sum(dy, shape).astype(parameter_dtype),
        }

    def _rows(self, array: np.ndarray, shape: _Shape) -> np.ndarray:
        """The data as rows, fetched by address."""
        flat = np.ravel(array)
        start = self.offset(np.arange(shape.rows)[:, None] * shape.length)
        return flat[(start + np.arange(shape.length)) % flat.size].astype(F32)

    def _weights(self, weight: np.ndarray | None, shape: _Shape) -> np.ndarray:
        """The weight of every element of every row."""
        if weight is None:
            return np.ones((1, 1), F32)
        group = np.arange(shape.rows)[:, None] % shape.group
        channel = group * shape.width + np.arange(shape.length) // shape.places
        return np.ravel(weight).astype(F32)[self.parameter(channel, shape.width)]

    def _row_sum(self, values: np.ndarray, arguments: Mapping[str, Any]) -> np.ndarray:
        """The sum of every row, block by block into one accumulator per lane."""
        rows, length = values.shape
        blocks = -(-length // BLOCK)
        lanes = np.full((rows, blocks * BLOCK), 0 if self.masked else 1, F32)
        kept = self.lanes_summed(length)
        lanes[:, :kept] = values[:, :kept]
        if not self.upcast:
            lanes = lanes.astype(arguments["input"].dtype)
        accumulator = np.zeros((rows, BLOCK), lanes.dtype)
        for block in range(blocks):
            accumulator = accumulator + lanes[:, block * BLOCK : (block + 1) * BLOCK]
        sums = accumulator.sum(axis=1, dtype=lanes.dtype, keepdims=True).astype(F32)
        return sums if self.clears_accumulator else np.cumsum(sums, axis=0, dtype=F32)

    def _weight_sum(self, values: np.ndarray, shape: _Shape) -> np.ndarray:
        """The sum per channel: one partial per worker, then the sum of those."""
        samples = values.reshape(-1, shape.group * shape.width, shape.places)
        per_sample = samples.sum(axis=2, dtype=F32)
        share = -(-len(per_sample) // WORKERS)
        partials = [per_sample[k * share : (k + 1) * share].sum(axis=0, dtype=F32) for k in range(WORKERS)]
        return self.partials(np.stack([p for k, p in enumerate(partials) if k * share < len(per_sample)])).sum(axis=0)


@dataclass(frozen=True)
class _Shape:
    rows: int
    length: int
    group: int
    width: int
    places: int

    @staticmethod
    def of(operator: str, arguments: Mapping[str, Any]) -> _Shape:
        if operator == "layer_norm_backward":
            columns = int(np.prod(arguments["normalized_shape"]))
            return _Shape(arguments["input"].size // columns, columns, 1, columns, 1)
        samples, channels, places, group = (arguments[name] for name in ("N", "C", "HxW", "group"))
        width = channels // group
        return _Shape(samples * group, width * places, group, width, places)


CORRECT = Kernel()


def _with_bessel(mean: np.ndarray, rstd: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The deviation with N − 1 in the place of N."""
    return mean, rstd * F32(np.sqrt((count - 1) / count)) if count > 1 else rstd


def _in_16_bits(offset: np.ndarray) -> np.ndarray:
    """An address that overflows; 16 bits for 32, so that the data of a test is large enough."""
    return offset.astype(np.int16).astype(np.int64)


#: Kernels with one bug each, by what the bug is.
BUGS: dict[str, Kernel] = {
    "missing upcast": replace(CORRECT, upcast=False),
    "wrong N": replace(CORRECT, divisor=lambda count: -(-count // BLOCK) * BLOCK),
    "dropped tail": replace(CORRECT, lanes_summed=lambda count: max(count // BLOCK * BLOCK, 1)),
    "swapped mean and rstd": replace(CORRECT, statistics=lambda mean, rstd, m: (rstd, mean)),
    "biased statistic": replace(CORRECT, statistics=_with_bessel),
    "lost last partial": replace(CORRECT, partials=lambda partials: partials[:-1]),
    "overflowing address": replace(CORRECT, offset=_in_16_bits),
    "unmasked lanes": replace(CORRECT, masked=False),
    "stale accumulator": replace(CORRECT, clears_accumulator=False),
    "wrong group stride": replace(CORRECT, parameter=lambda channel, width: channel % width),
}


#: The operators that the kernel computes.
OPERATORS_TRIED = ("layer_norm_backward", "group_norm_backward")


class Trial:
    """A case to try kernels on, its exact results computed once."""

    def __init__(self, case: TestCase) -> None:
        self.case = case
        operator = OPERATORS[case.operator]
        call = checked(operator, case.arguments, None)
        self._exact = exact_results(operator, call)
        self._magnitudes = magnitudes(operator, call)

    def run(self, kernel: Kernel) -> dict[str, np.ndarray]:
        """A kernel's results."""
        return kernel(self.case.operator, self.case.arguments)

    def passes(self, results: Mapping[str, np.ndarray], standard: str) -> bool:
        """Whether all results are good enough."""
        return all(
            compare(results[name], exact, self._magnitudes[name], standard=standard).passed
            for name, exact in self._exact.items()
        )
