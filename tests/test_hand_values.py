"""Values that can be checked by hand, in float32."""

from __future__ import annotations

import numpy as np

import normgrad


def _f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_batch_norm_elemt_backward(backend: str) -> None:
    x = np.arange(8, dtype=np.float32).reshape(1, 2, 4)
    zero, one = np.zeros(2, np.float32), np.ones(2, np.float32)
    got = normgrad.batch_norm_elemt_backward(x, x, zero, one, one, zero, one, np.array([5, 5], np.int32))
    expected = _f32(0, 0.9, 1.8, 2.7, 3.6, 4.5, 5.4, 6.3).reshape(1, 2, 4)
    np.testing.assert_allclose(got, expected, rtol=2.0**-23, atol=0)


def test_layer_norm_backward(backend: str) -> None:
    x = _f32(2, 3, 4, 5).reshape(2, 2)
    mean, rstd = _f32(2, 3).reshape(2, 1), _f32(4, 5).reshape(2, 1)
    grad_input, grad_weight, grad_bias = normgrad.layer_norm_backward(x, x, [2], mean, rstd, np.ones(2, np.float32))
    np.testing.assert_array_equal(grad_input, _f32(-2, -94, -877.5, -1747.5).reshape(2, 2))
    np.testing.assert_array_equal(grad_weight, _f32(20, 62))
    np.testing.assert_array_equal(grad_bias, _f32(6, 8))


def test_group_norm_backward(backend: str) -> None:
    x = np.arange(1, 25, dtype=np.float32).reshape(2, 3, 4)
    mean, rstd = _f32(6.5, 18.5), _f32(0.2896827, 0.2896827)
    grad_input, grad_weight, grad_bias = normgrad.group_norm_backward(
        x, x, mean, rstd, np.ones(3, np.float32), 2, 3, 4, 1
    )
    assert np.abs(grad_input).max() < 1e-5
    np.testing.assert_allclose(grad_weight, [-75.896867, 2.896827, 155.849293], rtol=2e-7)
    np.testing.assert_array_equal(grad_bias, _f32(68, 100, 132))
