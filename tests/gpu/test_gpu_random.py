"""Random calls on the GPU against the oracle; ``NORMGRAD_TEST_EXAMPLES`` is the number of draws (48 by default)."""

from __future__ import annotations

import os

import numpy as np
import pytest

import normgrad
from normgrad.testing import oracle, terms
from support.gpu import check_results
from support.random_calls import Draw, described, wide


@pytest.mark.parametrize("seed", range(int(os.environ.get("NORMGRAD_TEST_EXAMPLES", "48"))))
def test_results_are_within_the_bound(seed):
    with np.errstate(all="ignore"):
        for operator, arguments in Draw(seed, "cuda").calls():
            exact = {name: wide(value) for name, value in arguments.items()}
            right = (getattr(module, operator)(**exact) for module in (oracle, terms))
            check_results(getattr(normgrad, operator)(**arguments), *right, described(operator, arguments))
