"""Which special results a formula's terms excuse."""

from __future__ import annotations

import numpy as np
import pytest

from normgrad.testing import compare, oracle, terms


@pytest.mark.parametrize(("value", "excused"), [(3e38, True), (np.inf, False)])
def test_only_an_overflow_of_finite_terms_excuses_a_nan(value: float, excused: bool) -> None:
    # The sum of the first column: 3e38 three times overflows float32, an infinite input is simply infinite.
    grad_out = np.array([[value, 1], [value, 1], [value, 1]], np.float32)
    arguments = (grad_out, np.ones((3, 2), np.float32), [2], np.zeros(3, np.float32), np.ones(3, np.float32))
    expected, magnitude = oracle.layer_norm_backward(*arguments)[2], terms.layer_norm_backward(*arguments)[2]
    report = compare(np.array([np.nan, 3], np.float32), expected, magnitude)
    assert report.passed is excused
    assert compare(np.array([np.inf, 3], np.float32), expected, magnitude).passed
