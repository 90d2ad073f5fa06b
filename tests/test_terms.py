"""Which NaN and Inf results the scales of an operator excuse."""

from __future__ import annotations

import numpy as np
import pytest

from normgrad.testing import compare, oracle, terms


@pytest.mark.parametrize(("value", "excused"), [(2.0**125, True), (2.0**124, False), (np.inf, True)])
def test_a_sum_of_2_to_the_126_or_an_infinite_one_excuses_nan_and_inf(value: float, excused: bool) -> None:
    grad_out = np.array([[value, 1], [value, 1], [value, 1]], np.float32)
    arguments = (grad_out, np.ones((3, 2), np.float32), [2], np.zeros(3, np.float32), np.ones(3, np.float32))
    expected, magnitude = oracle.layer_norm_backward(*arguments)[2], terms.layer_norm_backward(*arguments)[2]
    for special in (np.nan, np.inf, -np.inf):
        assert compare(np.array([special, 3], np.float32), expected, magnitude).passed is excused
        assert not compare(np.array([expected[0], special], np.float32), expected, magnitude).passed
    assert compare(expected.astype(np.float32), expected, magnitude).passed
