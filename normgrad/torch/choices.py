"""What a module takes of ours and what of PyTorch's: whichever ``benchmarks/torch_tables.py`` measured faster.

The forward passes by themselves (``forward``), everything else in a training step (``step``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from normgrad.torch.outputs import order_of

_16_BITS = (torch.float16, torch.bfloat16)

#: float32 on a CPU: below so many elements a step takes longer with our backward pass, and both passes are PyTorch's.
LEAST_FLOAT32 = 1 << 20

#: The same for data in channels_last, on which PyTorch takes longer.
LEAST_FLOAT32_LAST = 1 << 19

#: The same for 16 bits beside parameters in float32, without which PyTorch's statistics would not be: of LayerNorm,
LEAST_LAYER_NORM = {torch.float16: 1 << 19, torch.bfloat16: 1 << 18}

#: and of GroupNorm but in channels_last, where our backward pass is the faster for any size.
LEAST_GROUP_NORM = {torch.float16: 1 << 16, torch.bfloat16: 1 << 20}

#: float32 on a CPU: from so many elements on, where our results go past the caches, our forward pass is the faster.
LEAST_STREAMED = 1 << 23

#: LayerNorm of 16 bits on a CPU: from so many elements on our forward pass is the faster.
LEAST_16_BITS = 1 << 22

#: GroupNorm on a CPU: channels_last data of 16 bits is ours up to so many places a channel.
MOST_PLACES_LAST = 256

#: GroupNorm on a CPU: contiguous float16 is ours from so many elements on.
LEAST_FLOAT16 = 1 << 16


def layer_norm_is_pytorchs(input: Tensor, weight: Tensor | None) -> bool:
    """Whether to leave both passes to PyTorch."""
    return input.is_cpu and input.numel() < _least(input, weight, LEAST_LAYER_NORM)


def group_norm_is_pytorchs(input: Tensor, weight: Tensor | None) -> bool:
    """Whether to leave both passes to PyTorch."""
    return input.is_cpu and input.numel() < _least(input, weight, LEAST_GROUP_NORM)


def _least(input: Tensor, weight: Tensor | None, of_16_bits: dict[torch.dtype, int]) -> int:
    """How many elements there must be for a step to be faster with our backward pass."""
    if input.dtype == torch.float32:
        return LEAST_FLOAT32_LAST if _may_be_last(input) else LEAST_FLOAT32
    is_wide = weight is not None and weight.dtype == torch.float32
    return of_16_bits.get(input.dtype, 0) if is_wide and not _may_be_last(input) else 0


def _may_be_last(input: Tensor) -> bool:
    """Whether images may lie in channels_last. Of any other order PyTorch makes a copy, and is the faster with it."""
    return input.dim() in (4, 5) and not input.is_contiguous()


def our_layer_norm(input: Tensor, weight: Tensor | None) -> bool:
    """Whether to take our forward pass; on an H200 it is the faster for rows of any length."""
    if not input.is_cpu or _narrows_statistics(input, weight) or _is_streamed(input):
        return True
    return input.dtype in _16_BITS and input.numel() >= LEAST_16_BITS


def our_group_norm(input: Tensor, places: int, weight: Tensor | None) -> bool:
    """Whether to take our forward pass for channels of that many places."""
    if not input.is_cpu or _narrows_statistics(input, weight) or _is_streamed(input):
        return True
    if input.is_contiguous():
        return input.dtype == torch.float16 and input.numel() >= LEAST_FLOAT16
    if order_of(input) == torch.contiguous_format:
        return True  # PyTorch's would need a copy
    return input.dtype in _16_BITS and places <= MOST_PLACES_LAST


def _is_streamed(input: Tensor) -> bool:
    return input.dtype == torch.float32 and input.numel() >= LEAST_STREAMED


def _narrows_statistics(input: Tensor, weight: Tensor | None) -> bool:
    """Whether PyTorch would keep the statistics in 16 bits: it does unless a weight beside them is float32."""
    return weight is None and input.dtype in _16_BITS
