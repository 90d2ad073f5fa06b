"""The functions of the interface that are Python, by their C names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

FUNCTIONS: dict[str, Callable[..., Any]] = {}


def exported(name: str) -> Callable[[F], F]:
    """Make a function the body of a C function. It gets every argument as a number and returns a code or an address."""

    def register(body: F) -> F:
        FUNCTIONS[name] = body
        return body

    return register
