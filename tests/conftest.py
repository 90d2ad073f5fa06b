"""Fixtures, and how many examples the property tests try.

``NORMGRAD_TEST_EXAMPLES`` sets the number of valid and of broken calls per operator (500 by default).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from normgrad import backends
from normgrad.contract import arrays, products
from normgrad.contract.view import Memory
from normgrad.operators import OPERATORS
from normgrad.operators.dispatch import Dispatch
from normgrad.threads import get_num_threads, set_num_threads
from support.arena import POISON

TESTS = os.path.dirname(__file__)

if find_spec("hypothesis") is not None:  # which the tests on a GPU do without
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "ci",
        max_examples=int(os.environ.get("NORMGRAD_TEST_EXAMPLES", "500")),
        derandomize=True,
        database=None,
        deadline=None,
        # The backend that a fixture sets is the same for every example.
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.load_profile("ci")

#: Beginnings of test files that compile, start processes or measure, for seconds a test. They are marked ``slow``, and
#: so is the run of a file in Triton's interpreter.
SLOW = (
    *("sdk/", "test_bench", "test_cpu_start", "test_cuda_compile", "test_docs", "test_examples"),
    *("test_jax", "test_patterns", "torch/test_torch_compile", "torch/test_torch_distributed"),
    *("torch/test_torch_sync_batch_norm", "torch/test_torch_threads"),
)
IN_THE_INTERPRETER = "test_this_file_passes_with_the_interpreter_on"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        file = os.path.relpath(item.path, TESTS)
        if file.startswith(SLOW) or item.name == IN_THE_INTERPRETER:
            item.add_marker(pytest.mark.slow)


if os.environ.get("TRITON_INTERPRET") == "1":
    backends.BACKENDS["interpreter"] = ("support.interpreter", "cpu")
else:
    collect_ignore = ["support/interpreter.py"]  # which cannot be imported: pytest would look for doctests in it
#: The backends on the CPU, each of which every numeric test runs on.
CPU_BACKENDS = [name for name, (_, device) in backends.BACKENDS.items() if device == "cpu"]


@pytest.fixture(params=CPU_BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend that calls run on."""
    monkeypatch.setenv(backends.ENVIRONMENT, request.param)
    return request.param


@pytest.fixture(autouse=True)
def no_product(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts without a product, and leaves none behind."""
    monkeypatch.delenv(products.ENVIRONMENT, raising=False)
    yield
    products._choices.clear()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take longer than the work, on small tensors."""
    threads, own = torch.get_num_threads(), get_num_threads()
    torch.set_num_threads(1)
    set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    set_num_threads(own)


@pytest.fixture
def on_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls compile nothing, and tables are of one width."""
    monkeypatch.setenv(backends.ENVIRONMENT, "reference")
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def misses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators whose calls no entry of the dispatch cache serves, as they come. All caches start empty."""
    for operator in OPERATORS.values():
        operator.dispatch.clear()
    found: list[str] = []
    miss = Dispatch._miss

    def counted(self: Dispatch, *args: Any) -> Any:
        found.append(self._signature.name)
        return miss(self, *args)

    monkeypatch.setattr(Dispatch, "_miss", counted)
    return found


@pytest.fixture
def poisoned(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All memory that the library brings, results and workspaces, starts as NaN."""
    for operator in OPERATORS.values():
        operator.dispatch.clear()
    for library in (arrays._NumPy, arrays._Torch):
        monkeypatch.setattr(library, "fresh", _poisoning(library.fresh))
    loaded = type(backends.load(backend))
    allocate = loaded.allocate

    def poisoned_workspace(self: Any, nbytes: int, device: str, stream: Any = None) -> Memory:
        memory: Memory = allocate(self, nbytes, device, stream)
        arrays.bytes_at(memory)[:] = bytes([POISON]) * memory.nbytes
        return memory

    monkeypatch.setattr(loaded, "allocate", poisoned_workspace)


def _poisoning(fresh: Any) -> Any:
    def poisoning_fresh(self: Any, *args: Any) -> Any:
        layout = fresh(self, *args)

        def allocate() -> Any:
            array = layout.allocate()
            if isinstance(array, torch.Tensor):
                array.fill_(float("nan"))
            else:
                array[...] = np.nan
            return array

        return dataclasses.replace(layout, allocate=allocate)

    return poisoning_fresh
