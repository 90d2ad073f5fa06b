"""Processors with fewer instructions than the one of this machine."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from llvmlite.binding import get_host_cpu_features

from support.processor import run_on

AVX2 = ("64bit", "sse2", "sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "avx", "avx2", "fma", "f16c", "bmi", "bmi2")

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="for x86-64")

_JUDGE = """
from normgrad.operators import OPERATORS
from normgrad.testing import judge
from normgrad.testing.cases import make_cases

for name in ("layer_norm_backward", "group_norm_backward", "batch_norm_stats"):
    cases = [case for case in make_cases(name) if str(case.arguments["input"].dtype) == DTYPE]
    for case in cases:
        results = OPERATORS[name](**case.arguments)
        results = results if isinstance(results, tuple) else (results,)
        judged = judge(name, case.arguments, dict(zip(OPERATORS[name].signature.output_names, results)))
        assert judged.passed, (name, case.name, str(judged))
    print(name, len(cases) > 10)
"""
_CALL = """
import numpy as np
import torch
import normgrad.torch

try:
    print(normgrad.layer_norm(np.array([[1, 3]], np.float32), 2, eps=0.0)[0])
except normgrad.ContractError as error:
    print(error)
with normgrad.torch.override() as ours:
    torch.nn.functional.layer_norm(torch.ones(1024, 2048), [2048])
print(ours.report())
"""


@pytest.mark.slow
@pytest.mark.skipif(not get_host_cpu_features().get("avx2"), reason="this processor has no AVX2")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_kernels_for_avx2(dtype: str, tmp_path: Path) -> None:
    printed = run_on("haswell", AVX2, f"DTYPE = {dtype!r}\n{_JUDGE}", NORMGRAD_CACHE_DIR=str(tmp_path))
    assert printed.count("True") == 3


def test_a_processor_without_fused_multiply_add_is_refused() -> None:
    printed = run_on("x86-64", ("64bit", "sse2"), _CALL)
    assert "layer_norm: the backend cpu for cpu cannot be loaded: the processor has no FMA and F16C" in printed
    assert "NORMGRAD_BACKEND=reference" in printed


def test_the_override_leaves_calls_to_pytorch_there() -> None:
    assert "left to PyTorch: the backend cpu cannot be loaded" in run_on("x86-64", ("64bit", "sse2"), _CALL)


def test_the_backend_reference_computes_there() -> None:
    assert "[[-1.  1.]]" in run_on("x86-64", ("64bit", "sse2"), _CALL, NORMGRAD_BACKEND="reference")
