"""Which forward pass a module takes, ours or PyTorch's: what measured faster.

Times over ours, by ``benchmarks/torch_modules.py``; above 1 ours is the faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

_16_BITS = (torch.float16, torch.bfloat16)
_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}

#: LayerNorm on an H200: 16-bit rows of more elements than this are PyTorch's.
LONGEST_16_BIT_ROW = 8192

#: GroupNorm on a CPU: channels_last data of 16 bits is ours up to so many places a channel.
MOST_PLACES_LAST = 256

#: GroupNorm on a CPU: contiguous float16 is ours from so many elements on.
LEAST_FLOAT16 = 1 << 16


def our_layer_norm(input: Tensor, row: int, weight: Tensor | None) -> bool:
    """Whether to take our forward pass for rows of that length."""
    if _narrows_statistics(input, weight):
        return True
    if input.is_cpu:
        return False
    return input.dtype == torch.float32 or row <= LONGEST_16_BIT_ROW


def our_group_norm(input: Tensor, places: int, weight: Tensor | None) -> bool:
    """Whether to take our forward pass for channels of that many places."""
    if not input.is_cpu or _narrows_statistics(input, weight):
        return True
    if input.is_contiguous():
        return input.dtype == torch.float16 and input.numel() >= LEAST_FLOAT16
    if not any(input.is_contiguous(memory_format=last) for last in _CHANNELS_LAST.get(input.dim(), ())):
        return True  # PyTorch's would need a copy
    return input.dtype in _16_BITS and places <= MOST_PLACES_LAST


def _narrows_statistics(input: Tensor, weight: Tensor | None) -> bool:
    """Whether PyTorch would keep the statistics in 16 bits: it does unless a weight beside them is float32."""
    return weight is None and input.dtype in _16_BITS
