"""The speed of an operator on each pattern of values, against normal data and against PyTorch.

Every pattern of a case is timed in turns: normgrad on normal data, normgrad on the pattern, and PyTorch's operator on
the pattern. A ratio is the median over the rounds of the ratio within a round, so that a machine that is slow for a
while does not count for one side alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from normgrad.bench.cases import Case
from normgrad.bench.clock import Run, median_ratio, rounds_of_blocks
from normgrad.bench.implementations.implementation import Library, Role
from normgrad.bench.implementations.ours import Normgrad
from normgrad.bench.implementations.pytorch import PyTorch
from normgrad.bench.patterns import NORMAL, PATTERNS
from normgrad.bench.runner import device_clock, prepared, verified
from normgrad.bench.workload import Workload, tensor_of, workload

#: How often everything is timed: odd, so that the median is a round's own ratio; twelve disturbed rounds do no harm.
ROUNDS = 25

CONTROL = "normal, another seed"


@dataclass(frozen=True)
class PatternResult:
    """One operator on one pattern of values.

    Attributes
    ----------
    pattern : str
        The tensor that the pattern changes, and how; ``normal`` for the baseline, :data:`CONTROL` for the control.
    seconds, normal_seconds, pytorch_seconds : float or None
        Medians of the times of a call: on the pattern, on normal data beside it, and of PyTorch on the pattern. None
        for results that are not within the bound, and where PyTorch has no such operator.
    over_normal, over_pytorch, pytorch_over_normal : float or None
        Ratios of times: the pattern's over normal data's, the pattern's over PyTorch's, and PyTorch's over its own on
        normal data.
    error, pytorch_error : float or None
        The largest error as a fraction of what is allowed; PyTorch's bound is a loose one.
    problem, pytorch_problem : str
        What is wrong with the results. PyTorch is timed all the same if it is right on normal data.
    """

    case: Case
    pattern: str
    seconds: float | None = None
    normal_seconds: float | None = None
    pytorch_seconds: float | None = None
    over_normal: float | None = None
    over_pytorch: float | None = None
    pytorch_over_normal: float | None = None
    error: float | None = None
    problem: str = ""
    pytorch_error: float | None = None
    pytorch_problem: str = ""
    rounds: int = 0

    @property
    def is_pattern(self) -> bool:
        """Whether the data is other than normal."""
        return self.pattern not in (NORMAL.name, CONTROL)


@dataclass(frozen=True)
class PatternCase:
    """All patterns of one case; ``skipped`` says by library why one took no part."""

    case: Case
    results: Sequence[PatternResult]
    skipped: dict[str, str]


def libraries() -> list[Library]:
    """Return who takes part: normgrad, and PyTorch where it is installed."""
    return [Normgrad(), *([PyTorch()] if find_spec("torch") is not None else [])]


def run_patterns(case: Case, device: str, libraries: Sequence[Library], rounds: int = ROUNDS) -> PatternCase:
    """Verify and time every pattern that concerns a case's operator."""
    results: list[PatternResult] = []
    ours: dict[str, Run] = {}
    peers: dict[str, Run] = {}
    skipped: dict[str, str] = {}
    for name, work in _workloads(case, device).items():
        implementations, absent = prepared(work, libraries)
        skipped |= absent
        own = next((one for one in implementations if one.role is Role.OURS), None)
        peer = next((one for one in implementations if one.role is Role.PEER), None)
        chosen = [c for c in (own, peer) if c is not None]
        verdicts = verified(work, chosen, sampled=True)
        result = PatternResult(case, name)
        if own is not None:
            verdict = verdicts[own.name]
            result = replace(result, error=verdict.worst, problem=verdict.problem)
            if not verdict.problem:
                ours[name] = own.run
        if peer is not None:
            verdict = verdicts[peer.name]
            result = replace(result, pytorch_error=verdict.worst, pytorch_problem=verdict.problem)
            peers[name] = peer.run
        results.append(result)
    if results[0].pytorch_problem:  # it does not compute this operator, so its times would mean nothing
        peers = {}
    times = _timed(ours, peers, device, rounds)
    return PatternCase(case, [_with_times(result, *times) for result in results], skipped)


def _workloads(case: Case, device: str) -> dict[str, Workload]:
    """Return the case on normal data, on other normal data, and on each pattern that changes what it takes."""
    found = {
        NORMAL.name: workload(case, device=device),
        CONTROL: workload(case, seed=1, device=device),
    }
    for pattern in PATTERNS:
        tensor = tensor_of(pattern, case.operator)
        if tensor is not None:
            found[f"{tensor}: {pattern.name}"] = workload(case, device=device, pattern=pattern)
    return found


Rounds = dict[str, list[float]]


def _timed(ours: dict[str, Run], peers: dict[str, Run], device: str, rounds: int) -> tuple[Rounds, Rounds, Rounds]:
    """Return the rounds' seconds of normgrad on each pattern, on normal data beside each, and of PyTorch on each."""
    if NORMAL.name not in ours:
        return {}, {}, {}
    beside: dict[tuple[str, str], Run] = {}
    for name, run in ours.items():
        beside["normal", name] = ours[NORMAL.name]
        beside["ours", name] = run
    theirs: dict[tuple[str, str], Run] = {("PyTorch", name): run for name, run in peers.items()}
    blocks = [block for block in (beside, theirs) if block]
    found = rounds_of_blocks(blocks, rounds, None if device == "cpu" else device_clock())
    own, normal, peer = (
        {name: seconds for (whose, name), seconds in found.items() if whose == which}
        for which in ("ours", "normal", "PyTorch")
    )
    return own, normal, peer


def _with_times(result: PatternResult, own: Rounds, normal: Rounds, peer: Rounds) -> PatternResult:
    name = result.pattern
    return replace(
        result,
        seconds=_median(own.get(name)),
        normal_seconds=_median(normal.get(name)),
        pytorch_seconds=_median(peer.get(name)),
        over_normal=median_ratio(own.get(name), normal.get(name)),
        over_pytorch=median_ratio(own.get(name), peer.get(name)),
        pytorch_over_normal=median_ratio(peer.get(name), peer.get(NORMAL.name)),
        rounds=len(own.get(name, ())),
    )


def _median(seconds: list[float] | None) -> float | None:
    return statistics.median(seconds) if seconds else None


def compile_case(case: Case) -> None:
    """Compile the CUDA kernels of a case."""
    prepared(workload(case, device="cuda"), [Normgrad()])
