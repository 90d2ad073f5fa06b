"""A plan whose work fails, on a backend of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import normgrad
from normgrad import Plan
from normgrad.contract.arrays import as_view
from normgrad.contract.plan import Problem, allocate_host
from normgrad.contract.view import Memory, View
from support.refusals import a


class FailingBackend:
    """One whose work fails."""

    name = "failing"
    workspace_size = 8

    def prepare(self, problem: Problem) -> FailingBackend:
        return self

    def allocate(self, nbytes: int, device: str, stream: Any = None) -> Memory:
        return allocate_host(nbytes)

    def launch(self, views: Mapping[str, View], workspace: int, stream: Any) -> None:
        raise ArithmeticError("{lost} a digit")


def failing_plan() -> Plan:
    """A plan whose work fails."""
    signature = normgrad.batch_norm_stats.signature
    views = {name: as_view(a(4, 3) if name == "input" else a(3)) for name in ("input", "mean", "invstd")}
    return Plan(Problem(signature, views, {"eps": 1e-5}), FailingBackend())
