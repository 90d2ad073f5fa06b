"""normgrad: a plan that runs again and again, and the plain call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from normgrad.bench.contenders.contender import Contender, Role, Unavailable
from normgrad.bench.contenders.tensors import arguments_as_torch, as_torch, from_torch
from normgrad.bench.workload import Workload
from normgrad.contract.status import NO_KERNEL, ContractError

PLAN = "normgrad"
CALL = "normgrad call"


class Normgrad:
    """The operator itself, on whatever backend is chosen."""

    name = PLAN

    def __init__(self, device: str = "cpu") -> None:
        self._device = device

    def prepare(self, work: Workload) -> Iterable[Contender]:
        """A repeatable plan with its outputs in place; for small data the plain call too."""
        arguments, outputs = self._at_home(work)
        try:
            plan = work.operator.plan(**arguments, out=outputs)
            plan.repeatable = True
            plan.run()
        except ContractError as error:
            if error.status != NO_KERNEL:
                raise
            raise Unavailable(str(error)) from None
        yield Contender(PLAN, Role.OURS, plan.run, partial(self._planned, plan.run, outputs), plan.workspace_size)
        if work.case.is_small:
            call = partial(work.operator, **arguments)
            yield Contender(CALL, Role.OURS, call, partial(self._called, call))

    def _at_home(self, work: Workload) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Arguments and outputs where the backend works."""
        outputs = work.outputs()
        if self._device == "cpu":
            return work.arguments, outputs
        arguments = arguments_as_torch(work.arguments, self._device)
        return arguments, tuple(as_torch(output, self._device) for output in outputs)

    def _planned(self, run: Callable[[], None], outputs: Sequence[Any]) -> list[np.ndarray | None]:
        run()
        return [self._on_host(output) for output in outputs]

    def _called(self, call: Callable[[], Any]) -> list[np.ndarray | None]:
        results = call()
        return [self._on_host(result) for result in (results if isinstance(results, tuple) else (results,))]

    @staticmethod
    def _on_host(array: Any) -> np.ndarray | None:
        return array if isinstance(array, np.ndarray) else from_torch(array)
