"""normgrad: a plan that runs again and again, and the plain call, with tensors and with NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from normgrad.bench.contenders.contender import Contender, Role, Unavailable
from normgrad.bench.contenders.tensors import arguments_as_torch, as_torch, from_torch
from normgrad.bench.workload import Workload
from normgrad.contract.status import NO_KERNEL, ContractError

PLAN = "normgrad"
CALL = "normgrad call"
NUMPY_CALL = "normgrad call, NumPy"


class Normgrad:
    """The operator itself, on whatever backend is chosen."""

    name = PLAN

    def __init__(self, device: str = "cpu") -> None:
        self._device = device

    def prepare(self, work: Workload) -> Iterable[Contender]:
        """A repeatable plan with its outputs in place; for small data the plain calls too."""
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
        for name, call in self._calls(work) if work.case.is_small else ():
            yield Contender(name, Role.OURS, call, partial(self._called, call))

    def _calls(self, work: Workload) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The call as a user of PyTorch writes it, where that is installed, and on a CPU as one of NumPy does."""
        if self._device != "cpu" or find_spec("torch") is not None:
            yield CALL, partial(work.operator, *_by_position(work, arguments_as_torch(work.arguments, self._device)))
        if self._device == "cpu":
            yield NUMPY_CALL, partial(work.operator, *_by_position(work, work.arguments))

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


def _by_position(work: Workload, arguments: Mapping[str, Any]) -> list[Any]:
    """The arguments in the operator's order, of which the last have defaults."""
    return [arguments[name] for name in work.operator.names if name in arguments]
