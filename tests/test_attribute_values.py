"""Attributes count by their value in every call, whatever object brings them; a refused call writes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import normgrad

CHANNELS, POSITIONS = 6, 8


def _data() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((2, CHANNELS, POSITIONS), np.float32)


def _shapes(results: Any) -> list[tuple[int, ...] | None]:
    return [None if result is None else tuple(result.shape) for result in results]


class Index:
    """An integer that can change."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


LIBRARIES = pytest.mark.parametrize("library", [np.array, torch.tensor], ids=["numpy", "torch"])
SCALARS = pytest.mark.parametrize("scalar", [np.array, torch.tensor, np.int64, Index], ids=lambda one: one.__name__)


@SCALARS
@LIBRARIES
def test_a_scalar_attribute_counts_by_value(scalar: Any, library: Any) -> None:
    x = library(_data())

    def group_norm(groups: Any) -> Any:
        return normgrad.group_norm(x, None, None, 2, CHANNELS, POSITIONS, groups)

    for groups in (3, 2, 3, 6):
        expected = group_norm(groups)
        for _ in range(3):
            results = group_norm(scalar(groups))
            assert _shapes(results) == _shapes(expected)
            np.testing.assert_array_equal(np.asarray(results[0]), np.asarray(expected[0]))
    with pytest.raises(normgrad.ContractError, match="must divide"):
        group_norm(scalar(4))


@LIBRARIES
def test_an_array_as_a_shape_counts_by_value(library: Any) -> None:
    x = library(_data())
    for _ in range(3):
        normgrad.layer_norm(x, library([POSITIONS]))
    with pytest.raises(normgrad.ContractError, match="must equal the last dimensions"):
        normgrad.layer_norm(x, library([POSITIONS + 1]))


@SCALARS
def test_an_item_of_a_shape_that_changes_counts_by_value(scalar: Any) -> None:
    x = _data()
    item = scalar(POSITIONS)
    for _ in range(3):
        normgrad.layer_norm(x, [item])
    if isinstance(item, Index):
        item.value += 1
    elif isinstance(item, np.integer):
        item = scalar(POSITIONS + 1)
    else:
        item += 1
    with pytest.raises(normgrad.ContractError, match="must equal the last dimensions"):
        normgrad.layer_norm(x, [item])


@LIBRARIES
def test_an_array_as_a_mask_counts_by_value(library: Any) -> None:
    x, statistics = library(_data()), library(np.ones((2, CHANNELS, 1), np.float32))
    for mask in ([True, False, False], [False, True, True], [True, False, False]):
        for _ in range(3):
            results = normgrad.layer_norm_backward(
                x, x, [POSITIONS], statistics, statistics, output_mask=np.array(mask)
            )
            assert [result is not None for result in results] == mask


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_of_both_signs_are_two_values(zero: float) -> None:
    """-0.0 == 0.0, but a momentum of one keeps the sign of a running mean of -0.0, and the other does not."""
    data, ranks = np.ones((4, 3, 2), np.float32), np.ones((2, 3), np.float32)
    expected = np.signbit(np.float32(-0.0) + np.float32(zero) * np.float32(1.0))
    for _ in range(2):
        for momentum in (-zero, zero):
            running = np.full(3, -0.0, np.float32)
            normgrad.batch_norm_gather_stats_with_counts(
                data, ranks, ranks, running, None, momentum, 0.0, np.array([4, 4], np.int32)
            )
        assert np.signbit(running).all() == expected


@pytest.mark.parametrize(
    ("shape", "out"),
    [([np.array(POSITIONS)], None), ((POSITIONS,), [[0]])],
    ids=["array in a list", "list as an unwanted output"],
)
def test_odd_objects_do_not_break_a_call_that_is_right(shape: Any, out: Any) -> None:
    x, statistics = _data(), np.ones((2, CHANNELS, 1), np.float32)
    expected, *_ = normgrad.layer_norm_backward(x, x, (POSITIONS,), statistics, statistics)
    for _ in range(3):
        written = np.full_like(x, np.nan)
        results = normgrad.layer_norm_backward(
            x, x, shape, statistics, statistics, None, None, (True, False, False), out=(written, out, None)
        )
        assert results[0] is written
        np.testing.assert_array_equal(written, expected)
