"""Whether results are right, before anyone asks how fast they came.

The oracle works in float64 and needs many times the memory of the data, so it sees one part of the data after the
other: some rows of LayerNorm, some samples of GroupNorm, some channels of BatchNorm. Sums over the rows or samples
are the sums of the parts' sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from normgrad.bench.cases import GATHER
from normgrad.bench.workload import Workload
from normgrad.testing import compare, oracle, terms, ulp
from normgrad.testing.terms import Magnitude

#: Elements of the data that the oracle sees at a time: a megabyte of float64, which stays in the caches.
PART = 1 << 17

#: What other libraries may be wrong by, as a share of the terms that the formula adds up: their statistics and sums
#: may be as coarse as the data's dtype.
LOOSE = {"float32": 2.0**-12, "float16": 2.0**-6, "bfloat16": 2.0**-3}

_DATA = ("grad_out", "input", "grad_input", "output")
_PER_ROW = (*_DATA, "mean", "rstd")
_SUMS = ("grad_weight", "grad_bias")


@dataclass
class Verdict:
    """What was found about a contender's results.

    Attributes
    ----------
    worst : float
        The largest error as a fraction of what is allowed.
    problem : str
        What is wrong; empty where nothing is.
    """

    worst: float = 0.0
    problem: str = ""

    def add(self, output: str, worst: float, text: str) -> None:
        """Take in the comparison of (a part of) an output."""
        if not worst <= 1 and not self.problem:
            self.problem = f"{output}: {text}"
        self.worst = max(self.worst, worst) if not np.isnan(worst) else np.inf


@dataclass(frozen=True)
class Claim:
    """Results to be verified: an array per output (None where the library has none), and how strictly."""

    results: Sequence[np.ndarray | None]
    strict: bool = True
    verdict: Verdict = field(default_factory=Verdict)


def verify(work: Workload, claims: Sequence[Claim]) -> None:
    """Hold every claim against the oracle; their verdicts take in what is found."""
    names = work.operator.signature.output_names
    sums: dict[str, tuple[Any, Magnitude]] = {}
    for span in _spans(work):
        arguments = _part(work, span)
        exact = _as_tuple(getattr(oracle, work.case.operator)(**arguments))
        sizes = _as_tuple(getattr(terms, work.case.operator)(**arguments))
        for position, name in enumerate(names):
            if _is_sum(work, name):
                value, scales = sums.get(name, (0.0, Magnitude(0.0)))
                sums[name] = (value + exact[position], scales + sizes[position])
                continue
            for claim in claims:
                result = claim.results[position]
                if result is not None:
                    _judge(work, claim, name, _cut(work, name, result, span), exact[position], sizes[position])
    for name, (value, scales) in sums.items():
        for claim in claims:
            result = claim.results[names.index(name)]
            if result is not None:
                _judge(work, claim, name, result, value, scales)


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def _is_batch_norm(work: Workload) -> bool:
    return work.case.operator.startswith("batch_norm")


def _is_sum(work: Workload, output: str) -> bool:
    """Whether an output is a sum over all parts."""
    return output in _SUMS and not _is_batch_norm(work)


def _spans(work: Workload) -> Iterator[slice]:
    """The parts: rows, samples or channels."""
    case = work.case
    if case.operator == GATHER:
        yield slice(None)
        return
    count = case.shape[1] if _is_batch_norm(work) else case.shape[0]
    step = max(1, PART * count // case.elements)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _cut(work: Workload, name: str, array: np.ndarray, span: slice) -> np.ndarray:
    """The part of a tensor."""
    if work.case.operator == GATHER:
        return array
    if _is_batch_norm(work):
        return array if name == "counter" else array[:, span] if name in _DATA else array[span]
    return array[span] if name in _PER_ROW else array


def _part(work: Workload, span: slice) -> dict[str, Any]:
    """The operator's arguments for a part."""
    arguments = {
        name: _cut(work, name, value, span) if isinstance(value, np.ndarray) else value
        for name, value in work.arguments.items()
    }
    if "N" in arguments:
        arguments["N"] = len(arguments["input"])
    return arguments


def _judge(
    work: Workload, claim: Claim, output: str, result: np.ndarray, exact: np.ndarray, magnitude: Magnitude
) -> None:
    if claim.strict:
        report = compare(result, exact, magnitude)
        claim.verdict.add(output, report.worst, report.text)
        return
    if result.shape != exact.shape:
        claim.verdict.add(output, np.inf, f"the shape is {result.shape}, and must be {exact.shape}")
        return
    allowed = LOOSE[work.case.dtype] * magnitude.total + ulp(exact, result.dtype.name)
    worst = float(np.max(np.abs(result.astype(np.float64) - exact) / allowed, initial=0.0))
    claim.verdict.add(output, worst, f"the worst error is {worst:.3g} of what is allowed")
