"""The same bits from run to run, with any number of threads, and whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import normgrad
from support.dtypes import FLOATS, NUMPY

Call = Callable[[slice], tuple[Any, ...]]


def _data(dtype: str, *shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.5, 2.0, shape).astype(NUMPY[dtype])


def _layer_norm(dtype: str) -> Call:
    x, dy = _data(dtype, 65, 384, seed=1), _data(dtype, 65, 384, seed=2)
    mean, rstd = _data("float32", 65, 1, seed=3), np.abs(_data("float32", 65, 1, seed=4))
    weight = _data("float32", 384, seed=5)
    return lambda part: normgrad.layer_norm_backward(dy[part], x[part], [384], mean[part], rstd[part], weight)


def _group_norm(dtype: str, samples: int = 9, channels: int = 12, positions: int = 77, groups: int = 4) -> Call:
    x, dy = (_data(dtype, samples, channels, positions, seed=seed) for seed in (1, 2))
    mean, rstd = _data("float32", samples, groups, seed=3), np.abs(_data("float32", samples, groups, seed=4))
    weight = _data("float32", channels, seed=5)
    return lambda part: normgrad.group_norm_backward(
        dy[part], x[part], mean[part], rstd[part], weight, len(x[part]), channels, positions, groups
    )


def _many_small_groups(dtype: str) -> Call:
    return _group_norm(dtype, 301, 10, 7, 10)


def _batch_norm(dtype: str) -> Call:
    x, dy = _data(dtype, 17, 6, 55, seed=1), _data(dtype, 17, 6, 55, seed=2)
    vectors = [_data("float32", 6, seed=seed) for seed in range(3, 8)]
    counter = np.array([500, 435], np.int32)
    return lambda part: (normgrad.batch_norm_elemt_backward(dy[part], x[part], *vectors, counter),)


def _batch_norm_sums(dtype: str) -> Call:
    x, dy = _data(dtype, 17, 6, 55, seed=1), _data(dtype, 17, 6, 55, seed=2)
    mean, invstd = _data("float32", 6, seed=3), _data("float32", 6, seed=4)
    return lambda part: normgrad.batch_norm_reduce_backward(dy[part], x[part], mean, invstd, None)


def _forward(dtype: str) -> Call:
    x = _data(dtype, 9, 12, 77, seed=1)
    return lambda part: (
        *normgrad.layer_norm(x[part], [12, 77]),
        *normgrad.group_norm(x[part], None, None, len(x[part]), 12, 77, 4),
        *normgrad.batch_norm_stats(x[part]),
    )


GRADIENTS = [_layer_norm, _group_norm, _many_small_groups, _batch_norm]
ALL = slice(None)


def _bits(results: tuple[Any, ...]) -> list[bytes]:
    return [result.tobytes() for result in results]


@pytest.fixture
def threads() -> Iterator[None]:
    before = normgrad.get_num_threads()
    yield
    normgrad.set_num_threads(before)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("make", [*GRADIENTS, _batch_norm_sums, _forward])
def test_same_bits_run_to_run(backend: str, make: Callable[[str], Call], dtype: str) -> None:
    call = make(dtype)
    first = _bits(call(ALL))
    assert all(_bits(call(ALL)) == first for _ in range(5))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("make", [*GRADIENTS, _batch_norm_sums, _forward])
def test_same_bits_with_any_number_of_threads(backend: str, make: Callable[[str], Call], dtype: str) -> None:
    call = make(dtype)
    bits = []
    for threads in (1, 2, 3, 8):
        normgrad.set_num_threads(threads)
        bits.append(_bits(call(ALL)))
    assert all(these == bits[0] for these in bits)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("make", GRADIENTS)
def test_same_bits_whatever_else_is_in_the_batch(backend: str, make: Callable[[str], Call], dtype: str) -> None:
    call = make(dtype)
    whole = call(ALL)[0]
    for part in (slice(0, 1), slice(3, 4), slice(2, 7), slice(5, None), slice(None, None, 2)):
        assert call(part)[0].tobytes() == whole[part].tobytes(), part
