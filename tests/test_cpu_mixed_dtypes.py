"""Activations and results of two dtypes, which only the CUDA backend computes, are refused on the CPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import normgrad
from normgrad.operators.mixed import MIXED

_X = np.ones((4, 8), np.float32)
_STATISTICS = np.ones((4, 1), np.float32), np.ones((4, 1), np.float32)
_SIZES = 4, 8, 1, 1


@pytest.fixture
def backend() -> str:
    return "cpu"


def _outputs(*shapes_and_dtypes: tuple[Any, Any]) -> list[Any]:
    return [np.full(shape, 7, dtype) for shape, dtype in shapes_and_dtypes]


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", MIXED)
def test_two_dtypes_are_refused(name: str, dtype: Any, planned: bool) -> None:
    x = _X.astype(dtype)
    arguments: dict[str, tuple[Any, ...]] = {
        "layer_norm": (x, [8]),
        "layer_norm_backward": (_X, x, [8], *_STATISTICS, _X[0], None),
        "group_norm": (x, None, None, *_SIZES),
        "group_norm_backward": (_X, x, *_STATISTICS, _X[0], *_SIZES),
    }
    f32 = np.float32
    if name.endswith("backward"):
        out = _outputs(((4, 8), dtype), (8, f32), (8, f32))
    else:
        out = _outputs(((4, 8), f32), ((4, 1), f32), ((4, 1), f32))
    run = MIXED[name].plan if planned else MIXED[name]
    text = f"^{name}: the backend cpu takes activations of one dtype"
    with pytest.raises(normgrad.ContractError, match=text) as raised:
        run(*arguments[name], out=out)
    assert raised.value.status == 561003
    assert f"input is {np.dtype(dtype)}" in str(raised.value)
    assert all((array == 7).all() for array in out)


def test_batch_norm_takes_them() -> None:
    vector, counter = np.zeros(8, np.float32), np.array([4], np.int32)
    x = _X.astype(np.float16)
    out = np.empty((4, 8), np.float32)
    result = normgrad.batch_norm_elemt_backward(_X, x, vector, vector + 1, None, vector, vector, counter, out=out)
    assert (result == 1).all()
