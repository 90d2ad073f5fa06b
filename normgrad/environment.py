"""Environment variables, read at every call and quickly."""

from __future__ import annotations

import os
from collections.abc import Callable


def variable(name: str) -> Callable[[], str | None]:
    """Return a function that reads an environment variable; None where it is not set or empty.

    ``os.environ.get`` takes 1 µs to find that a variable is not set, the dictionary under it 0.05.
    """
    data, encode = getattr(os.environ, "_data", None), getattr(os.environ, "encodekey", None)
    if not isinstance(data, dict) or encode is None:
        return lambda: os.environ.get(name) or None
    key = encode(name)
    return lambda: (os.environ.get(name) or None) if key in data else None
