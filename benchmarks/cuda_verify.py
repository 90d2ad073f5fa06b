"""Whether the results of a large case are right: samples, or channels, of it against the oracle, and the weight sums.

What is summed over all rows or samples is judged by float64 sums on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from cuda_cases import Case, arguments, expected

from normgrad.testing import compare

SAMPLES = 1  # at either end
CHANNELS = 3

Judged = tuple[torch.Tensor, Any, Any]  # a result, what it should be, and the size of the terms it is a sum of


def _of_samples(case: Case, made: dict[str, Any], chosen: slice) -> dict[str, Any]:
    """The problem of some samples (rows, for LayerNorm) alone."""
    by_sample = ("input", "grad_out") if case.operator.startswith("batch") else ("input", "grad_out", "mean", "rstd")
    part = {name: value[chosen] if name in by_sample else value for name, value in made.items()}
    return part | {"N": len(part["input"])}


def _of_channels(made: dict[str, Any]) -> dict[str, Any]:
    """The problem of the first channels alone, for the steps of BatchNorm that sum over all else."""
    part = {name: value[:, :CHANNELS] for name, value in made.items() if name in ("input", "grad_out")}
    return made | part | {name: made[name][:CHANNELS] for name in ("mean", "invstd", "weight")}


def _weight_sums(case: Case, made: dict[str, Any], results: tuple[torch.Tensor, ...]) -> Iterator[Judged]:
    """The gradients of weight and bias, by float64 sums over a few samples at a time."""
    x, dy, mean, rstd = (made[name] for name in ("input", "grad_out", "mean", "rstd"))
    sums = [torch.zeros(results[1].numel(), dtype=torch.float64, device="cuda") for _ in range(4)]
    step = max(1, (1 << 24) // x[0].numel())
    for begin in range(0, len(x), step):
        part = slice(begin, begin + step)
        if case.operator == "layer_norm_backward":
            others: tuple[int, ...] = (0,)
            centre, scale = mean[part], rstd[part]
        else:
            others = (0, 2)
            members = x.shape[1] // mean.shape[1]
            centre, scale = (value[part].repeat_interleave(members, 1)[:, :, None] for value in (mean, rstd))
        wide = dy[part].double()
        product = (x[part].double() - centre) * scale * wide
        for total, added in zip(sums, (product, product.abs(), wide, wide.abs()), strict=True):
            total += added.sum(others)
    exact = [total.cpu().numpy() for total in sums]
    yield results[1], exact[0], exact[1]
    yield results[2], exact[2], exact[3]


def _judged(case: Case, made: dict[str, Any], results: tuple[torch.Tensor, ...]) -> Iterator[Judged]:
    if case.operator in ("batch_norm_stats", "batch_norm_reduce_backward"):
        for result, exact, size in zip(
            results, *expected(case.operator, arguments(case, _of_channels(made))), strict=True
        ):
            yield result[:CHANNELS], exact, size
        return
    by_sample = len(results) if not case.operator.endswith("backward") else 1
    for chosen in (slice(None, SAMPLES), slice(-SAMPLES, None)):
        right = expected(case.operator, arguments(case, _of_samples(case, made, chosen)))
        for result, exact, size in list(zip(results, *right, strict=True))[:by_sample]:
            yield result[chosen], exact, size
    if case.operator in ("layer_norm_backward", "group_norm_backward"):
        yield from _weight_sums(case, made, results)


def problem(case: Case, made: dict[str, Any], results: tuple[torch.Tensor, ...]) -> str:
    """What is wrong with a case's results; nothing if nothing is."""
    for result, exact, size in _judged(case, made, results):
        report = compare(result.cpu(), exact, size)
        if not report:
            return str(report.text)
    return ""
