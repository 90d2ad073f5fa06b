"""How many threads calls may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import normgrad
from normgrad.contract.status import shown
from support.processes import run_python

_PRINT = "import normgrad; print(normgrad.get_num_threads())"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = normgrad.get_num_threads()
    yield
    normgrad.set_num_threads(before)


def test_set_and_get() -> None:
    for number in (1, 3, 64):
        normgrad.set_num_threads(number)
        assert normgrad.get_num_threads() == number


@pytest.mark.parametrize("number", [np.int64(3), np.array(3)])
def test_integers_of_numpy(number: Any) -> None:
    normgrad.set_num_threads(number)
    assert type(normgrad.get_num_threads()) is int
    assert normgrad.get_num_threads() == 3


@pytest.mark.parametrize("number", [0, -1, 1.5, "2", None, True, 4097, 10**30, 10**5000], ids=shown)
def test_a_wrong_number_changes_nothing(number: Any) -> None:
    normgrad.set_num_threads(2)
    with pytest.raises(ValueError, match="must be a whole number from 1 to 4096"):
        normgrad.set_num_threads(number)
    assert normgrad.get_num_threads() == 2


def test_the_default_is_the_cores_that_the_process_may_use() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert int(run_python(_PRINT, NORMGRAD_NUM_THREADS="")) == cores


def test_the_environment() -> None:
    assert run_python(_PRINT, NORMGRAD_NUM_THREADS="7").strip() == "7"
    code = f"try:\n    {_PRINT}\nexcept ValueError as error:\n    print(error)"
    for wrong in ("0", "many", "1.5", "4097", "9" * 20):
        assert f"NORMGRAD_NUM_THREADS is '{wrong}', and must be a whole number from 1 to 4096" in run_python(
            code, NORMGRAD_NUM_THREADS=wrong
        )
