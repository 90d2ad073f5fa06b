"""Valid calls of every operator, in every layout, dtype and sharing of memory, against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.recipes import RECIPES, valid_calls


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("operator", RECIPES)
def test_a_valid_call_is_right_and_touches_nothing_else(operator: str) -> None:
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        case = data.draw(valid_calls(operator))
        expected, magnitudes = case.exact()
        before = case.arena.memory.copy()
        results = case.call()
        case.check_results(results, expected, magnitudes)
        changed = before != case.arena.memory
        assert not np.any(changed & ~case.arena.bytes_of(case.written_places())), "bytes outside the outputs changed"

    holds()
