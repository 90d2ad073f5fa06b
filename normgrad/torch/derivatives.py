"""Gradients of the operators, which are differentiable again.

The gradients of LayerNorm and GroupNorm are operators themselves. Every other gradient is that of the formula, taken by
``torch.func``: all arguments count as independent, the statistics too, so that the chain through the operator that
computed them gives the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from normgrad.torch import formulas

Formula = Callable[..., Any]
Gradients = tuple[Tensor | None, ...]


def pulled_back(formula: Formula, args: Sequence[Any], wanted: Sequence[bool], grads: Sequence[Any]) -> Gradients:
    """Return the gradients of the wanted arguments from those of the formula's results; None for the others."""
    chosen = [number for number, want in enumerate(wanted) if want]
    given = [number for number, grad in enumerate(grads) if grad is not None]
    if not chosen or not given:
        return (None,) * len(args)
    _, pull = torch.func.vjp(_restricted(formula, args, chosen, given), *(args[number] for number in chosen))
    found = dict(zip(chosen, pull(tuple(grads[number] for number in given)), strict=True))
    return tuple(found.get(number) for number in range(len(args)))


def _restricted(formula: Formula, args: Sequence[Any], chosen: Sequence[int], given: Sequence[int]) -> Formula:
    """Return the formula as a function of the chosen arguments, with the given results."""

    def function(*primals: Tensor) -> tuple[Tensor, ...]:
        whole = list(args)
        for number, primal in zip(chosen, primals, strict=True):
            whole[number] = primal
        results = _as_tuple(formula(*whole))
        return tuple(results[number] for number in given)

    return function


def _as_tuple(results: Any) -> tuple[Any, ...]:
    """Return results as a tuple, even where there is one."""
    return results if isinstance(results, tuple) else (results,)


def layer_norm_gradients(
    args: Sequence[Any], results: Sequence[Any], wanted: Sequence[bool], grads: Sequence[Any]
) -> Gradients:
    """Return the gradients of ``layer_norm(input, normalized_shape, weight, bias, eps)``."""
    input, normalized_shape, weight, bias, _ = args
    _, mean, rstd = results
    mask = [wanted[0], wanted[2], wanted[3]]
    found: Gradients = (None, None, None)
    if grads[0] is not None:
        backward = torch.ops.normgrad.layer_norm_backward
        found = backward(grads[0], input, normalized_shape, mean, rstd, weight, bias, mask)
    of_statistics = pulled_back(formulas.layer_norm, args, [wanted[0], *[False] * 4], (None, *grads[1:]))
    return _added(found[0], of_statistics[0]), None, found[1], found[2], None


def group_norm_gradients(
    args: Sequence[Any], results: Sequence[Any], wanted: Sequence[bool], grads: Sequence[Any]
) -> Gradients:
    """Return the gradients of ``group_norm(input, weight, bias, N, C, HxW, group, eps)``."""
    input, weight, _, *sizes, _ = args
    _, mean, rstd = results
    found: Gradients = (None, None, None)
    if grads[0] is not None:
        found = torch.ops.normgrad.group_norm_backward(grads[0], input, mean, rstd, weight, *sizes, list(wanted[:3]))
    of_statistics = pulled_back(formulas.group_norm, args, [wanted[0], *[False] * 7], (None, *grads[1:]))
    return _added(found[0], of_statistics[0]), *found[1:], None, None, None, None, None


def _added(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
