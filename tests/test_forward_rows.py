"""Outputs of LayerNorm and GroupNorm: rows of any length, anywhere in memory, and data with a misleading beginning."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import normgrad
from normgrad.cpu.prepare.staging import is_large
from normgrad.operators import OPERATORS
from normgrad.testing.comparison import measure
from normgrad.testing.expected import checked, exact_results, magnitudes
from support.dtypes import FLOATS, NUMPY

# Parts of a vector, of a pair, of a tree; short rows and those whose squares are float32; whole ones and odd ones.
COLUMNS = [1, 2, 15, 16, 31, 33, 64, 127, 128, 129, 255, 257, 777, 1025, 4099]
ROWS = 6  # a whole tile and a part of one

Values = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def _ramp(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """The beginning says little about the whole."""
    ramp: np.ndarray = np.linspace(-3, 5, math.prod(shape[1:])).reshape(shape[1:]) * rng.uniform(1, 2, (shape[0], 1))
    return ramp


def _step(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Equal numbers and one that is not."""
    values = np.full(shape, 3.0)
    values[..., -1] = rng.integers(-9, 9, shape[:-1])
    return values


VALUES: dict[str, Values] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "far-from-zero": lambda rng, shape: 1000 + rng.standard_normal(shape),
    "ramp": _ramp,
    "step": _step,
    "equal": lambda rng, shape: np.full(shape, -2.5),
    "small": lambda rng, shape: rng.standard_normal(shape) * 1e-7,
}


def _assert_right(operator: str, arguments: dict[str, Any]) -> tuple[np.ndarray, ...]:
    function = OPERATORS[operator]
    call = checked(function, arguments, None)
    exact, sizes = exact_results(function, call), magnitudes(function, call)
    results: tuple[np.ndarray, ...] = function(**arguments)
    for name, result in zip(function.signature.output_names, results, strict=True):
        measured = measure(result, exact[name].reshape(result.shape), sizes[name].reshaped(result.shape))
        assert np.max(measured.share_of_bound) <= 1, name
    return results


def _shifted(values: np.ndarray, by: int) -> np.ndarray:
    """The same numbers, so many elements after the beginning of some memory."""
    memory = np.empty(values.size + by, values.dtype)
    memory[by:] = values.reshape(-1)
    return memory[by:].reshape(values.shape)


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(f"u{values.itemsize}")


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", FLOATS)
class TestLayerNorm:
    @pytest.mark.parametrize("values", VALUES)
    def test_is_right(self, backend: str, dtype: str, columns: int, values: str) -> None:
        rng = np.random.default_rng(columns)
        x = VALUES[values](rng, (ROWS, columns)).astype(NUMPY[dtype])
        weight, bias = rng.standard_normal((2, columns)).astype(NUMPY[dtype if columns % 2 else "float32"])
        absent = columns % 3 == 0
        parameters = {"weight": None, "bias": None} if absent else {"weight": weight, "bias": bias}
        _assert_right("layer_norm", {"input": x, "normalized_shape": [columns], **parameters})

    def test_is_the_same_anywhere(self, backend: str, dtype: str, columns: int) -> None:
        """Alone or among others, at any address, past the caches or not."""
        rng = np.random.default_rng(columns)
        x = rng.standard_normal((ROWS, columns)).astype(NUMPY[dtype])
        weight, bias = rng.standard_normal((2, columns)).astype(np.float32)
        first, mean, rstd = normgrad.layer_norm(x, [columns], weight, bias)
        for by in (1, 7, 30):
            out = tuple(_shifted(np.zeros_like(like), by) for like in (first, mean, rstd))
            normgrad.layer_norm(_shifted(x, by + 2), [columns], weight, bias, out=out)
            assert np.array_equal(_bits(out[0]), _bits(first))
        for row in (0, 4, ROWS - 1):
            alone, _, _ = normgrad.layer_norm(x[row : row + 1].copy(), [columns], weight, bias)
            assert np.array_equal(_bits(alone), _bits(first[row : row + 1]))

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_no_number_spoils_its_row_alone(self, backend: str, dtype: str, columns: int, value: float) -> None:
        x = np.random.default_rng(3).standard_normal((ROWS, columns)).astype(NUMPY[dtype])
        clean = [np.array(result, np.float64) for result in normgrad.layer_norm(x, [columns], None, None)]
        for place in (0, columns // 2, columns - 1):
            spoilt = x.copy()
            spoilt[1, place] = value
            results = _assert_right("layer_norm", {"input": spoilt, "normalized_shape": [columns]})
            for result, whole in zip(results, clean, strict=True):
                others = np.arange(ROWS) != 1
                assert np.array_equal(np.array(result, np.float64)[others], whole[others])


@pytest.mark.parametrize("dtype", FLOATS)
def test_large_outputs_are_the_same_at_any_address(backend: str, dtype: str) -> None:
    if backend != "cpu":
        pytest.skip("others write all results alike")
    rows, columns = (4097, 1029) if dtype == "float32" else (8193, 1029)
    x = np.random.default_rng(5).standard_normal((rows, columns), np.float32).astype(NUMPY[dtype])
    assert is_large(x.nbytes, read=1)
    weight, bias = np.linspace(0.1, 3, columns), np.linspace(-1, 1, columns)
    vectors = weight.astype(np.float32), bias.astype(np.float32)
    first, mean, rstd = normgrad.layer_norm(x, [columns], *vectors)
    other = _shifted(np.zeros_like(first), 5)
    normgrad.layer_norm(x, [columns], *vectors, out=(other, mean, rstd))
    assert np.array_equal(_bits(first), _bits(other))
    few, _, _ = normgrad.layer_norm(x[-3:].copy(), [columns], *vectors)
    assert np.array_equal(_bits(first[-3:]), _bits(few))


# Samples, channels, places, groups: rows in one run and apart, groups of parts of vectors, several chunks of places.
GROUPS = [(2, 64, 49, 1), (3, 70, 49, 7), (2, 24, 25, 3), (2, 40, 100, 4), (1, 3, 5000, 1), (2, 64, 300, 32)]


@pytest.mark.parametrize("layout", ["rows", "columns", "apart"])
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("sizes", GROUPS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_group_norm(backend: str, dtype: str, sizes: tuple[int, ...], values: str, layout: str) -> None:
    samples, channels, places, groups = sizes
    rng = np.random.default_rng(channels)
    numbers = VALUES[values](rng, (samples, channels * places)).reshape(samples, channels, places)
    x = numbers.astype(NUMPY[dtype])
    if layout == "columns":
        x = np.ascontiguousarray(x.transpose(0, 2, 1)).transpose(0, 2, 1)
    elif layout == "apart":
        memory = np.zeros((samples, channels, places + 3), x.dtype)
        memory[..., :places] = x
        x = memory[..., :places]
    weight, bias = rng.standard_normal((2, channels)).astype(NUMPY[dtype])
    shape = {"N": samples, "C": channels, "HxW": places, "group": groups}
    _assert_right("group_norm", {"input": x, "weight": weight, "bias": bias, **shape})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_without_columns_have_no_memory_to_look_at(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's empty tensors lie nowhere, and the statistics of no numbers are NaN."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("NORMGRAD_BACKEND", "cpu")
    empty = torch.empty(3, 0, dtype=getattr(torch, dtype))
    assert empty.data_ptr() == 0
    output, mean, rstd = normgrad.layer_norm(empty, [0])
    assert output.shape == (3, 0)
    assert mean.isnan().all()
    assert rstd.isnan().all()
