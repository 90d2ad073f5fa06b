"""Numba with other internals than expected: kernels are compiled by its public interface, with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from normgrad.cpu.compile import compiler, jit
from normgrad.operators import OPERATORS
from support.long_mode import LONG
from support.processes import run_python

_BROKEN = {
    "a class is missing": "import numba.core.registry; del numba.core.registry.CPUDispatcher",
    "a function takes other arguments": """
import numba.core.compiler
usual = numba.core.compiler.compile_extra
def changed(*args, pipeline_class=numba.core.compiler.Compiler, **kwargs):
    if "normgrad" in pipeline_class.__module__:
        raise TypeError("compile_extra() takes 6 arguments")
    return usual(*args, pipeline_class=pipeline_class, **kwargs)
numba.core.compiler.compile_extra = changed
""",
}
_RESULTS = """
import hashlib, logging
import numpy as np, normgrad
from normgrad.operators import OPERATORS
from normgrad.testing.cases import make_cases
log = []
handler = logging.Handler()
handler.emit = log.append
logging.getLogger("normgrad").addHandler(handler)
for name in NAMES:
    case = next(iter(make_cases(name)))
    results = OPERATORS[name](**case.arguments)
    results = results if isinstance(results, tuple) else (results,)
    print(name, hashlib.sha256(b"".join(array.tobytes() for array in results)).hexdigest())
x = np.ones((512, 1024), np.float32)  # for all threads
print(hashlib.sha256(normgrad.batch_norm_stats(x)[0].tobytes()).hexdigest())
"""
_LOG = "print([record.getMessage() for record in log])"


def _results(names: list[str], before: str, after: str, folder: Path) -> str:
    code = f"NAMES = {names}\n{before}\n{_RESULTS}\n{after}"
    return run_python(code, NORMGRAD_BACKEND="cpu", NORMGRAD_CACHE_DIR=str(folder), NORMGRAD_NUM_THREADS="2")


def _check(names: list[str], broken: str, folder: Path) -> None:
    expected = _results(names, "", "", folder / "usual").splitlines()
    *found, log = _results(names, _BROKEN[broken], _LOG, folder / "broken").splitlines()
    assert found == expected
    assert log.count("normgrad:") == 1
    assert "compiled by Numba's public interface" in log
    assert not list((folder / "broken").rglob("*.code"))


@pytest.mark.parametrize("broken", _BROKEN)
def test_kernels_are_compiled_by_the_public_interface(broken: str, tmp_path: Path) -> None:
    _check(["batch_norm_stats"], broken, tmp_path)


@pytest.mark.slow
def test_operators_have_the_same_bits(tmp_path: Path) -> None:
    """All of them in the long mode, which compiles for a minute."""
    names = OPERATORS if LONG else ["layer_norm_backward"]
    _check(list(names), "a class is missing", tmp_path)


def test_the_expected_numba_is_not_replaced() -> None:
    assert jit.internal_compiler is compiler


def test_compiled_code_without_an_effect_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(code: bytes, symbol: str) -> Any:
        return lambda address: 0

    monkeypatch.setattr(compiler, "loaded", loaded)
    with pytest.raises(RuntimeError, match="no effect"):
        compiler.try_out()


def test_numba_that_is_told_not_to_compile(tmp_path: Path) -> None:
    """Kernels on disk run; others cannot be compiled, and the error names the variable."""
    code = """
import numpy as np, normgrad
try:
    print(normgrad.batch_norm_stats(np.ones((2, 3), np.float32))[0].tolist())
except normgrad.ContractError as error:
    print(error)
"""
    settings = {"NORMGRAD_BACKEND": "cpu", "NORMGRAD_CACHE_DIR": str(tmp_path)}
    assert run_python(code, NUMBA_DISABLE_JIT="1", **settings) == (
        "batch_norm_stats: the work failed: RuntimeError: NUMBA_DISABLE_JIT is set, and kernels must be compiled: "
        "unset it, or set NORMGRAD_BACKEND=reference\n"
    )
    assert run_python(code, **settings) == "[1.0, 1.0, 1.0]\n"
    assert run_python(code, NUMBA_DISABLE_JIT="1", **settings) == "[1.0, 1.0, 1.0]\n"


def test_the_body_of_a_parallel_loop(tmp_path: Path) -> None:
    """PyTorch's threads call a kernel with the bounds of their part of the loop."""
    code = """
import ctypes
from normgrad.cpu.compile import jit

entry = jit.compiled_publicly("support.probe", "add_range", (), is_loop_body=True)
total = ctypes.c_int64(1)
function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)(entry.address)
assert function(2, 5, ctypes.addressof(total)) == 0
print(total.value)
"""
    assert run_python(code) == "8\n"
