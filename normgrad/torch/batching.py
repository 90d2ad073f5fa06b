"""Operators under ``torch.vmap``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def call_per_sample(op: Any, batch_size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> tuple[Any, Any]:
    """The results of a call for each sample, and the dimension along which they are stacked."""
    single = len(op._schema.returns) == 1
    calls = [
        op(*(arg.select(dim, sample) if isinstance(dim, int) else arg for arg, dim in zip(args, in_dims, strict=True)))
        for sample in range(batch_size)
    ]
    if single:
        return torch.stack(calls), 0
    stacked = [None if results[0] is None else torch.stack(results) for results in zip(*calls, strict=True)]
    return tuple(stacked), tuple(None if result is None else 0 for result in stacked)
