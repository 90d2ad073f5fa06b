"""Valid calls with one rule broken: the one right answer, and not a byte changed."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import normgrad
from normgrad.contract.status import Status
from support.breaks import KINDS, Break
from support.case import Case
from support.recipes import RECIPES, valid_calls


def _refused(case: Case, broken: Break, planned: bool) -> normgrad.ContractError:
    operator = getattr(normgrad, case.operator)
    out = tuple(case.out) if broken.out is None else broken.out
    # Forward operators take no product= argument, so it is chosen around the call.
    around = nullcontext() if broken.product is None else normgrad.use_product(broken.product)
    with around, pytest.raises(normgrad.ContractError) as caught:
        (operator.plan if planned else operator)(**{**case.arguments, **broken.arguments}, out=out)
    return caught.value


@pytest.mark.parametrize("operator", RECIPES)
def test_one_broken_rule_has_one_answer_and_changes_nothing(backend: str, operator: str) -> None:
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        case = data.draw(valid_calls(operator))
        rng = random.Random(data.draw(st.integers(0, 2**32 - 1)))
        possible = list(data.draw(st.sampled_from(KINDS))(case, rng))
        assume(possible)
        broken = data.draw(st.sampled_from(possible))
        all_given = all(array is not None or not o.wanted for o, array in zip(case.outputs, case.out, strict=True))
        planned = broken.only_plan or (all_given and data.draw(st.booleans()))
        watched = [case.arena.memory, *broken.memory]
        before = [memory.tobytes() for memory in watched]
        error = _refused(case, broken, planned)
        assert [memory.tobytes() for memory in watched] == before
        assert (error.status, error.operator, error.parameter) == (broken.status, operator, broken.parameter), (
            f"{broken.rule}: {error}"
        )
        assert error.status_name == Status(broken.status).name
        assert str(error).startswith(f"{operator}: {broken.parameter or ''}")

    holds()
