"""Sums of the GPU's kernels, added up as its threads do: equal numbers, numbers at their mean, outliers.

In Triton's interpreter, as ``test_cuda_interpreter``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import normgrad
from support.interpreted import backend as backend
from support.interpreted import interpreted as interpreted
from support.interpreted import judge, only_elsewhere, only_there, random_channels, random_data, run_with_it, scales

pytest.importorskip("triton")
pytest.importorskip("torch")

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


@only_elsewhere
def test_with_the_interpreter_on() -> None:
    run_with_it(__file__)


def _add_as_threads_do(monkeypatch: pytest.MonkeyPatch, by_thread: Callable[[np.ndarray], np.ndarray]) -> None:
    """Tiles of a GPU's size, whose float32 sums are made as there: each thread adds up what it has one by one.

    ``by_thread`` gives [numbers of a thread, threads, ...].
    """
    from triton.runtime.interpreter import ReduceOps

    from normgrad.cuda import interpreter
    from normgrad.cuda.chip import Chip

    summed = ReduceOps.sum

    def added_up(reduction: Any, data: Any) -> Any:
        if data.dtype.name != "fp32" or reduction.axis is None:
            return summed(reduction, data)
        values = np.add.accumulate(by_thread(np.moveaxis(data.handle.data, reduction.axis, 0)))[-1]
        while len(values) > 1:
            values = values[: len(values) // 2] + values[len(values) // 2 :]
        return reduction.to_tensor(values[0], data.dtype)

    monkeypatch.setattr(ReduceOps, "sum", added_up)
    monkeypatch.setattr(interpreter, "CHIP", Chip(multiprocessors=2, concurrent=False))


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread has 32 numbers of a wide row, as far apart as there are threads, and all numbers of a short sum."""

    def by_thread(values: np.ndarray) -> np.ndarray:
        threads = max(len(values) // 32, 32) if len(values) > 32 else 1
        return values.reshape(-1, threads, *values.shape[1:])

    _add_as_threads_do(monkeypatch, by_thread)


@only_there
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", DTYPES)
class TestNumbersThatEqualTheirMean:
    """The result is the bias, however small: in parts, too, whose own means are rounded."""

    @staticmethod
    def _whole_numbers(rows: int, columns: int) -> np.ndarray:
        made = np.random.default_rng(1).integers(-9, 10, size=(rows, columns))
        made[:, 0] -= np.sum(made, axis=1)
        return made

    @pytest.mark.parametrize("channels_last", [False, True])
    @pytest.mark.parametrize("mean", [0, 3])
    @pytest.mark.parametrize(("C", "places", "group"), [(4, 1000, 4), (6, 300, 2)])
    def test_group_norm(self, dtype: Any, channels_last: bool, mean: int, C: int, places: int, group: int) -> None:
        x = self._whole_numbers(2 * group, C // group * places).reshape(2, C, places) + mean
        if channels_last:
            x = np.ascontiguousarray(x.transpose(0, 2, 1)).transpose(0, 2, 1)
        weight, bias = random_data((C,), np.float32, 2) * np.float32(100), np.full(C, 1e-40, np.float32)
        judge("group_norm", x.astype(dtype), weight, bias, 2, C, places, group, 1e-12)

    @pytest.mark.parametrize("mean", [0, 3])
    def test_layer_norm(self, dtype: Any, mean: int) -> None:
        N = 305
        x = (self._whole_numbers(40, N) + mean).astype(dtype)
        judge("layer_norm", x, [N], random_data((N,), np.float32, 2), np.full(N, 1e-40, np.float32), 1e-12)


@pytest.fixture
def in_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 64 threads has eight numbers side by side, and as many of these as there are."""

    def by_thread(values: np.ndarray) -> np.ndarray:
        vector = min(len(values), 8)
        threads = min(len(values) // vector, 64)
        vectors = values.reshape(-1, threads, vector, *values.shape[1:])
        return np.moveaxis(vectors, 2, 1).reshape(-1, threads, *values.shape[1:])

    _add_as_threads_do(monkeypatch, by_thread)


@pytest.fixture
def all_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread has up to 64 numbers of a sum."""

    def by_thread(values: np.ndarray) -> np.ndarray:
        return values.reshape(min(len(values), 64), -1, *values.shape[1:])

    _add_as_threads_do(monkeypatch, by_thread)


def _judge_equal_numbers(x: np.ndarray, group: int) -> None:
    N, C, P = x.shape
    judge("group_norm_backward", x, x, np.zeros((N, group), np.float32), scales((N, group), 2), None, N, C, P, group)


@only_there
@pytest.mark.usefixtures("interpreted", "in_vectors")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("P", "group"), [(3136, 16), (3137, 16), (4096, 48), (1024, 48)])
def test_group_norm_of_equal_numbers(dtype: Any, P: int, group: int) -> None:
    """Added up one by one they are rounded the same way each time."""
    _judge_equal_numbers(random_data((1, 48, 1), dtype, 1).repeat(P, -1), group)


@only_there
@pytest.mark.usefixtures("interpreted", "all_in_a_thread")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("C", "P", "group"), [(60, 64, 4), (20, 2047, 1)])
def test_group_norm_of_equal_numbers_where_a_thread_may_have_all_of_a_channel(
    dtype: Any, C: int, P: int, group: int
) -> None:
    """As where they lie apart in memory."""
    x = random_data((2, C, 1), dtype, 1)
    _judge_equal_numbers(np.broadcast_to(x, (2, C, P)), group)
    _judge_equal_numbers(x.repeat(2 * P, -1)[:, :, ::2], group)


@only_there
@pytest.mark.usefixtures("interpreted")
class TestLayerNormOfEqualNumbers:
    @pytest.mark.usefixtures("all_in_a_thread")
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("N", [17, 33])
    def test_columns(self, dtype: Any, N: int) -> None:
        statistics, weight = (np.zeros((64, 1), np.float32), np.ones((64, 1), np.float32)), np.ones(N, np.float32)
        for seed in range(20):
            x = random_data((1, N), dtype, seed).repeat(64, 0)
            judge("layer_norm_backward", x, x, [N], *statistics, weight)

    def test_rows_whose_columns_lie_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Few threads share a row, each with columns that are far from each other."""
        _add_as_threads_do(monkeypatch, lambda values: values.reshape(-1, min(len(values), 16), *values.shape[1:]))
        x = np.asfortranarray(np.full((8, 512), 248.63666, np.float32))
        statistics = np.zeros((8, 1), np.float32), np.ones((8, 1), np.float32)
        judge("layer_norm_backward", x, x, [512], *statistics, None, None, (True, False, False))


@only_there
@pytest.mark.usefixtures("interpreted", "one_by_one")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [500, 1000, 1001, 20000])
def test_layer_norm_beside_outliers(dtype: Any, N: int) -> None:
    """Adding the others to an outlier's square rounds each time the same way."""
    generator = np.random.default_rng(30)
    x = generator.normal(size=(200 if N < 20000 else 4, N))
    x[:, :: N // 3] *= 10 ** generator.uniform(1, 3 if dtype == np.float16 else 8, size=(len(x), 1))
    judge("layer_norm", x.astype(dtype), [N])


@only_there
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("places", [40, 150])
def test_group_norm_beside_outliers_whose_sum_is_0(dtype: Any, channels_last: bool, places: int) -> None:
    """Their roundings would be all that is left of them in the mean, and many times the other numbers' own."""
    sizes = 2, 4, places, 2
    x = random_channels(sizes[:3], dtype, channels_last, 1)
    x[:, :, 1], x[:, :, 9] = 2**15, -(2**15)
    judge("group_norm", x, None, None, *sizes)


@only_there
@pytest.mark.parametrize(
    ("offset", "size", "weight"),
    [(0, 1, 1), (1e4, 1, 1), (0, 2.0**-60, 2.0**120), (0, 2.0**60, 2.0**-120), (2.0**127, 0, 1), (0, 1, np.inf)],
)
def test_programs_that_share_groups_normalise_as_others_do(offset: float, size: float, weight: float) -> None:
    """Also where the product of rstd and weight is out of float32's range."""
    import torch

    from support.normalising import normalise

    x = torch.from_numpy((random_data((64,), np.float64, 1) * size + offset).astype(np.float32))
    exact = x.double()
    statistics = torch.stack([exact.mean(), 1 / (exact.var(correction=0) + size**2 * 1e-5 + (size == 0)).sqrt()])
    shared, alone = torch.empty(64), torch.empty(64)
    for results, lag in ((shared, True), (alone, False)):
        with np.errstate(all="ignore"):
            normalise[(1,)](x, statistics, torch.tensor([weight], dtype=torch.float32), results, lag)
    torch.testing.assert_close(shared, alone, rtol=2**-21, atol=0, equal_nan=True)


Told = dict[tuple[int, int], tuple[Any, Any]]  # what a part told, by the first program of its cluster


@pytest.fixture
def in_clusters(monkeypatch: pytest.MonkeyPatch) -> Told:
    """BatchNorm's programs in clusters of three, one after the other: what the first hears is of the call before."""
    import triton.language as tl

    from normgrad.cuda import interpreter
    from normgrad.cuda.batch_norm import launches as batch_norm
    from normgrad.cuda.batch_norm import reduce_backward_kernels as batch_norm_sums
    from normgrad.cuda.batch_norm import stats_kernels as batch_norm_moments
    from normgrad.cuda.chip import Chip
    from normgrad.cuda.device import clusters

    told: Told = {}

    def tell_first(first: Any, second: Any, slots: Any, part: Any, SUMS: int, PARTS: int) -> None:
        assert first.shape == second.shape == [SUMS]
        told[int(slots) - int(part), int(part)] = first, second

    def told_by(part: int, places: Any) -> tuple[Any, Any]:
        nothing = tl.zeros(places.shape, tl.float64)
        return told.get((int(places.handle.data[0]), part), (nothing, nothing))

    for module in (batch_norm_moments, batch_norm_sums, clusters):
        monkeypatch.setattr(module, "told_by", told_by, raising=False)
        monkeypatch.setattr(module, "tell_first", tell_first)
        monkeypatch.setattr(module, "open_slots_of_first", lambda SUMS, PARTS: tl.program_id(0))
        monkeypatch.setattr(
            module, "wait_for_all", lambda slots, turn, SUMS, PARTS: tl.zeros((SUMS,), tl.int32) + slots
        )
    monkeypatch.setattr(interpreter, "CHIP", Chip(8, concurrent=False, largest_tile=256))
    tile = batch_norm.sums_tile
    monkeypatch.setattr(batch_norm, "sums_tile", lambda *sizes: replace(tile(*sizes), cluster=True))
    monkeypatch.setattr(batch_norm, "LARGEST", 3)
    return told


@only_there
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 400), (41, 5, 17), (300, 37, 1)])
class TestClusters:
    """A channel's parts, which are not all of one size, are taken together by the first program of a cluster."""

    @staticmethod
    def _judge(told: Told, operator: str, *args: Any) -> None:
        getattr(normgrad, operator)(*args)
        assert {part for _, part in told} == {0, 1, 2}
        judge(operator, *args)

    def test_sums(self, in_clusters: Told, dtype: Any, channels_last: bool, shape: tuple[int, int, int]) -> None:
        C = shape[1]
        dy, x = (random_channels(shape, dtype, channels_last, seed) for seed in (1, 2))
        given = random_data((C,), np.float32, 3), scales((C,), 4), random_data((C,), np.float32, 5)
        self._judge(in_clusters, "batch_norm_reduce_backward", dy, x, *given)

    def test_moments(self, in_clusters: Told, dtype: Any, channels_last: bool, shape: tuple[int, int, int]) -> None:
        x = random_channels(shape, dtype, channels_last, 1)
        x[: len(x) // 2] += np.asarray(3, dtype)  # parts whose means are apart
        self._judge(in_clusters, "batch_norm_stats", x)
