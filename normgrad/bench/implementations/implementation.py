"""What an implementation is, and what makes implementations of a workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from normgrad.bench.workload import Workload
from normgrad.testing.expected import as_tuple


class Role(str, Enum):
    """Whose time it is."""

    OURS = "ours"
    PEER = "peer"
    LIMIT = "limit"


class Unavailable(Exception):
    """A library that cannot do a workload; the text says why."""


@dataclass(frozen=True)
class Implementation:
    """Something that does a workload.

    Attributes
    ----------
    name : str
        As the tables show it.
    role : Role
        Whose time it is.
    run : function
        Does the work once; what is timed.
    results : function or None
        Does the work once and returns an array per output of the operator (NumPy's, or a tensor on either device),
        None for those that the library does not compute. None for an implementation that only moves bytes.
    workspace : int or None
        The bytes of temporary memory that it says it needs.
    """

    name: str
    role: Role
    run: Callable[[], Any]
    results: Callable[[], Sequence[Any]] | None = None
    workspace: int | None = None


def results_of(run: Callable[[], Any]) -> Sequence[Any]:
    """Do the work once and return an array, or None, per output."""
    return as_tuple(run())


class Library(Protocol):
    """Makes implementations."""

    name: str

    def prepare(self, work: Workload) -> Iterable[Implementation]:
        """The implementations for a workload, ready to run; Unavailable where there are none."""
