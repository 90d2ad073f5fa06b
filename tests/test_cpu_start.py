"""Where compiled kernels are kept: a package that cannot be written to, many processes that start at once."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import normgrad
from support.processes import run_python

_CALL = """
import numpy as np, normgrad
x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
mean, invstd = normgrad.batch_norm_stats(x)
print(normgrad.__file__, mean.tolist())
"""
_MEAN = "[7.5, 11.5, 15.5]"


def _copy_of_the_package(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(normgrad.__file__).parent, folder / "normgrad", ignore=ignored)
    return folder


def _from(folder: Path, **environment: str) -> str:
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{_CALL}"
    return run_python(code, NORMGRAD_BACKEND="cpu", PYTHONDONTWRITEBYTECODE="1", **environment)


def _kept(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*.nb?")}


@pytest.mark.skipif(os.name == "nt", reason="folders on Windows have no such mode")
def test_a_package_that_cannot_be_written_to(tmp_path: Path) -> None:
    folder, cache = _copy_of_the_package(tmp_path / "site"), tmp_path / "cache"
    folders = [path for path in folder.rglob("*") if path.is_dir()]
    for path in folders:
        path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        # Even where modes do not bind (root), a file where the folder would be does.
        where = {"XDG_CACHE_HOME": str(cache), "HOME": str(tmp_path / "home"), "NUMBA_CACHE_DIR": str(cache)}
        cache.mkdir()
        for _ in range(2):
            assert _from(folder, **where).split(maxsplit=1) == [str(folder / "normgrad/__init__.py"), _MEAN + "\n"]
        assert _kept(cache)
        assert not _kept(folder)
    finally:
        for path in folders:
            path.chmod(stat.S_IRWXU)


def test_the_second_start_compiles_nothing(tmp_path: Path) -> None:
    where = {"NUMBA_CACHE_DIR": str(tmp_path), "NORMGRAD_BACKEND": "cpu"}
    run_python(_CALL, **where)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")}
    assert before
    assert _MEAN in run_python(_CALL, **where)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")} == before


def test_many_processes_that_start_at_once(tmp_path: Path) -> None:
    path = os.pathsep.join(part for part in sys.path if part)
    environment = {**os.environ, "PYTHONPATH": path, "NUMBA_CACHE_DIR": str(tmp_path), "NORMGRAD_BACKEND": "cpu"}
    processes = [
        subprocess.Popen([sys.executable, "-c", _CALL], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        assert _MEAN in output
    assert _MEAN in run_python(_CALL, NUMBA_CACHE_DIR=str(tmp_path), NORMGRAD_BACKEND="cpu")


def test_processes_that_compile_different_variants_at_once_keep_them_apart(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np, ml_dtypes, normgrad\n"
        "x = np.arange(24).reshape(2, 3, 4).astype(sys.argv[1])\n"
        "print(normgrad.batch_norm_stats(x)[0].tolist())"
    )
    environment = os.environ | {"NORMGRAD_BACKEND": "cpu", "NUMBA_CACHE_DIR": str(tmp_path)}
    for _ in range(2):  # compiled, then loaded
        started = [
            subprocess.Popen([sys.executable, "-c", code, dtype], env=environment, stdout=subprocess.PIPE, text=True)
            for dtype in ("float32", "float16", "bfloat16")
        ]
        assert [process.communicate()[0].strip() for process in started] == [_MEAN] * 3
