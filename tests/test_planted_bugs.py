"""The judge catches classic bugs, each planted in a kernel that passes without it."""

from __future__ import annotations

import pytest

from normgrad.testing.cases import make_cases
from support.planted_bugs import BUGS, CORRECT, OPERATORS_TRIED, Trial


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    cases = [case for operator in OPERATORS_TRIED for case in make_cases(operator)]
    return [Trial(case) for case in cases if case.kind not in ("dtypes", "masks")]


def test_there_are_ten() -> None:
    assert len(BUGS) == 10


def test_the_kernel_itself_passes(trials: list[Trial]) -> None:
    for trial in trials:
        results = trial.run(CORRECT)
        assert trial.passes(results, "strict"), trial.case
        assert trial.passes(results, "cann"), trial.case


@pytest.mark.parametrize("bug", BUGS)
def test_strict_catches(trials: list[Trial], bug: str) -> None:
    assert not all(trial.passes(trial.run(BUGS[bug]), "strict") for trial in trials)


def test_strict_catches_what_cann_lets_pass(trials: list[Trial]) -> None:
    """A missing upcast on normally distributed data."""
    normal = [trial for trial in trials if trial.case.kind == "normal" and "32" not in trial.case.name]
    for trial in normal:
        results = trial.run(BUGS["missing upcast"])
        assert trial.passes(results, "cann")
        assert not trial.passes(results, "strict")
