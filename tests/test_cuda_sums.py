"""Rounding errors of the GPU kernels' sums, in Triton's interpreter with sums in the order of a GPU's threads.

Equal elements, whose roundings all have the same direction; elements at their mean; outliers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from support.interpreted import backend as backend
from support.interpreted import (
    check_call,
    needs_interpreter,
    random_channels,
    random_data,
    random_rstd,
    run_with_interpreter,
    without_interpreter,
)
from support.interpreted import interpreted as interpreted

pytest.importorskip("triton")
pytest.importorskip("torch")

DTYPES = [np.float32, np.float16]  # products of bfloat16 have fewer digits, and so fewer roundings, than float16's


@without_interpreter
def test_this_file_passes_with_the_interpreter_on() -> None:
    run_with_interpreter(__file__)


def _sum_by_thread(monkeypatch: pytest.MonkeyPatch, by_thread: Callable[[np.ndarray], np.ndarray]) -> None:
    """Use tiles of a GPU's size, and sum float32 as there: each thread adds its elements one by one, then a tree.

    ``by_thread`` returns [elements of a thread, threads, ...].
    """
    from triton.runtime.interpreter import ReduceOps

    from normgrad.cuda.chip import Chip
    from support import interpreter

    summed = ReduceOps.sum

    def added_up(reduction: Any, data: Any) -> Any:
        if data.dtype.name != "fp32" or reduction.axis is None:
            return summed(reduction, data)
        values = np.add.accumulate(by_thread(np.moveaxis(data.handle.data, reduction.axis, 0)))[-1]
        while len(values) > 1:
            values = values[: len(values) // 2] + values[len(values) // 2 :]
        return reduction.to_tensor(values[0], data.dtype)

    monkeypatch.setattr(ReduceOps, "sum", added_up)
    monkeypatch.setattr(interpreter, "CHIP", Chip(multiprocessors=2, cooperative_launch=False))


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread has 32 elements of a long row, with a stride of the threads, and all elements of a short sum."""

    def by_thread(values: np.ndarray) -> np.ndarray:
        threads = max(len(values) // 32, 32) if len(values) > 32 else 1
        return values.reshape(-1, threads, *values.shape[1:])

    _sum_by_thread(monkeypatch, by_thread)


@needs_interpreter
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", DTYPES)
class TestElementsThatEqualTheirMean:
    """The output is the bias, however small; also where the means of parts are rounded."""

    @staticmethod
    def _integers(rows: int, columns: int) -> np.ndarray:
        made = np.random.default_rng(1).integers(-9, 10, size=(rows, columns))
        made[:, 0] -= np.sum(made, axis=1)
        return made

    @pytest.mark.parametrize("channels_last", [False, True])
    @pytest.mark.parametrize("mean", [0, 3])
    @pytest.mark.parametrize(("C", "HxW", "group"), [(4, 1000, 4), (6, 300, 2)])
    def test_group_norm(self, dtype: Any, channels_last: bool, mean: int, C: int, HxW: int, group: int) -> None:
        x = self._integers(2 * group, C // group * HxW).reshape(2, C, HxW) + mean
        if channels_last:
            x = np.ascontiguousarray(x.transpose(0, 2, 1)).transpose(0, 2, 1)
        weight, bias = random_data((C,), np.float32, 2) * np.float32(100), np.full(C, 1e-40, np.float32)
        check_call("group_norm", x.astype(dtype), weight, bias, 2, C, HxW, group, 1e-12)

    @pytest.mark.parametrize("mean", [0, 3])
    def test_layer_norm(self, dtype: Any, mean: int) -> None:
        N = 305
        x = (self._integers(40, N) + mean).astype(dtype)
        check_call("layer_norm", x, [N], random_data((N,), np.float32, 2), np.full(N, 1e-40, np.float32), 1e-12)


@pytest.fixture
def in_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 64 threads has vectors of eight adjacent elements."""

    def by_thread(values: np.ndarray) -> np.ndarray:
        vector = min(len(values), 8)
        threads = min(len(values) // vector, 64)
        vectors = values.reshape(-1, threads, vector, *values.shape[1:])
        return np.moveaxis(vectors, 2, 1).reshape(-1, threads, *values.shape[1:])

    _sum_by_thread(monkeypatch, by_thread)


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread has up to 64 elements of a sum."""

    def by_thread(values: np.ndarray) -> np.ndarray:
        return values.reshape(min(len(values), 64), -1, *values.shape[1:])

    _sum_by_thread(monkeypatch, by_thread)


def _check_equal_elements(x: np.ndarray, group: int) -> None:
    N, C, HxW = x.shape
    check_call(
        "group_norm_backward",
        x,
        x,
        np.zeros((N, group), np.float32),
        random_rstd((N, group), 2),
        None,
        N,
        C,
        HxW,
        group,
    )


@needs_interpreter
@pytest.mark.usefixtures("interpreted", "in_vectors")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("HxW", "group"), [(3136, 16), (3137, 16), (4096, 48), (1024, 48)])
def test_group_norm_of_equal_elements(dtype: Any, HxW: int, group: int) -> None:
    """Added one by one, they would all be rounded in the same direction."""
    _check_equal_elements(random_data((1, 48, 1), dtype, 1).repeat(HxW, -1), group)


@needs_interpreter
@pytest.mark.usefixtures("interpreted", "one_thread")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("C", "HxW", "group"), [(60, 64, 4), (20, 2047, 1)])
def test_group_norm_of_equal_elements_where_one_thread_may_hold_a_channel(
    dtype: Any, C: int, HxW: int, group: int
) -> None:
    """Positions with stride 0, and with stride 2."""
    x = random_data((2, C, 1), dtype, 1)
    _check_equal_elements(np.broadcast_to(x, (2, C, HxW)), group)
    _check_equal_elements(x.repeat(2 * HxW, -1)[:, :, ::2], group)


@needs_interpreter
@pytest.mark.usefixtures("interpreted")
class TestLayerNormOfEqualElements:
    @pytest.mark.usefixtures("one_thread")
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("N", [17, 33])
    def test_columns(self, dtype: Any, N: int) -> None:
        statistics, weight = (np.zeros((64, 1), np.float32), np.ones((64, 1), np.float32)), np.ones(N, np.float32)
        for seed in range(20):
            x = random_data((1, N), dtype, seed).repeat(64, 0)
            check_call("layer_norm_backward", x, x, [N], *statistics, weight)


@needs_interpreter
@pytest.mark.usefixtures("interpreted", "one_by_one")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [500, 1000, 1001, 20000])
def test_layer_norm_beside_outliers(dtype: Any, N: int) -> None:
    """Each addition of another square to an outlier's is rounded in the same direction."""
    generator = np.random.default_rng(30)
    x = generator.normal(size=(200 if N < 20000 else 4, N))
    x[:, :: N // 3] *= 10 ** generator.uniform(1, 3 if dtype == np.float16 else 8, size=(len(x), 1))
    check_call("layer_norm", x.astype(dtype), [N])


@needs_interpreter
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("HxW", [40, 150])
def test_group_norm_beside_outliers_whose_sum_is_0(dtype: Any, channels_last: bool, HxW: int) -> None:
    """Only their rounding errors would remain in the mean, many times the size of the other elements' own."""
    sizes = 2, 4, HxW, 2
    x = random_channels(sizes[:3], dtype, channels_last, 1)
    x[:, :, 1], x[:, :, 9] = 2**15, -(2**15)
    check_call("group_norm", x, None, None, *sizes)


@needs_interpreter
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(3, 4, 1), (2, 4, 9), (2, 64, 5), (1, 2, 9000)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_squares_that_overflow_give_no_wrong_number(
    dtype: Any, shape: tuple[int, int, int], channels_last: bool
) -> None:
    """1/√Inf is 0, a finite rstd that is neither the exact one nor NaN or Inf."""
    x = (random_channels(shape, np.float64, channels_last, 1) * 1e30).astype(dtype)
    N, C, HxW = shape
    check_call("layer_norm", x.reshape(N, -1), [C * HxW])
    check_call("group_norm", x, None, None, *shape, 2)
    check_call("batch_norm_stats", x)


@needs_interpreter
@pytest.mark.parametrize(
    ("offset", "size", "weight"),
    [
        (0, 1, 1),
        (1e4, 1, 1),
        (0, 2.0**-60, 2.0**120),
        (0, 2.0**60, 2.0**-120),
        (2.0**127, 0, 1),
        (0, 1, np.inf),
        (0, 0.7, 3e38),
    ],
)
def test_shared_groups_are_normalized_as_others_are(offset: float, size: float, weight: float) -> None:
    """Also where the product of rstd and weight is out of float32's range."""
    import torch

    from support.normalize_groups import normalize_group

    x = torch.from_numpy((random_data((64,), np.float64, 1) * size + offset).astype(np.float32))
    exact = x.double()
    statistics = torch.stack([exact.mean(), 1 / (exact.var(correction=0) + size**2 * 1e-5 + (size == 0)).sqrt()])
    shared, whole = torch.empty(64), torch.empty(64)
    for results, is_shared in ((shared, True), (whole, False)):
        with np.errstate(all="ignore"):
            normalize_group[(1,)](x, statistics, torch.tensor([weight], dtype=torch.float32), results, is_shared)
    torch.testing.assert_close(shared, whole, rtol=2**-20, atol=0, equal_nan=True)


@needs_interpreter
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "channels_last"),
    [((3, 5, 400), False), ((3, 5, 400), True), ((41, 5, 17), True), ((300, 37, 1), False)],
)
class TestPartsOfAChannel:
    """A second launch combines the parts of a channel, which are not all of one size."""

    @pytest.fixture(autouse=True)
    def entries(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Return how many partial sums of a channel each call combines."""
        from normgrad.cuda.batch_norm import launches
        from normgrad.cuda.chip import Chip
        from support import interpreter

        found: list[int] = []
        add = launches._add_combine

        def add_combine(steps: Any, kernel: Any, arguments: Any, entries: int, C: int) -> None:
            found.append(entries)
            add(steps, kernel, arguments, entries, C)

        monkeypatch.setattr(launches, "_add_combine", add_combine)
        monkeypatch.setattr(interpreter, "CHIP", Chip(8, cooperative_launch=False, max_tile_elements=256))
        return found

    def test_sums(self, entries: list[int], dtype: Any, channels_last: bool, shape: tuple[int, int, int]) -> None:
        C = shape[1]
        dy, x = (random_channels(shape, dtype, channels_last, seed) for seed in (1, 2))
        given = random_data((C,), np.float32, 3), random_rstd((C,), 4), random_data((C,), np.float32, 5)
        check_call("batch_norm_reduce_backward", dy, x, *given)
        assert min(entries) > 1

    def test_moments(self, entries: list[int], dtype: Any, channels_last: bool, shape: tuple[int, int, int]) -> None:
        x = random_channels(shape, dtype, channels_last, 1)
        x[: len(x) // 2] += np.asarray(3, dtype)  # parts with different means
        check_call("batch_norm_stats", x)
        assert min(entries) > 1
