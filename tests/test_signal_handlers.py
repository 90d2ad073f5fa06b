"""Exceptions that signal handlers raise, such as a caller's timeout: they leave a call as they are."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import normgrad
from support.failing import FailingBackend, failing_plan

X = np.ones((2, 4), np.float32)


class Timeout(Exception):
    """What the handler raises."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def handle(*_: Any) -> None:
        raise Timeout

    before = signal.signal(signal.SIGTERM, handle)
    yield
    signal.signal(signal.SIGTERM, before)


def _interrupt(*_: Any, **__: Any) -> Any:
    signal.raise_signal(signal.SIGTERM)


class _Interrupted:
    """An argument in whose code the signal arrives."""

    __index__ = __float__ = __iter__ = __dlpack__ = _interrupt


class _Unshowable:
    """A wrong argument, in whose repr the signal arrives."""

    __repr__ = _interrupt


@pytest.mark.parametrize(
    "arguments",
    [(_Interrupted(), [4]), (X, _Interrupted()), (X, [_Interrupted()]), (X, [4], None, None, _Unshowable())],
    ids=["array", "list", "integer", "text"],
)
def test_in_an_argument(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(Timeout):
        normgrad.layer_norm(*arguments)


def test_in_a_real_number() -> None:
    class Real(float):
        __float__ = _interrupt

    with pytest.raises(Timeout):
        normgrad.layer_norm(X, [4], None, None, Real(1e-5))


def test_in_an_error_of_an_argument() -> None:
    class Error(Exception):
        __str__ = _interrupt

    class Broken:
        def __dlpack__(self, **_: Any) -> Any:
            raise Error

    with pytest.raises(Timeout):
        normgrad.layer_norm(Broken(), [4])


def test_in_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FailingBackend, "launch", _interrupt)
    with pytest.raises(Timeout):
        failing_plan().run()
