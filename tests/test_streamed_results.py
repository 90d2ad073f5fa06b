"""Results that go past the caches have the bits of those that do not."""

from __future__ import annotations

import numpy as np
import pytest

import normgrad
from normgrad.contract.arrays import aligned_empty
from normgrad.cpu.prepare.staging import uses_streaming_stores
from support.dtypes import FLOATS, NUMPY

ROWS, COLUMNS = 4352, 1024


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMGRAD_BACKEND", "cpu")


def _places(dtype: str, shape: tuple[int, ...], read: int) -> list[np.ndarray]:
    """Arrays for the same result, large enough to be streamed: at a multiple of 64 bytes, and one element after one."""
    size = int(np.prod(shape))
    assert uses_streaming_stores(size * np.dtype(NUMPY[dtype]).itemsize, read)
    aligned = aligned_empty(shape, np.dtype(NUMPY[dtype]))
    shifted = aligned_empty((size + 64,), np.dtype(NUMPY[dtype]))[1 : size + 1].reshape(shape)
    assert aligned.ctypes.data % 64 == 0
    assert shifted.ctypes.data % 64 != 0
    return [aligned, shifted]


def _data(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers of all sizes, down to subnormal results and up to overflow, and some that are not finite."""
    random = np.random.default_rng(seed)
    numbers = random.standard_normal(shape, np.float32) * np.exp2(random.integers(-26, 12, shape)).astype(np.float32)
    flat = numbers.reshape(-1)
    flat[:: flat.size // 7] = np.nan
    flat[5 :: flat.size // 5] = np.inf
    return numbers.astype(NUMPY[dtype])


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("dtype", FLOATS)
def test_layer_norm_backward(dtype: str) -> None:
    shape = (ROWS, COLUMNS)
    x, dy = _data(dtype, shape, 1), _data(dtype, shape, 2)
    mean, rstd = np.zeros((ROWS, 1), np.float32), np.full((ROWS, 1), 0.7, np.float32)
    weight = np.linspace(0.1, 3, COLUMNS).astype(NUMPY[dtype])
    places = _places(dtype, shape, read=2)
    for place in places:
        normgrad.layer_norm_backward(
            dy, x, [COLUMNS], mean, rstd, weight, output_mask=[True, False, False], out=(place, None, None)
        )
    assert np.array_equal(*(place.view(f"u{place.itemsize}") for place in places))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("dtype", FLOATS)
def test_batch_norm_elemt(dtype: str) -> None:
    shape = (32, 34, 128, 64)
    x, places = _data(dtype, shape, 3), _places(dtype, shape, read=1)
    mean, invstd = np.linspace(-1, 1, 34).astype(np.float32), np.linspace(1e-3, 3, 34).astype(np.float32)
    for place in places:
        normgrad.batch_norm_elemt(x, None, None, mean, invstd, 1e-5, out=place)
    assert np.array_equal(*(place.view(f"u{place.itemsize}") for place in places))
