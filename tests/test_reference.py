"""The backend ``reference``."""

from __future__ import annotations

import numpy as np
import pytest

import normgrad


def test_a_signalling_nan_is_taken_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMGRAD_BACKEND", "reference")
    x = np.array([[0x7F800001, 0]], np.uint32).view(np.float32)
    statistics = np.ones((1, 1), np.float32)
    grad_input, _, _ = normgrad.layer_norm_backward(x, x, [2], statistics, statistics)
    assert np.isnan(grad_input).all()
