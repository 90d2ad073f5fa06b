"""normgrad: a plan that runs again and again, and the plain call, with tensors and with NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from normgrad.bench.implementations.implementation import Implementation, Role, Unavailable, results_of
from normgrad.bench.tensors import arguments_as_torch
from normgrad.bench.workload import Workload
from normgrad.contract.status import NO_KERNEL, ContractError

PLAN = "normgrad"
CALL = "normgrad call"
NUMPY_CALL = "normgrad call, NumPy"


class Normgrad:
    """The operator itself, on whatever backend is chosen."""

    name = PLAN

    def prepare(self, work: Workload) -> Iterable[Implementation]:
        """A repeatable plan with its outputs in place; for small data the plain calls too."""
        outputs = work.outputs()
        try:
            plan = work.operator.plan(**work.arguments, out=outputs)
            plan.repeatable = True
            plan.run()
        except ContractError as error:
            if error.status != NO_KERNEL:
                raise
            raise Unavailable(str(error)) from None
        yield Implementation(PLAN, Role.OURS, plan.run, partial(_planned, plan.run, outputs), plan.workspace_size)
        for name, call in _calls(work) if work.case.is_small else ():
            yield Implementation(name, Role.OURS, call, partial(results_of, call))


def _calls(work: Workload) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The call as a user of PyTorch writes it, where that is installed, and on a CPU as one of NumPy does."""
    if work.device != "cpu" or find_spec("torch") is not None:
        yield CALL, partial(work.operator, *_by_position(work, arguments_as_torch(work.arguments, work.device)))
    if work.device == "cpu":
        yield NUMPY_CALL, partial(work.operator, *_by_position(work, work.arguments))


def _planned(run: Callable[[], None], outputs: Sequence[Any]) -> Sequence[Any]:
    run()
    return outputs


def _by_position(work: Workload, arguments: Mapping[str, Any]) -> list[Any]:
    """The arguments in the operator's order, of which the last have defaults."""
    return [arguments[name] for name in work.operator.names if name in arguments]
