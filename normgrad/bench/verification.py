"""Whether results are within the bound, which every benchmark asks before it reports a time.

The oracle computes in float64 and needs many times the memory of the data, so it gets one part of the data after
another: some rows of LayerNorm, some samples of GroupNorm, some channels of BatchNorm. What LayerNorm and GroupNorm sum
over all rows or samples depends on one column or channel alone, and is verified in parts of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from normgrad.bench.cases import GATHER, Case
from normgrad.bench.workload import Workload
from normgrad.reference import rounded
from normgrad.testing import compare, oracle, terms, ulp
from normgrad.testing.expected import as_tuple
from normgrad.testing.host import on_host
from normgrad.testing.terms import Magnitude

#: Elements of the data that the oracle gets at a time: a megabyte of float64, which stays in the caches.
PART = 1 << 17

#: What other libraries may be wrong by, as a fraction of the terms that the formula adds up: their statistics and sums
#: may be as coarse as the data's dtype.
LOOSE = {"float32": 2.0**-12, "float16": 2.0**-6, "bfloat16": 2.0**-3}

_DATA = ("grad_out", "input", "grad_input", "output")
_PER_ROW = (*_DATA, "mean", "rstd")
_SUMS = ("grad_weight", "grad_bias")

Cut = Callable[[str, Any], Any]  # of a tensor's name and the tensor: the part of it


@dataclass
class Verdict:
    """What was found about an implementation's results.

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

    results: Sequence[Any]
    strict: bool = True
    verdict: Verdict = field(default_factory=Verdict)


@dataclass(frozen=True)
class _Part:
    """Some of a workload: the oracle's arguments, and the outputs that follow from them alone."""

    arguments: dict[str, Any]
    outputs: tuple[str, ...]
    cut: Cut


def verify(work: Workload, claims: Sequence[Claim], sampled: bool = False) -> None:
    """Compare every claim with the oracle; their verdicts take in what is found.

    ``sampled``: of large data some rows and columns alone, those of the middle element among them.
    """
    names = work.operator.signature.output_names
    for part in _parts(work, sampled):
        exact = as_tuple(getattr(oracle, work.case.operator)(**part.arguments))
        sizes = as_tuple(getattr(terms, work.case.operator)(**part.arguments))
        for claim in claims:
            for name in part.outputs:
                position = names.index(name)
                result = claim.results[position]
                if result is not None:
                    _judge(work, claim, name, part.cut(name, result), exact[position], sizes[position])


def _parts(work: Workload, sampled: bool) -> Iterator[_Part]:
    case, outputs = work.case, tuple(work.operator.signature.output_names)
    if case.operator == GATHER:
        yield _part(work, outputs, lambda name, array: on_host(array), {})
    elif case.operator.startswith("batch_norm"):
        for span in _spans(case.shape[1], case.elements, sampled):
            yield _part(work, outputs, _channels(span), {})
    else:
        by_row = tuple(name for name in outputs if name not in _SUMS)
        members = case.shape[1] // case.group if case.group else 0
        for span in _spans(case.shape[0], case.elements, sampled):
            groups = _groups(case, sampled)
            count = groups.stop - groups.start
            changed = {"N": span.stop - span.start, "C": count * members, "group": count}
            yield _part(work, by_row, _rows(span, groups, members), changed)
        sums = tuple(name for name in outputs if name in _SUMS)
        for span in _spans(case.shape[1], case.elements, sampled) if sums else ():
            width = span.stop - span.start
            # Of GroupNorm every channel becomes a group of its own, with its group's statistics.
            changed = {"normalized_shape": (width,), "C": width, "group": width}
            yield _part(work, sums, _columns(span, members), changed)


def _spans(count: int, elements: int, sampled: bool) -> Iterator[slice]:
    """Yield parts of an axis of so many indices; of a sample the first, the one from the middle on, and the last.

    The last is left out where a single index has more elements than a part.
    """
    step = max(1, PART * count // elements)
    starts: Sequence[int] = range(0, count, step)
    if sampled and len(starts) > 3:
        alone = elements > PART * count
        step = max(1, step // 3)
        starts = (0, count // 2) if alone else (0, count // 2, count - step)
    for start in starts:
        yield slice(start, min(start + step, count))


def _groups(case: Case, sampled: bool) -> slice:
    """Return which groups of a sample of GroupNorm are looked at: all, or those from the middle on that fit a part."""
    fitting = PART * case.shape[0] * case.group // case.elements
    if not sampled or fitting >= case.group:
        return slice(0, case.group)
    middle = case.group // 2
    return slice(middle, min(case.group, middle + max(1, fitting)))


def _part(work: Workload, outputs: tuple[str, ...], cut: Cut, changed: dict[str, Any]) -> _Part:
    arguments = {
        name: cut(name, value) if hasattr(value, "shape") else changed.get(name, value)
        for name, value in work.arguments.items()
    }
    return _Part(arguments, outputs, cut)


def _channels(span: slice) -> Cut:
    """Some channels of BatchNorm."""

    def cut(name: str, array: Any) -> np.ndarray:
        return on_host(array if name == "counter" else array[:, span] if name in _DATA else array[span])

    return cut


def _rows(span: slice, groups: slice, members: int) -> Cut:
    """Some rows of LayerNorm, or some groups of some samples of GroupNorm, which have so many members."""
    channels = slice(groups.start * members, groups.stop * members)

    def cut(name: str, array: Any) -> np.ndarray:
        if not members:
            return on_host(array[span] if name in _PER_ROW else array)
        if name in _PER_ROW:
            return on_host(array[span, channels if name in _DATA else groups])
        return on_host(array[channels])

    return cut


def _columns(span: slice, members: int) -> Cut:
    """Some columns of LayerNorm, or channels of GroupNorm, whose groups have so many members."""

    def cut(name: str, array: Any) -> np.ndarray:
        if name in _DATA:
            return on_host(array[:, span])
        if name in ("mean", "rstd"):
            return np.repeat(on_host(array), members, 1)[:, span] if members else on_host(array)
        return on_host(array[span])

    return cut


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
    with np.errstate(all="ignore"):
        finite = np.isfinite(rounded(exact, result.dtype))
        share = np.abs(result.astype(np.float64) - exact) / allowed
    # Where the exact value is NaN or Inf, or overflows the dtype, either will do.
    share = np.where(finite, share, np.where(np.isfinite(result), np.inf, 0.0))
    worst = float(np.max(share, initial=0.0))
    claim.verdict.add(output, worst, f"the worst error is {worst:.3g} of what is allowed")
