"""Kernels whose compiled code is not as they need it are never launched; the plain path computes instead."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import normgrad
from normgrad import log
from normgrad.contract.plan import Problem, allocate_host
from normgrad.contract.view import Memory
from normgrad.operators import OPERATORS
from normgrad.operators.mixed import MIXED
from support.interpreted import check_call, random_channels, random_data, random_rstd

pytest.importorskip("triton")
pytest.importorskip("torch")

from normgrad.cuda import backend as cuda_backend
from normgrad.cuda.chip import Chip
from normgrad.cuda.driver_launch import NotLaunchable
from normgrad.cuda.layout_checks import UnexpectedLayout, check_layouts
from normgrad.cuda.plain import PlainKernel

_HEAD = "#good = #ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [1, 32], warpsPerCTA = [1, 4], order = [1, 0]}>"
_REDUCE = """
%1 = "tt.reduce"(%0) <{{axis = {axis} : i32}}> ({{
}}) : (tensor<{shape}xf32, {layout}>) -> tensor<4xf32>
"""
_SEND = 'tt.elementwise_inline_asm "st.async" %0 : tensor<{shape}xf32, {layout}> -> tensor<4xi32>'


def _reduction(layout: str, axis: int = 1, shape: str = "4x512x") -> dict[str, str]:
    return {"ttgir": _HEAD + _REDUCE.format(axis=axis, shape=shape[:-1], layout=layout)}


def test_adjacent_threads_are_as_expected() -> None:
    check_layouts(_reduction("#good"))


def test_separated_lanes_are_found() -> None:
    lanes = "lane = [[0, 4], [1, 0], [0, 8], [2, 0], [0, 16]], warp = [[0, 32], [0, 64]], block = []"
    with pytest.raises(UnexpectedLayout, match="separated threads, axis 1"):
        check_layouts(_reduction(f"#ttg.linear<{{register = [[0, 1], [0, 2]], {lanes}}}>"))


@pytest.mark.parametrize(
    "code",
    [
        {"ptx": "…"},
        _reduction("#ttg.another<{versionMajor = 3}>"),
        {"ttgir": _HEAD + '%1 = "tt.reduce"(%0) : tensor<4xf32>'},
        {"ttgir": _HEAD + "st.async"},
    ],
    ids=["no TTGIR", "unknown layout", "unknown reduction", "unknown sending instruction"],
)
def test_what_cannot_be_read_is_not_launched(code: dict[str, str]) -> None:
    with pytest.raises(UnexpectedLayout, match="cannot be"):
        check_layouts(code)


def test_a_value_that_not_all_senders_hold_is_found() -> None:
    with pytest.raises(UnexpectedLayout, match="not all senders hold"):
        check_layouts({"ttgir": _HEAD + "\n" + _SEND.format(shape="4x512", layout="#good")})


class _Host:
    """The plain path on host memory."""

    name = "plain"

    def prepare(self, problem: Problem) -> PlainKernel:
        return PlainKernel(problem)

    def allocate(self, nbytes: int, device: str, stream: Any = None) -> Memory:
        return allocate_host(nbytes)


@pytest.fixture
def backend() -> str:
    """Run every test once, whatever backends there are."""
    return "cpu"


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("normgrad.operators.dispatch.backend_for", lambda problem: _Host())
    _clear_caches()
    yield
    _clear_caches()


def _clear_caches() -> None:
    for operator in (*OPERATORS.values(), *MIXED.values()):
        operator.dispatch.clear()


@pytest.mark.usefixtures("plain", "poisoned")
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_plain_path_is_right(dtype: Any, channels_last: bool) -> None:
    N, C, HxW, group = sizes = (3, 12, 10, 4)
    x, dy = (random_channels((N, C, HxW), dtype, channels_last, seed) for seed in (1, 2))
    weight, bias = random_data((C,), np.float32, 3), random_data((C,), np.float32, 4)
    statistics = random_data((N, group), np.float32, 5), random_rstd((N, group), 6)
    check_call("group_norm", x, weight, bias, *sizes)
    check_call("group_norm_backward", dy, x, *statistics, weight, *sizes)
    check_call("group_norm_backward", dy, x, *statistics, None, *sizes, [True, False, True], out=(x.copy(), None, bias))
    rows = random_data((N, C, 1), np.float32, 5), random_rstd((N, C, 1), 6)
    vector = random_data((HxW,), np.float32, 7)
    check_call("layer_norm", x, [HxW], vector, vector)
    check_call("layer_norm_backward", dy, x, [HxW], *rows, vector, None)
    mean, invstd, counts = random_data((C,), np.float32, 5), random_rstd((C,), 6), np.array([3, 0, 5], np.int32)
    check_call("batch_norm_stats", x)
    check_call("batch_norm_elemt", x, weight, None, mean, invstd)
    check_call("batch_norm_reduce_backward", dy, x, mean, invstd, weight)
    check_call("batch_norm_elemt_backward", dy, x, mean, invstd, weight, bias, mean, counts)
    ranks = random_data((3, C), np.float32, 8), random_rstd((3, C), 9)
    check_call("batch_norm_gather_stats_with_counts", x, *ranks, None, None, 0.1, 1e-5, counts)


@pytest.mark.usefixtures("plain", "poisoned")
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("narrows", [False, True])
def test_the_plain_path_rounds_data_of_two_dtypes_once(dtype: Any, narrows: bool) -> None:
    data, result = (np.float32, dtype) if narrows else (dtype, np.float32)
    N, C, HxW, group = sizes = (3, 12, 10, 4)
    x, dy = random_data((N, C, HxW), data, 1), random_data((N, C, HxW), result, 2)
    weight, vector = random_data((C,), np.float32, 3), random_data((HxW,), np.float32, 7)

    def check(operator: str, *args: Any, statistics: tuple[int, ...] | None = None) -> tuple[Any, ...]:
        out = statistics and (np.empty_like(dy), np.empty(statistics, np.float32), np.empty(statistics, np.float32))
        return check_call(operator, *args, out=out, run=MIXED[operator])

    _, *by_group = check("group_norm", x, weight, weight, *sizes, statistics=(N, group))
    _, *by_row = check("layer_norm", x, [HxW], vector, vector, statistics=(N, C, 1))
    check("group_norm_backward", dy, x, *by_group, weight, *sizes)
    check("layer_norm_backward", dy, x, [HxW], *by_row, vector, None)


@pytest.mark.usefixtures("plain")
def test_the_plain_path_moves_running_statistics() -> None:
    ranks = random_data((2, 4), np.float32, 8), random_rstd((2, 4), 9)
    x, counts = np.zeros((1, 4, 1), np.float32), np.array([3, 5], np.int32)
    moved, expected = ([np.full(4, 0.5, np.float32), np.full(4, 2, np.float32)] for _ in range(2))
    normgrad.batch_norm_gather_stats_with_counts(x, *ranks, *moved, 0.25, 1e-5, counts)
    normgrad.testing.oracle.batch_norm_gather_stats_with_counts(x, *ranks, *expected, 0.25, 1e-5, counts)
    np.testing.assert_allclose(moved, expected, rtol=1e-6)


@pytest.mark.parametrize("error", [UnexpectedLayout, NotLaunchable])
def test_a_kernel_that_fails_the_check_is_replaced(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """First by one without clusters, then by the plain path; each once in the log."""
    tried = []

    def prepare(problem: Problem, device: int, chip: Chip) -> None:
        tried.append(chip.max_active_clusters is not None)
        raise error("a reduction over separated threads")

    monkeypatch.setattr(log, "_reported", set())
    monkeypatch.setattr(cuda_backend, "chip", lambda device: Chip(132, max_active_clusters=lambda *_: 1))
    monkeypatch.setattr(cuda_backend.backend, "_prepare", prepare, raising=False)
    x = np.zeros((2, 3, 4), np.float32)
    plan = normgrad.batch_norm_stats.plan(x, out=(np.zeros(3, np.float32), np.zeros(3, np.float32)))
    with caplog.at_level(logging.WARNING, "normgrad"):
        kernel = cuda_backend.backend.prepare(plan._problem)
    assert isinstance(kernel, PlainKernel)
    assert tried == [True, False]
    assert [record.message for record in caplog.records] == [
        "normgrad: a kernel of batch_norm_stats is not used: a reduction over separated threads"
    ]
