"""Environment variables, read at every call and quickly."""

from __future__ import annotations

import os
from collections.abc import Callable


def stored(name: str) -> tuple[dict[bytes, bytes], bytes] | None:
    """The dictionary that holds the environment, and a variable's key in it; None where Python has it otherwise."""
    data, encode = getattr(os.environ, "_data", None), getattr(os.environ, "encodekey", None)
    return (data, encode(name)) if isinstance(data, dict) and encode is not None else None


def variable(name: str) -> Callable[[], str | None]:
    """A function that reads an environment variable; None where it is not set or empty.

    ``os.environ.get`` takes 1 µs to find that a variable is not set, the dictionary under it 0.05.
    """
    found = stored(name)
    if found is None:
        return lambda: os.environ.get(name) or None
    data, key = found
    return lambda: (os.environ.get(name) or None) if key in data else None
