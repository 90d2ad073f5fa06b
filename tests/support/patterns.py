"""Results on every pattern of values of ``normgrad bench --data``, compared with the oracle."""

from __future__ import annotations

from normgrad.bench.cases import Case
from normgrad.bench.patterns import NORMAL, PATTERNS, Pattern
from normgrad.bench.verification import Claim, verify
from normgrad.bench.workload import tensor_of, workload
from normgrad.testing.expected import as_tuple


def patterns_of(operator: str) -> list[Pattern]:
    """Normal data, and the patterns that change a tensor of the operator."""
    return [NORMAL, *(pattern for pattern in PATTERNS if tensor_of(pattern, operator) is not None)]


def failures(case: Case) -> list[str]:
    """The patterns on which a call is beyond the bound, with what is wrong."""
    found = []
    for pattern in patterns_of(case.operator):
        work = workload(case, pattern=pattern)
        claim = Claim(as_tuple(work.operator(**work.arguments)), True)
        verify(work, [claim])
        if claim.verdict.problem:
            found.append(f"{tensor_of(pattern, case.operator)} {pattern.name}: {claim.verdict.problem}")
    return found
