"""Calls on a CUDA GPU against the oracle, for the tests in tests/gpu."""

from __future__ import annotations

from typing import Any

import torch

import normgrad
from normgrad.testing import compare, oracle, terms
from normgrad.testing.expected import as_tuple

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def on_host(value: Any) -> Any:
    """Return an argument as the oracle takes it; a copy, since some operators write into their arguments."""
    if not isinstance(value, torch.Tensor):
        return value
    return (value.cpu().double() if value.is_floating_point() else value.cpu()).numpy().copy()


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """Return the same elements with the channels of a position side by side."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def check_results(results: Any, exact: Any, magnitudes: Any, label: str = "") -> None:
    """Assert that results are within the bound; those that are None were not wanted."""
    torch.cuda.synchronize()
    for position, judged in enumerate(zip(*map(as_tuple, (results, exact, magnitudes)), strict=False)):
        if judged[0] is not None:
            report = compare(judged[0].cpu(), *judged[1:])
            assert report, f"{label} output {position}: {report.text}"


def check_call(operator: str, *args: Any, label: str = "", out: Any = None) -> None:
    """Assert that a call's results are within the bound; ``out`` may alias the arguments."""
    host = list(map(on_host, args))
    exact, magnitudes = getattr(oracle, operator)(*host), getattr(terms, operator)(*map(on_host, args))
    check_results(getattr(normgrad, operator)(*args, out=out), exact, magnitudes, f"{operator} {label}")
