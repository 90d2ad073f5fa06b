"""Large results: stored past the caches or not, whole rows or their ends: the same bits, and nothing out of bounds."""

from __future__ import annotations

import numpy as np
import pytest

import normgrad
from normgrad.contract.arrays import aligned_empty
from normgrad.cpu.prepare.staging import is_large
from support.dtypes import FLOATS, NUMPY

ROWS = 4352
GUARD = 64  # elements before and after a result
# Whole pairs of vectors, a whole cache line more (in float32), and rows that begin anywhere in a cache line.
COLUMNS = [1024, 1040, 1001, 1021]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMGRAD_BACKEND", "cpu")


class Result:
    """An array for a result, large enough not to stay in the caches, between elements that must not change."""

    def __init__(self, dtype: str, shape: tuple[int, ...], read: int, shift: int) -> None:
        size, numpy_dtype = int(np.prod(shape)), np.dtype(NUMPY[dtype])
        assert is_large(size * numpy_dtype.itemsize, read)
        self._memory = aligned_empty((size + 3 * GUARD,), numpy_dtype)
        self._memory.fill(np.nan)
        self._begin = GUARD + shift
        self.array = self._memory[self._begin : self._begin + size].reshape(shape)
        assert (self.array.ctypes.data % 64 == 0) == (shift == 0)

    @property
    def bits(self) -> np.ndarray:
        """The result's bits, once the elements around it are seen to be as they were."""
        assert np.isnan(self._memory[: self._begin].astype(np.float32)).all()
        assert np.isnan(self._memory[self._begin + self.array.size :].astype(np.float32)).all()
        return self.array.view(f"u{self.array.itemsize}")


def _results(dtype: str, shape: tuple[int, ...], read: int) -> list[Result]:
    """At a multiple of 64 bytes, and one element after one."""
    return [Result(dtype, shape, read, shift) for shift in (0, 1)]


def _data(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers of all sizes, down to subnormal results and up to overflow, and some that are not finite."""
    random = np.random.default_rng(seed)
    numbers = random.standard_normal(shape, np.float32) * np.exp2(random.integers(-26, 12, shape)).astype(np.float32)
    flat = numbers.reshape(-1)
    flat[:: flat.size // 7] = np.nan
    flat[5 :: flat.size // 5] = np.inf
    return numbers.astype(NUMPY[dtype])


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_layer_norm_backward(dtype: str, columns: int) -> None:
    shape = (ROWS, columns)
    x, dy = _data(dtype, shape, 1), _data(dtype, shape, 2)
    mean, rstd = np.zeros((ROWS, 1), np.float32), np.full((ROWS, 1), 0.7, np.float32)
    weight = np.linspace(0.1, 3, columns).astype(NUMPY[dtype])
    results, mask = _results(dtype, shape, read=2), [True, False, False]
    for result in results:
        out = (result.array, None, None)
        normgrad.layer_norm_backward(dy, x, [columns], mean, rstd, weight, output_mask=mask, out=out)
    assert np.array_equal(results[0].bits, results[1].bits)
    few, _, _ = normgrad.layer_norm_backward(dy[-3:], x[-3:], [columns], mean[-3:], rstd[-3:], weight, output_mask=mask)
    assert np.array_equal(results[0].bits[-3:], few.view(f"u{few.itemsize}"))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("channels", "positions"), [(34, (128, 64)), (48, (87, 67)), (40, (88, 88))], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_batch_norm_elemt(dtype: str, channels: int, positions: tuple[int, int], layout: str) -> None:
    samples = 32
    x = _data(dtype, (samples, channels, *positions), 3)
    mean, invstd = np.linspace(-1, 1, channels).astype(np.float32), np.linspace(1e-3, 3, channels).astype(np.float32)
    if layout == "channels_last":
        x = np.ascontiguousarray(np.moveaxis(x, 1, -1))
    results = _results(dtype, x.shape, read=1)
    for result in results:
        source, target = x, result.array
        if layout == "channels_last":
            source, target = np.moveaxis(x, -1, 1), np.moveaxis(target, -1, 1)
        normgrad.batch_norm_elemt(source, None, None, mean, invstd, 1e-5, out=target)
    assert np.array_equal(results[0].bits, results[1].bits)
