"""Tests that need a CUDA GPU: ``python3 -m pytest -m gpu tests/gpu``. Skipped where there is none.

They need PyTorch, Triton and pytest. Triton compiles one kernel at a time in a process, so the kernels of the selected
tests are first compiled in several processes: each runs a part of the tests, and fills Triton's cache on disk.
pytest-xdist (``-n 12``) does without that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from normgrad.torch import heuristics

_COMPILING = "NORMGRAD_TEST_COMPILES_AHEAD"  # set in the processes that do
_PROCESSES = min(12, os.cpu_count() or 1)  # each has a CUDA context, hundreds of megabytes
_FEW = 2 * _PROCESSES  # tests, for which the processes' start takes longer than compiling


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            # Whatever versions of PyTorch and Triton a machine with a GPU has: their warnings are not our errors.
            item.add_marker(pytest.mark.filterwarnings("default"))
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="there is no CUDA GPU"))


def pytest_collection_finish(session: pytest.Session) -> None:
    chosen = [item.nodeid for item in session.items if Path(__file__).parent in item.path.parents]
    parallel = hasattr(session.config, "workerinput") or session.config.getoption("numprocesses", None)
    if not torch.cuda.is_available() or len(chosen) < _FEW or parallel or _COMPILING in os.environ:
        return
    environment = os.environ | {_COMPILING: "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    running = [
        subprocess.Popen(
            [*command, *chosen[number::_PROCESSES]],
            env=environment,
            cwd=session.config.rootpath,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number in range(_PROCESSES)
    ]
    for process in running:  # a failure is found again, and reported, by this process
        process.wait()


@pytest.fixture(autouse=True)
def small_tensors_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave nothing to PyTorch for being small, so that small tensors show what large ones do."""
    monkeypatch.setattr(heuristics, "MIN_CUDA", 0)
    monkeypatch.setattr(heuristics, "MIN_CUDA_CHANNELS_LAST", 0)
