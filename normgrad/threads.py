"""How many threads the kernels on the CPU use."""

from __future__ import annotations

import operator
import os

from normgrad.contract.status import shown
from normgrad.environment import variable

ENVIRONMENT = "NORMGRAD_NUM_THREADS"
_environment = variable(ENVIRONMENT)
_num_threads: int | None = None

_MOST = 4096  # more than a machine has cores; every thread has a part of the workspace
_RULE = f"must be a whole number from 1 to {_MOST}"


def usable_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _from_environment() -> int:
    text = _environment()
    if not text:
        return usable_cores()
    try:
        return _checked(int(text))
    except ValueError:
        raise ValueError(f"{ENVIRONMENT} is {shown(text)}, and {_RULE}") from None


def _checked(n: int) -> int:
    try:
        number = operator.index(n)
    except TypeError:
        number = 0
    if isinstance(n, bool) or not 1 <= number <= _MOST:
        raise ValueError(f"the number of threads is {shown(n)}, and {_RULE}")
    return number


def get_num_threads() -> int:
    """Return how many threads a call may use.

    By default what ``NORMGRAD_NUM_THREADS`` says, or else the cores that this process may run on. Where PyTorch is
    imported, a call uses no more threads than ``torch.get_num_threads()`` says either.
    """
    global _num_threads
    if _num_threads is None:
        _num_threads = _from_environment()
    return _num_threads


def set_num_threads(n: int) -> None:
    """Let every later call use up to ``n`` threads. Results do not depend on it, to the last bit."""
    global _num_threads
    _num_threads = _checked(n)
