"""Batching rules: the operators under ``torch.vmap``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from normgrad.torch.outputs import MAX_DIMENSIONS

#: What a batching rule returns: results, and for each the dimension of the batch, None for a result that is None.
Batched = tuple[Any, Any]


def call_per_sample(op: Any, batch_size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Batched:
    """Return the results of a call for each sample, stacked."""
    calls = [
        op(*(arg.select(dim, sample) if isinstance(dim, int) else arg for arg, dim in zip(args, in_dims, strict=True)))
        for sample in range(batch_size)
    ]
    if len(op._schema.returns) == 1:
        return torch.stack(calls), 0
    stacked = [None if results[0] is None else torch.stack(results) for results in zip(*calls, strict=True)]
    return _at_front(tuple(stacked))


def _without_samples(op: Any, in_dims: Sequence[Any], args: Sequence[Any]) -> Batched:
    """Return the results of a batch of no samples, by the shapes and dtypes of a sample that is not there."""
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    sample = [
        arg.movedim(dim, 0).new_empty(arg.movedim(dim, 0).shape[1:]) if isinstance(dim, int) else arg
        for arg, dim in zip(args, in_dims, strict=True)
    ]
    results = op(*(arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in sample))
    if len(op._schema.returns) == 1:
        return results.new_empty((0, *results.shape), device=device), 0
    empty = [None if result is None else result.new_empty((0, *result.shape), device=device) for result in results]
    return _at_front(tuple(empty))


def _at_front(results: tuple[Any, ...]) -> Batched:
    return results, tuple(None if result is None else 0 for result in results)


def _is_batched(in_dims: Sequence[Any], *others: int) -> bool:
    """Return whether the first argument and these others are batched, and none beside them."""
    return {position for position, dim in enumerate(in_dims) if isinstance(dim, int)} == {0, *others}


def _layer_norm(op: Any, batch_size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Batched | None:
    """Take the samples of the batch as rows."""
    input, *rest = args
    if not _is_batched(in_dims) or input.dim() > MAX_DIMENSIONS:
        return None
    return _at_front(op(input.movedim(in_dims[0], 0), *rest))


def _group_norm(op: Any, batch_size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Batched | None:
    """Take the samples of the batch as more samples of N."""
    input, weight, bias, N, *rest = args
    if not _is_batched(in_dims):
        return None
    whole = input.movedim(in_dims[0], 0)
    if whole.dim() < 3 or whole.shape[1] != N:  # data in which N is no dimension of its own
        return None
    output, mean, rstd = op(whole.flatten(0, 1), weight, bias, batch_size * N, *rest)
    return _at_front(tuple(result.unflatten(0, (batch_size, N)) for result in (output, mean, rstd)))


def _layer_norm_backward(op: Any, batch_size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Batched | None:
    """Take the samples of the batch as rows, where no gradient is summed over them."""
    data, (normalized_shape, weight, bias, mask) = (0, 1, 3, 4), (args[position] for position in (2, 5, 6, 7))
    if any(mask[1:]) or not _is_batched(in_dims, *data) or args[1].dim() > MAX_DIMENSIONS:
        return None
    grad_out, input, mean, rstd = (args[position].movedim(in_dims[position], 0) for position in data)
    return _at_front(op(grad_out, input, normalized_shape, mean, rstd, weight, bias, mask))


_IN_ONE_CALL: dict[str, Callable[..., Batched | None]] = {
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "layer_norm_backward": _layer_norm_backward,
}


def batched(name: str, op: Any, batch_size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Batched:
    """Return the results of a batch of calls: of one call for all samples where its bits are the same."""
    if not batch_size:
        return _without_samples(op, in_dims, args)
    rule = _IN_ONE_CALL.get(name)
    found = rule(op, batch_size, in_dims, args) if rule is not None else None
    return call_per_sample(op, batch_size, in_dims, args) if found is None else found
