"""Calls of ``torch.ops.normgrad``, of every operator, as positional arguments."""

from __future__ import annotations

from typing import Any

import torch

_N, _C, _POSITIONS, _GROUPS = 4, 6, 8, 3


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, tensors as copies."""
    return tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)


def differentiable(*args: Any) -> tuple[Any, ...]:
    """The arguments, tensors of floating point as leaves that want a gradient."""
    return tuple(
        arg.detach().clone().requires_grad_() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg
        for arg in args
    )


def samples(dtype: torch.dtype = torch.float32) -> dict[str, list[tuple[Any, ...]]]:
    """Calls with and without what is optional. Statistics and parameters are float32 beside 16-bit data."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def data(seed: int) -> torch.Tensor:
        return random(_N, _C, _POSITIONS, dtype=dtype, seed=seed)

    def vector(size: int, seed: int) -> torch.Tensor:
        return random(size, dtype=wide, seed=seed)

    def scale(*shape: int) -> torch.Tensor:
        return random(*shape, dtype=wide, seed=9).abs() + 0.5

    grad, input, by_rank = data(1), data(2), random(2, _C, dtype=wide, seed=3)
    row, row_bias, channel = vector(_POSITIONS, 4), vector(_POSITIONS, 5), vector(_C, 6)
    sizes = (_N, _C, _POSITIONS, _GROUPS)
    per_row, per_group = random(_N, _C, 1, dtype=wide, seed=7), random(_N, _GROUPS, dtype=wide, seed=8)
    count = torch.tensor([3, 5], dtype=torch.int32)
    return {
        "layer_norm": [(input, [_POSITIONS], row, row_bias, 1e-3), (input, [_C, _POSITIONS], None, None, 1e-5)],
        "layer_norm_backward": [
            (grad, input, [_POSITIONS], per_row, scale(_N, _C, 1), row, row_bias, [True, True, True]),
            (grad, input, [_POSITIONS], per_row, scale(_N, _C, 1), None, None, [True, False, False]),
        ],
        "group_norm": [(input, channel, channel + 1, *sizes, 1e-3), (input, None, None, *sizes, 1e-5)],
        "group_norm_backward": [
            (grad, input, per_group, scale(_N, _GROUPS), channel, *sizes, [True, True, True]),
            (grad, input, per_group, scale(_N, _GROUPS), None, *sizes, [False, True, True]),
        ],
        "batch_norm_stats": [(input, 1e-3)],
        "batch_norm_gather_stats_with_counts": [
            (input, by_rank, scale(2, _C), vector(_C, 1), scale(_C), 0.1, 1e-5, count),
            (input, by_rank, scale(2, _C), None, None, 0.1, 1e-5, count),
        ],
        "batch_norm_elemt": [(input, channel, channel + 1, channel + 2, scale(_C), 1e-5)],
        "batch_norm_reduce_backward": [
            (grad, input, channel, scale(_C), channel + 1, True, True, True),
            (grad, input, channel, scale(_C), None, True, False, False),
        ],
        "batch_norm_elemt_backward": [
            (grad, input, channel, scale(_C), channel + 1, channel + 2, channel + 3, count),
            (grad, input, channel, scale(_C), None, channel + 2, channel + 3, count),
        ],
    }


def without_running_statistics(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The call with nothing to change in place, for what only takes functions."""
    if name != "batch_norm_gather_stats_with_counts":
        return args
    return (*args[:3], None, None, *args[5:])
