"""Valid calls of every operator, in every layout, dtype and sharing of memory, against the oracle."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.interpreted import check_call, random_data, random_rstd
from support.recipes import RECIPES, valid_calls

Layout = Callable[[np.ndarray], np.ndarray]


def _channels_last(data: np.ndarray) -> np.ndarray:
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(data, 1, -1)), -1, 1)


def _cropped(data: np.ndarray) -> np.ndarray:
    return np.pad(data, [(0, 0)] * (data.ndim - 1) + [(1, 2)])[..., 1:-2]


def _expanded(data: np.ndarray) -> np.ndarray:
    return np.broadcast_to(data[:1, :1, :1, :1], data.shape)


LAYOUTS: dict[str, Layout] = {
    "contiguous": np.ascontiguousarray,
    "channels_last": _channels_last,
    "cropped": _cropped,
    "cropped channels_last": lambda data: np.moveaxis(_cropped(np.moveaxis(data, 1, -1)), -1, 1),
    "positions first": lambda data: np.ascontiguousarray(data.transpose(2, 3, 0, 1)).transpose(2, 3, 0, 1),
    "reversed": lambda data: np.ascontiguousarray(data[::-1, ::-1, ::-1, ::-1])[::-1, ::-1, ::-1, ::-1],
    "expanded": _expanded,
    "expanded positions": lambda data: np.broadcast_to(data[..., :1, :1], data.shape),
    "expanded samples": lambda data: np.broadcast_to(_channels_last(data[:1]), data.shape),
}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("operator", RECIPES)
def test_a_valid_call_is_right_and_touches_nothing_else(operator: str) -> None:
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        case = data.draw(valid_calls(operator))
        expected, magnitudes = case.exact()
        before = case.arena.memory.copy()
        results = case.call()
        case.check_results(results, expected, magnitudes)
        changed = before != case.arena.memory
        assert not np.any(changed & ~case.arena.bytes_of(case.written_places())), "bytes outside the outputs changed"

    holds()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
@pytest.mark.parametrize("shape", [(3, 6, 5, 7), (2, 70, 9, 4), (40, 33, 1, 1)])
@pytest.mark.parametrize("of_gradient", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("of_input", LAYOUTS.values(), ids=LAYOUTS)
def test_every_pair_of_layouts(of_input: Layout, of_gradient: Layout, shape: tuple[int, ...]) -> None:
    N, C, H, W = shape
    x, dy = of_input(random_data(shape, np.float32, 1)), of_gradient(random_data(shape, np.float32, 2))
    mean, weight, sums = (random_data((C,), np.float32, seed) for seed in (3, 4, 5))
    invstd, counter = random_rstd((C,), 6), np.array([5, 7], np.int32)
    check_call("batch_norm_elemt_backward", dy, x, mean, invstd, weight, sums, sums, counter)
    narrow = dy.astype(ml_dtypes.bfloat16)  # in the order of dy
    check_call("batch_norm_elemt_backward", narrow, x, mean, invstd, weight, sums, sums, counter)
    check_call("batch_norm_reduce_backward", x, narrow, mean, invstd, weight)
    means, rstds = random_data((N, 1), np.float32, 7), random_rstd((N, 1), 8)
    for gradient in (dy, dy.reshape(-1)):
        check_call("group_norm_backward", gradient, x, means, rstds, weight, N, C, H * W, 1)
    check_call("layer_norm_backward", dy, x, shape[1:], means, rstds, random_data(shape[1:], np.float32, 9))
    check_call("layer_norm", dy, shape[1:])
