"""GroupNorm on GPUs where a group is one contiguous row: when it is chosen, its tiles, its kernels as interpreted."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import normgrad
from support.interpreted import backend as backend
from support.interpreted import (
    check_call,
    needs_interpreter,
    random_data,
    random_rstd,
    run_with_interpreter,
    without_interpreter,
)

pytest.importorskip("triton")
pytest.importorskip("torch")

from normgrad.contract.dtypes import FLOAT16
from normgrad.cuda.chip import Chip
from normgrad.cuda.group_norm import launches
from normgrad.cuda.group_norm.launches import RowWork, as_rows
from normgrad.cuda.group_norm.tiles import Sizes, forward_group_row_tile, group_row_tile, prefer_rows
from normgrad.cuda.launch import Given
from normgrad.cuda.operands import Operand

DTYPES = [np.float32, ml_dtypes.bfloat16]
CHIPS = [Chip(132), Chip(2, cooperative_launch=False, max_tile_elements=128)]
# N, C, HxW, group: several tiles of samples, groups that CTAs share; more groups than CTA groups; unpacked rows.
SIZES = [(5, 8, 25, 4), (2, 40, 9, 20), (3, 3, 49, 1), (40, 6, 1, 2)]


@without_interpreter
def test_this_file_passes_with_the_interpreter_on() -> None:
    run_with_interpreter(__file__)


@pytest.mark.parametrize(
    ("D", "HxW", "itemsize", "tensors", "rows"),
    [
        (64, 49, 2, 2, True),
        (64, 49, 2, 1, True),
        (64, 49, 4, 2, True),
        (3, 49, 2, 2, True),
        (3, 49, 4, 2, True),
        (1, 49, 2, 2, False),
        (64, 64, 2, 2, False),
        (2, 98, 2, 2, True),
        (2, 196, 2, 2, False),
        (2, 98, 4, 2, False),
        (16, 1, 2, 2, True),
        (16, 1, 2, 1, False),
    ],
)
def test_groups_are_rows_where_channels_begin_at_odd_addresses(
    D: int, HxW: int, itemsize: int, tensors: int, rows: bool
) -> None:
    assert prefer_rows(D, HxW, itemsize, tensors) == rows


def test_only_contiguous_groups_are_rows() -> None:
    def operand(*strides: int) -> Operand:
        return Operand(Given("input", FLOAT16, True), strides)

    sizes = Sizes(2, 6, 49, 3)
    assert as_rows(sizes, [operand(6 * 49, 49, 1), Operand(None, (1, 1, 1))]) is not None
    assert as_rows(sizes, [operand(1000, 49, 1)]) is not None
    assert as_rows(sizes, [operand(6 * 49, 49, 1), operand(600, 100, 1)]) is None
    assert as_rows(sizes, [operand(6 * 49, 1, 6)]) is None
    assert as_rows(Sizes(2, 6, 1, 3), [operand(6, 1, 1)]) is not None


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("choose", [group_row_tile, forward_group_row_tile])
def test_tiles_cover_the_row_and_a_thread_has_few_elements(chip: Chip, itemsize: int, choose: Any) -> None:
    for columns in [2, 49, 98, 392, 784, 3136, 6050, 8192, 8193, 193600, 2**31]:
        tile = choose(columns, itemsize, chip)
        assert (tile.parts - 1) * tile.columns < columns <= tile.parts * tile.columns
        assert tile.columns <= chip.max_tile_elements
        assert tile.columns <= 16 * 32 * tile.warps


@pytest.mark.parametrize(
    ("sizes", "per_group"),
    [((32, 1024, 49, 32), 4), ((64, 256, 81, 32), 8), ((256, 512, 49, 32), 16), ((4, 256, 49, 32), 1)],
)
def test_cta_groups_have_several_samples_each_and_no_multiprocessor_is_idle(
    sizes: tuple[int, int, int, int], per_group: int
) -> None:
    _, C, HxW, group = sizes
    tile = group_row_tile(C // group * HxW, 2, Chip(132))
    operand = Operand(Given("input", FLOAT16, True), (C * HxW, 1))
    work = RowWork(Sizes(*sizes), tile, Chip(132), [operand], tile.parts, partial_sums=True)
    assert work.per_group == per_group
    assert work.cta_groups.count == per_group * group


@pytest.fixture
def by_rows(poisoned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take groups as rows, whatever their sizes are, in memory that starts as NaN."""
    monkeypatch.setattr("normgrad.cuda.group_norm.tiles.prefer_rows", lambda *sizes: True)


@needs_interpreter
@pytest.mark.usefixtures("by_rows")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
class TestRows:
    @pytest.mark.parametrize(
        ("mask", "weighted"),
        [((True, True, True), True), ((True, False, False), False), ((False, True, True), True)],
    )
    def test_backward(self, dtype: Any, sizes: tuple[int, ...], mask: tuple[bool, ...], weighted: bool) -> None:
        N, C, HxW, group = sizes
        dy, x = random_data((N, C, HxW), dtype, 1), random_data((N, C, HxW), dtype, 2)
        statistics = random_data((N, group), np.float32, 3), random_rstd((N, group), 4)
        weight = random_data((C,), dtype, 5) if weighted else None
        check_call("group_norm_backward", dy, x, *statistics, weight, *sizes, mask)

    def test_forward(self, dtype: Any, sizes: tuple[int, ...]) -> None:
        N, C, HxW, _ = sizes
        vectors = random_data((C,), dtype, 2), random_data((C,), dtype, 3)
        check_call("group_norm", random_data((N, C, HxW), dtype, 1), *vectors, *sizes)

    def test_strided_samples(self, dtype: Any, sizes: tuple[int, ...]) -> None:
        N, C, HxW, group = sizes
        dy, x = random_data((N, C, HxW), dtype, 1), random_data((2 * N, C + 1, HxW), dtype, 2)[::-2, 1:]
        statistics = random_data((N, group), np.float32, 3), random_rstd((N, group), 4)
        check_call("group_norm_backward", dy, x, *statistics, random_data((C,), dtype, 5), *sizes)
        check_call("group_norm", x, None, random_data((C,), dtype, 3), *sizes)

    def test_a_sample_has_the_same_bits_in_every_batch(self, dtype: Any, sizes: tuple[int, ...]) -> None:
        N, C, HxW, group = sizes
        dy, x = random_data((N, C, HxW), dtype, 1), random_data((N, C, HxW), dtype, 2)
        mean, rstd = random_data((N, group), np.float32, 3), random_rstd((N, group), 4)
        gradient = normgrad.group_norm_backward(dy, x, mean, rstd, None, *sizes)[0]
        results = normgrad.group_norm(x, None, None, *sizes)
        one = (1, *sizes[1:])
        for sample in range(min(N, 3)):
            at = slice(sample, sample + 1)
            alone = normgrad.group_norm_backward(dy[at], x[at], mean[at], rstd[at], None, *one)[0]
            assert alone.tobytes() == gradient[at].tobytes()
            for result, whole in zip(normgrad.group_norm(x[at], None, None, *one), results, strict=True):
                assert result.tobytes() == whole[at].tobytes()

    def test_special_values_stay_in_their_groups(self, dtype: Any, sizes: tuple[int, ...]) -> None:
        N, C, HxW, group = sizes
        dy, x = random_data((N, C, HxW), dtype, 1), random_data((N, C, HxW), dtype, 2)
        dy[0, 0, 0], x[-1, -1, -1] = np.nan, np.inf
        mean, rstd = random_data((N, group), np.float32, 3), random_rstd((N, group), 4)
        rstd[-1, 0] = np.inf
        check_call("group_norm_backward", dy, x, mean, rstd, random_data((C,), dtype, 5), *sizes)
        check_call("group_norm", x, None, None, *sizes)


@needs_interpreter
@pytest.mark.usefixtures("by_rows")
@pytest.mark.parametrize("sizes", [(4, 64, 49, 4), (5, 16, 9, 2)])
@pytest.mark.parametrize("size", [1e-40, 1e-41])
def test_float32_subnormals(sizes: tuple[int, int, int, int], size: float) -> None:
    N, C, HxW, group = sizes
    dy, x = random_data((N, C, HxW), np.float32, 1) * np.float32(size), random_data((N, C, HxW), np.float32, 2)
    statistics = random_data((N, group), np.float32, 3), random_rstd((N, group), 4)
    check_call("group_norm_backward", dy, x, *statistics, random_data((C,), np.float32, 5), *sizes)


@needs_interpreter
@pytest.mark.usefixtures("by_rows")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_positions_of_a_channel_are_summed_in_segments(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_SUM_TILE", 8)
    monkeypatch.setattr(launches, "_SUM_SEGMENT", 16)
    sizes = 3, 6, 77, 2
    dy, x = random_data(sizes[:3], dtype, 1), random_data(sizes[:3], dtype, 2)
    check_call("group_norm_backward", dy, x, random_data((3, 2), np.float32, 3), random_rstd((3, 2), 4), None, *sizes)
