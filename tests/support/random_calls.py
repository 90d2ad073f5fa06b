"""Calls of random sizes, layouts and values; sizes are those at which kernels change their ways of working."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from normgrad.testing import oracle

Arguments = dict[str, Any]
Call = tuple[str, Arguments]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ELEMENTS = (300, 5_000, 40_000, 200_000, 600_000)
MOST = 1_500_000
COLUMNS = (1, 2, 7, 16, 17, 31, 33, 100, 256, 768, 1000, 1023, 2048, 4097, 8192, 20_000, 70_001, 300_000)
CHANNELS = (1, 2, 6, 24, 32, 60, 96, 256, 320, 512)
GROUPS = (1, 2, 3, 4, 8, 32)
POSITIONS = (1, 3, 15, 49, 64, 100, 196, 784, 1024, 2047, 3136, 5000)
EPS = (1e-5, 1e-12, 0.1)
FIXED = 1e-5  # of the statistics that backward passes are given


class Draw:
    """Draws the calls of one family: sizes, layouts, dtypes and values. The same seed draws the same calls."""

    def __init__(self, seed: int, device: str) -> None:
        self.random = np.random.default_rng(seed)
        self.device = device
        self.dtype = self.one(tuple(DTYPES))

    def one(self, of: tuple[Any, ...]) -> Any:
        return of[self.random.integers(len(of))]

    def perhaps(self, chance: float) -> bool:
        return bool(self.random.random() < chance)

    def values(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return float64 values of a random distribution."""
        half = dtype == "float16"
        x = self.random.normal(size=shape)
        match self.random.integers(12):
            case 0:
                x += self.one((100, -3000, 1e4))
            case 1:
                x *= 500 if half else 1e15
            case 2:
                x *= 1e-5 if half else 1e-20
            case 3:
                x *= 1e-7 if half else 1e-40
            case 4:
                x *= 10.0 ** self.random.uniform(-8, 4 if half else 8, size=shape)
            case 5:
                x[...] = self.one((0, 1, -3.7))
            case 6:
                x = np.round(3 * x)
            case 7:
                x *= np.where(self.random.random(shape) < 0.001, 1000, 1)
            case 8:
                x = np.maximum(x, 0)
        return x

    def tensor(self, shape: tuple[int, ...], dtype: str, special: float = 0.06) -> torch.Tensor:
        """Return a tensor, now and then with a NaN or an Inf in it."""
        made = torch.from_numpy(self.values(shape, dtype)).to(DTYPES[dtype])
        if made.numel() and self.perhaps(special):
            made.view(-1)[self.random.integers(made.numel())] = self.one((np.nan, np.inf, -np.inf))
        return made.to(self.device)

    def data(self, *shape: int) -> torch.Tensor:
        """Return a large tensor in a random layout."""
        made = self.tensor(shape, self.dtype)
        if len(shape) < 2:
            return made
        match self.random.integers(8):
            case 0 | 1:
                return made.movedim(1, -1).contiguous().movedim(-1, 1)
            case 2:
                return torch.cat([made, made[..., : self.one((1, 3, 16))]], -1)[..., : shape[-1]]
            case 3:
                return made.repeat_interleave(2, -1)[..., ::2]
            case 4:
                return made.permute(*range(len(shape))[::-1]).contiguous().permute(*range(len(shape))[::-1])
            case 5:
                return made.repeat_interleave(2, 0)[::2]
        return made

    def parameter(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor | None:
        return self.tensor(shape, dtype, 0.02) if self.perhaps(0.8) else None

    def statistics(self, of_data: tuple[np.ndarray, ...], dtype: str) -> list[torch.Tensor]:
        """Return mean and rstd: those of the data, or any others."""
        mean, rstd = of_data
        if self.perhaps(0.3):
            mean = self.random.normal(size=mean.shape)
            rstd = np.abs(self.random.normal(size=rstd.shape)) * self.one((1, 1e3, 1e-3))
        return [torch.from_numpy(np.array(v)).to(DTYPES[dtype]).to(self.device) for v in (mean, rstd)]

    def calls(self) -> Iterator[Call]:
        """Yield the calls, forward and backward."""
        return self.one((self.layer_norm, self.group_norm, self.batch_norm))()

    def layer_norm(self) -> Iterator[Call]:
        elements, columns = self.one(ELEMENTS), self.one(COLUMNS)
        columns = min(columns, elements)
        rows = max(1, elements // columns + int(self.random.integers(-2, 3)))
        normalized = [2, columns // 2] if columns % 2 == 0 and self.perhaps(0.3) else [columns]
        x, dy = self.data(rows, *normalized), self.data(rows, *normalized)
        dtype = self.one((self.dtype, self.dtype, "float32"))
        weight, bias = (self.parameter(tuple(normalized), dtype) for _ in range(2))
        shared = {"input": x, "normalized_shape": normalized, "weight": weight, "bias": bias}
        yield "layer_norm", {**shared, "eps": self.one(EPS)}
        _, *found = oracle.layer_norm(wide(x), normalized, None, None, FIXED)
        mean, rstd = self.statistics(tuple(found), self.one((self.dtype, "float32")))
        yield "layer_norm_backward", {**shared, "grad_out": dy, "mean": mean, "rstd": rstd}

    def group_norm(self) -> Iterator[Call]:
        channels, positions = self.one(CHANNELS), self.one(POSITIONS)
        group = self.one(tuple(g for g in (*GROUPS, channels) if channels % g == 0))
        samples = max(1, min(40, self.one(ELEMENTS) // (channels * positions)))
        if samples * channels * positions > MOST:
            return
        sizes = {"N": samples, "C": channels, "HxW": positions, "group": group}
        x, dy = self.data(samples, channels, positions), self.data(samples, channels, positions)
        dtype = self.one((self.dtype, "float32"))
        weight, bias = (self.parameter((channels,), dtype) for _ in range(2))
        yield "group_norm", {"input": x, "weight": weight, "bias": bias, **sizes, "eps": self.one(EPS)}
        _, *found = oracle.group_norm(wide(x), None, None, **sizes, eps=FIXED)
        mean, rstd = self.statistics(tuple(found), self.dtype)
        weight = None if weight is None else weight.to(x.dtype)
        yield "group_norm_backward", {"grad_out": dy, "input": x, "mean": mean, "rstd": rstd, "weight": weight, **sizes}

    def batch_norm(self) -> Iterator[Call]:
        channels, positions = self.one((*CHANNELS, 1024)), self.one(POSITIONS)
        samples = max(2, min(64, self.one(ELEMENTS) // (channels * positions)))
        if samples * channels * positions > MOST:
            return
        shape = (samples, channels) if positions == 1 else (samples, channels, positions)
        x, dy = self.data(*shape), self.data(*shape)
        yield "batch_norm_stats", {"input": x, "eps": self.one(EPS)}
        mean, invstd = self.statistics(oracle.batch_norm_stats(wide(x), FIXED), "float32")
        weight, bias = (self.parameter((channels,), "float32") for _ in range(2))
        shared = {"input": x, "mean": mean, "invstd": invstd, "weight": weight}
        yield "batch_norm_elemt", {**shared, "bias": bias}
        yield "batch_norm_reduce_backward", {"grad_out": dy, **shared}
        exact = oracle.batch_norm_reduce_backward(wide(dy), wide(x), wide(mean), wide(invstd), wide(weight))
        sums = (torch.from_numpy(np.array(total)).to(self.device, torch.float32) for total in exact[:2])
        counter = torch.tensor([samples * positions], dtype=torch.int32, device=self.device)
        sum_dy, sum_dy_xmu = sums
        more = {"sum_dy": sum_dy, "sum_dy_xmu": sum_dy_xmu, "counter": counter}
        yield "batch_norm_elemt_backward", {"grad_out": dy, **shared, **more}


def wide(value: Any) -> Any:
    """Return an argument as the oracle takes it."""
    return value.cpu().double().numpy() if isinstance(value, torch.Tensor) else value


def described(operator: str, arguments: Arguments) -> str:
    """Return a call in short."""
    return f"{operator}: " + ", ".join(
        f"{name} {str(value.dtype)[6:]} {tuple(value.shape)} {value.stride()}"
        if isinstance(value, torch.Tensor)
        else f"{name} {value}"
        for name, value in arguments.items()
    )
