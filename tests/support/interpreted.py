"""Calls in Triton's interpreter, which has to be switched on before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import normgrad
from normgrad.testing import compare, oracle, terms

#: Whether the interpreter is on in this process.
ON = os.environ.get("TRITON_INTERPRET") == "1"
only_there = pytest.mark.skipif(not ON, reason="Triton's interpreter is off")
only_elsewhere = pytest.mark.skipif(ON, reason="this is the run with the interpreter on")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> str:
    """Calls run in the interpreter, in the modules that import this."""
    monkeypatch.setenv("NORMGRAD_BACKEND", "interpreter")
    return "interpreter"


@pytest.fixture
def interpreted(poisoned: None) -> None:
    """Calls run in the interpreter, in memory that starts as NaN."""


def run_with_it(file: str) -> None:
    """Run the tests of a file with the interpreter on."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
    assert "passed" in run.stdout


def judge(operator: str, *args: Any, out: Any = None) -> None:
    """Hold a call's results against the oracle; ``out`` may be the arguments' own memory."""
    expected, magnitudes = getattr(oracle, operator)(*args), getattr(terms, operator)(*args)
    results = getattr(normgrad, operator)(*args) if out is None else getattr(normgrad, operator)(*args, out=out)
    if not isinstance(expected, tuple):
        results, expected, magnitudes = (results,), (expected,), (magnitudes,)
    for result, exact, magnitude in zip(results, expected, magnitudes, strict=False):
        if exact is None:
            assert result is None
        else:
            report = compare(result, exact, magnitude)
            assert report, report.text


def random_data(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Ordinary numbers, most of them above zero."""
    return (np.random.default_rng(seed).normal(size=shape) + 0.5).astype(dtype)


def scales(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Reciprocal deviations."""
    return np.random.default_rng(seed).uniform(0.5, 2, size=shape).astype(np.float32)


def random_channels(shape: tuple[int, ...], dtype: Any, channels_last: bool, seed: int) -> np.ndarray:
    """Samples, channels and places, the places side by side or the channels."""
    N, C, P = shape
    return random_data((N, P, C), dtype, seed).transpose(0, 2, 1) if channels_last else random_data(shape, dtype, seed)
