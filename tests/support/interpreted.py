"""Calls in Triton's interpreter, which has to be switched on before Triton is imported (``TRITON_INTERPRET=1``)."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import normgrad
from normgrad.testing import compare, oracle, terms
from normgrad.testing.expected import as_tuple

#: Whether the interpreter is on in this process.
INTERPRETER_ON = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETER_ON, reason="Triton's interpreter is off")
without_interpreter = pytest.mark.skipif(INTERPRETER_ON, reason="this is the run with the interpreter on")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> str:
    """Run calls in the interpreter, in the modules that import this."""
    monkeypatch.setenv("NORMGRAD_BACKEND", "interpreter")
    return "interpreter"


@pytest.fixture
def interpreted(poisoned: None) -> None:
    """Run calls in the interpreter, in memory that starts as NaN."""


def run_with_interpreter(file: str) -> None:
    """Run the tests of a file with the interpreter on."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
    assert "passed" in run.stdout


def check_call(operator: str, *args: Any, out: Any = None, run: Any = None) -> tuple[Any, ...]:
    """Assert that a call's results are within the bound about the oracle's, and return them.

    ``out`` may alias the arguments. ``run``: a variant of the operator, to be called instead of it.
    """
    expected, magnitudes = getattr(oracle, operator)(*args), getattr(terms, operator)(*args)
    run = run or getattr(normgrad, operator)
    results = run(*args) if out is None else run(*args, out=out)
    results, expected, magnitudes = map(as_tuple, (results, expected, magnitudes))
    for result, exact, magnitude in zip(results, expected, magnitudes, strict=False):
        if exact is None:
            assert result is None
        else:
            report = compare(result, exact, magnitude)
            assert report, report.text
    return results


def random_data(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Return normal values with a mean of 0.5."""
    return (np.random.default_rng(seed).normal(size=shape) + 0.5).astype(dtype)


def random_rstd(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return reciprocal standard deviations between 0.5 and 2."""
    return np.random.default_rng(seed).uniform(0.5, 2, size=shape).astype(np.float32)


def random_channels(shape: tuple[int, ...], dtype: Any, channels_last: bool, seed: int) -> np.ndarray:
    """Return random data [N, C, HxW], contiguous or in channels_last."""
    N, C, HxW = shape
    if channels_last:
        return random_data((N, HxW, C), dtype, seed).transpose(0, 2, 1)
    return random_data(shape, dtype, seed)
