"""What a run found, and what follows from it."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normgrad.bench.cases import Case
from normgrad.bench.clock import Timing
from normgrad.bench.implementations.implementation import Role
from normgrad.bench.implementations.ours import CALL, NUMPY_CALL


@dataclass(frozen=True)
class Measurement:
    """What was found about one implementation in one case.

    Attributes
    ----------
    error : float or None
        The largest error as a fraction of what is allowed; None for one that only moves bytes.
    problem : str
        What is wrong with its results. There is no timing then.
    growth : int or None
        By how many bytes the process grew at most during a call.
    workspace : int or None
        The bytes of temporary memory that it says it needs.
    host, graph : float or None
        Seconds of the host for a call on an idle GPU, and of the GPU for a call in a replayed CUDA graph.
    """

    implementation: str
    role: Role
    timing: Timing | None
    error: float | None = None
    problem: str = ""
    growth: int | None = None
    workspace: int | None = None
    host: float | None = None
    graph: float | None = None


@dataclass(frozen=True)
class CaseResult:
    """All that was found in one case; ``skipped`` says by implementation why one is not in it."""

    case: Case
    measurements: Sequence[Measurement]
    skipped: Mapping[str, str] = field(default_factory=dict)

    def of(self, role: Role) -> list[Measurement]:
        """The measurements of a role."""
        return [measurement for measurement in self.measurements if measurement.role is role]

    def fastest(self, role: Role) -> Measurement | None:
        """The fastest implementation of a role whose results are right."""
        timed = [m for m in self.of(role) if m.timing is not None]
        return min(timed, key=lambda m: _seconds(m), default=None)

    @property
    def ours(self) -> Measurement | None:
        """The plan, which comes before the plain call."""
        return next(iter(self.of(Role.OURS)), None)

    def of_limit(self, measurement: Measurement | None) -> float | None:
        """An implementation's speed as a share of the limit's."""
        return _speed(measurement, self.fastest(Role.LIMIT))

    def of_peer(self, measurement: Measurement | None) -> float | None:
        """An implementation's speed as a multiple of the fastest peer's."""
        return _speed(measurement, self.fastest(Role.PEER))


def _seconds(measurement: Measurement) -> float:
    assert measurement.timing is not None
    return measurement.timing.median


def _speed(measurement: Measurement | None, other: Measurement | None) -> float | None:
    if measurement is None or measurement.timing is None or other is None or other.timing is None:
        return None
    return _seconds(other) / _seconds(measurement)


def worst_first(results: Iterable[CaseResult]) -> list[CaseResult]:
    """Wrong results, then by share of the limit; small data by how it compares with the fastest peer."""

    def rank(result: CaseResult) -> tuple[bool, float]:
        ours = result.ours
        if ours is None or ours.timing is None:
            return (ours is None, -math.inf)
        share = (result.of_peer(ours) or result.of_limit(ours)) if result.case.is_small else result.of_limit(ours)
        return (False, math.inf if share is None else share)

    return sorted(results, key=rank)


def wrong(results: Iterable[CaseResult]) -> list[tuple[Case, Measurement]]:
    """Every implementation whose results are not right."""
    return [(result.case, m) for result in results for m in result.measurements if m.problem]


Speeds = dict[str, list[tuple[float, CaseResult]]]


def speeds_against_peers(results: Iterable[CaseResult]) -> Speeds:
    """By peer: every case in which both were timed, with the speed of our slowest way against the peer's.

    Of calls, the one with tensors counts, which is what a user of the peer would write; where there is none, the one
    with NumPy arrays.
    """
    return _slowest(
        results, lambda ways: [m for m in ways if m.implementation != NUMPY_CALL or CALL not in _names(ways)]
    )


def numpy_speeds_against_peers(results: Iterable[CaseResult]) -> Speeds:
    """The same of calls with NumPy arrays where they do not count."""
    return _slowest(results, lambda ways: [m for m in ways if m.implementation == NUMPY_CALL and CALL in _names(ways)])


def _names(measurements: Sequence[Measurement]) -> list[str]:
    return [m.implementation for m in measurements]


def _slowest(results: Iterable[CaseResult], choose: Callable[[list[Measurement]], list[Measurement]]) -> Speeds:
    speeds: Speeds = {}
    for result in results:
        for peer in result.of(Role.PEER):
            own = [speed for m in choose(result.of(Role.OURS)) if (speed := _speed(m, peer)) is not None]
            if own:
                speeds.setdefault(peer.implementation, []).append((min(own), result))
    return speeds


def geometric_mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


@dataclass(frozen=True)
class Summary:
    """An operator in one dtype and layout, over the cases that are not small."""

    operator: str
    dtype: str
    layout: str
    cases: int
    worst_of_limit: float | None
    mean_of_limit: float | None
    mean_of_peer: float | None
    largest_error: float | None


def summaries(results: Iterable[CaseResult]) -> list[Summary]:
    """One per operator, dtype and layout."""
    grouped: dict[tuple[str, str, str], list[CaseResult]] = {}
    for result in results:
        case = result.case
        grouped.setdefault((case.operator, case.dtype, case.layout), []).append(result)
    return [_summary(*key, group) for key, group in grouped.items()]


def _summary(operator: str, dtype: str, layout: str, group: Sequence[CaseResult]) -> Summary:
    large = [result for result in group if not result.case.is_small]
    shares = [share for result in large if (share := result.of_limit(result.ours)) is not None]
    against = [speed for result in large if (speed := result.of_peer(result.ours)) is not None]
    errors = [m.error for result in group for m in result.of(Role.OURS) if m.error is not None]
    return Summary(
        operator,
        dtype,
        layout,
        len(large),
        min(shares, default=None),
        geometric_mean(shares),
        geometric_mean(against),
        max(errors, default=None),
    )


def rows(results: Iterable[CaseResult]) -> Iterator[dict[str, Any]]:
    """One flat record per implementation and case; times in seconds."""
    for result in results:
        for m in result.measurements:
            yield {
                **result.case.fields,
                "implementation": m.implementation,
                "role": m.role.value,
                "seconds": m.timing.median if m.timing else None,
                "fastest_seconds": m.timing.fastest if m.timing else None,
                "rounds": m.timing.rounds if m.timing else None,
                "calls_per_round": m.timing.calls if m.timing else None,
                "of_limit": result.of_limit(m),
                "of_fastest_peer": result.of_peer(m),
                "error_of_bound": m.error,
                "problem": m.problem or None,
                "peak_growth_bytes": m.growth,
                "workspace_bytes": m.workspace,
                "host_seconds": m.host,
                "graph_seconds": m.graph,
            }


def skipped(results: Iterable[CaseResult]) -> list[dict[str, str]]:
    """Return a record for every implementation that took no part in a case, with the reason."""
    return [
        {"case": str(result.case), "implementation": name, "reason": reason}
        for result in results
        for name, reason in result.skipped.items()
    ]


def write_csv(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write one line per record; nothing where there is no value."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        for number, record in enumerate(records):
            if number == 0:
                writer = csv.DictWriter(stream, record)
                writer.writeheader()
            writer.writerow(record)


def write_json(path: Path, machine: Mapping[str, Any], records: Iterable[Mapping[str, Any]], **sections: Any) -> None:
    """Write the same records as ``results``, with the machine that they come from, and further sections."""
    content = {"machine": machine, "results": [_finite(record) for record in records], **sections}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
