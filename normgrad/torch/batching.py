"""Operators under ``torch.vmap``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_MOST_DIMENSIONS = 8

#: What a batching rule returns: results, and the dimension along which the samples of each lie.
Batched = tuple[Any, Any]


def call_per_sample(op: Any, batch_size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Batched:
    """The results of a call for each sample, stacked."""
    single = len(op._schema.returns) == 1
    calls = [
        op(*(arg.select(dim, sample) if isinstance(dim, int) else arg for arg, dim in zip(args, in_dims, strict=True)))
        for sample in range(batch_size)
    ]
    if single:
        return torch.stack(calls), 0
    stacked = [None if results[0] is None else torch.stack(results) for results in zip(*calls, strict=True)]
    return _at_front(tuple(stacked))


def _at_front(results: tuple[Any, ...]) -> Batched:
    return results, tuple(None if result is None else 0 for result in results)


def _is_batched(in_dims: Sequence[Any], *others: int) -> bool:
    """Whether the first argument has samples, these others have, and none beside them."""
    with_samples = {place for place, dim in enumerate(in_dims) if isinstance(dim, int)}
    return with_samples == {0, *others}


def _layer_norm(op: Any, batch_size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Batched | None:
    """Samples are rows."""
    input, *rest = args
    if not _is_batched(in_dims) or input.dim() > _MOST_DIMENSIONS:
        return None
    return _at_front(op(input.movedim(in_dims[0], 0), *rest))


def _group_norm(op: Any, batch_size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Batched | None:
    """Samples are samples."""
    input, weight, bias, N, *rest = args
    if not _is_batched(in_dims):
        return None
    whole = input.movedim(in_dims[0], 0)
    if whole.dim() < 3 or whole.shape[1] != N:  # data in which N is no dimension of its own
        return None
    output, mean, rstd = op(whole.flatten(0, 1), weight, bias, batch_size * N, *rest)
    return _at_front(tuple(result.unflatten(0, (batch_size, N)) for result in (output, mean, rstd)))


def _layer_norm_backward(op: Any, batch_size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Batched | None:
    """Samples are rows, where no gradient is summed over them."""
    data, (normalized_shape, weight, bias, mask) = (0, 1, 3, 4), (args[place] for place in (2, 5, 6, 7))
    if any(mask[1:]) or not _is_batched(in_dims, *data) or args[1].dim() > _MOST_DIMENSIONS:
        return None
    grad_out, input, mean, rstd = (args[place].movedim(in_dims[place], 0) for place in data)
    return _at_front(op(grad_out, input, normalized_shape, mean, rstd, weight, bias, mask))


_IN_ONE_CALL: dict[str, Callable[..., Batched | None]] = {
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "layer_norm_backward": _layer_norm_backward,
}


def batched(name: str, op: Any, batch_size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Batched:
    """The results of an operator for a batch of calls: one call for all of them where that is the same, to the bit."""
    together = _IN_ONE_CALL.get(name)
    found = together(op, batch_size, in_dims, args) if together is not None and batch_size else None
    return call_per_sample(op, batch_size, in_dims, args) if found is None else found
