"""The operators' outputs before they are written: shapes, strides and dtypes, for fake tensors and real ones alike.

They have the strides that PyTorch's own operators give: LayerNorm's are contiguous, so that a ``view`` of them works
whatever the strides of the input; GroupNorm's keep channels_last, on CUDA too; BatchNorm's have the input's strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Results = tuple[Tensor | None, ...]


DTYPES_OF_16_BITS = frozenset((torch.float16, torch.bfloat16))
#: The dtypes of data that the contract takes.
DTYPES = DTYPES_OF_16_BITS | {torch.float32}

#: How many dimensions data may have.
MAX_DIMENSIONS = 8


def memory_format(input: Tensor) -> torch.memory_format:
    """Return the memory format of the outputs of PyTorch's GroupNorm on a CPU: channels_last, 3d or contiguous.

    The answer is that of ``suggest_memory_format`` in PyTorch's C++, by the strides alone: a crop of data in
    channels_last is not dense, and its output is in channels_last all the same.
    """
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim())
    if channels_last is None or not _descends_to_channels(input.shape, input.stride()):
        return torch.contiguous_format
    return channels_last


def _descends_to_channels(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether strides fall from samples over positions to channels, those of dimensions of one included."""
    least = 0
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[dim] == 0 or strides[dim] < least:
            return False
        if dim == 0 and least == strides[1]:  # one channel and one position: in both formats
            return False
        least = strides[dim] * shape[dim]
    return strides[1] != 0


def _like(input: Tensor) -> Tensor:
    return torch.empty_like(input, memory_format=memory_format(input))


def _statistics(like: Tensor, shape: Sequence[int]) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def layer_norm(input: Tensor, normalized_shape: Sequence[int], *_: Any) -> Results:
    """Return ``output, mean, rstd``."""
    shape = [*input.shape[: input.dim() - len(normalized_shape)], *[1] * len(normalized_shape)]
    return input.new_empty(input.shape), _statistics(input, shape), _statistics(input, shape)


def layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
) -> Results:
    """Return ``grad_input, grad_weight, grad_bias``."""
    dtype = input.dtype if weight is None else weight.dtype
    parameters = [input.new_empty(normalized_shape, dtype=dtype) if wanted else None for wanted in output_mask[1:]]
    return input.new_empty(input.shape) if output_mask[0] else None, *parameters


def group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, C: int, HxW: int, group: int, *_: Any
) -> Results:
    """Return ``output, mean, rstd``."""
    return _like(input), _statistics(input, (N, group)), _statistics(input, (N, group))


def group_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool] = (True, True, True),
) -> Results:
    """Return ``grad_input, grad_weight, grad_bias``."""
    shape, dtype = ((C,), mean.dtype) if weight is None else (weight.shape, weight.dtype)
    parameters = [input.new_empty(shape, dtype=dtype) if wanted else None for wanted in output_mask[1:]]
    return _like(input) if output_mask[0] else None, *parameters


def batch_norm_stats(input: Tensor, *_: Any) -> Results:
    """Return ``mean, invstd``."""
    return _statistics(input, input.shape[1:2]), _statistics(input, input.shape[1:2])


def batch_norm_gather_stats_with_counts(input: Tensor, *_: Any) -> Results:
    """Return ``mean, invstd``."""
    return batch_norm_stats(input)


def batch_norm_elemt(input: Tensor, *_: Any) -> Results:
    """Return ``output`` alone."""
    return (torch.empty_like(input),)


def batch_norm_elemt_backward(grad_out: Tensor, input: Tensor, *_: Any) -> Results:
    """Return ``grad_input`` alone."""
    return (torch.empty_like(input),)


def batch_norm_reduce_backward(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool = True,
    weight_g: bool = True,
    bias_g: bool = True,
) -> Results:
    """Return ``sum_dy, sum_dy_xmu, grad_weight, grad_bias``."""
    dtype, shape = mean.dtype if weight is None else weight.dtype, input.shape[1:2]
    sums = [_statistics(input, shape) if input_g else None for _ in range(2)]
    parameters = [input.new_empty(shape, dtype=dtype) if wanted else None for wanted in (weight_g, bias_g)]
    return *sums, *parameters


#: A function such as these: from an operator's arguments to its outputs.
AllocateOutputs = Callable[..., Results]


def with_output_dtype(allocate: AllocateOutputs, dtype: torch.dtype) -> AllocateOutputs:
    """Return a function that allocates the same outputs, the first of another dtype."""

    def allocate_outputs(*args: Any) -> Results:
        output, *others = allocate(*args)
        return torch.empty_like(output, dtype=dtype), *others

    return allocate_outputs
