"""The GPU's kernels near the smallest numbers, where float32 products are rounded as subnormals; as interpreted."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from support.interpreted import backend as backend
from support.interpreted import judge, only_elsewhere, only_there, random_channels, random_data, run_with_it, scales

pytest.importorskip("triton")
pytest.importorskip("torch")

from normgrad.cuda import group_norm_finish, group_norm_flat

BFLOAT16 = ml_dtypes.bfloat16
EITHER = pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])


@only_elsewhere
def test_with_the_interpreter_on() -> None:
    run_with_it(__file__)


def _sized(shape: tuple[int, ...], dtype: Any, size: float, seed: int) -> np.ndarray:
    return (random_data(shape, np.float64, seed) * size).astype(np.float32).astype(dtype)


@only_there
@pytest.mark.usefixtures("poisoned")
class TestBackward:
    @pytest.mark.parametrize("size", [1e-40, 1e-43])
    @pytest.mark.parametrize("N", [48, 300])
    @pytest.mark.parametrize("M", [5, 70])
    @pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, True)])
    def test_rows(self, size: float, N: int, M: int, mask: tuple[bool, ...]) -> None:
        dy, x = random_data((M, N), np.float32, 1) * np.float32(size), random_data((M, N), np.float32, 2)
        dy[1], dy[2], dy[3, 0] = 0, random_data((N,), np.float32, 7), np.nan  # beside rows that are not
        mean, rstd, weight = random_data((M, 1), np.float32, 3), scales((M, 1), 4), random_data((N,), np.float32, 5)
        judge("layer_norm_backward", dy, x, [N], mean, rstd, weight, None, mask)
        judge("layer_norm_backward", np.float32(1e-20) * x, x, [N], mean, rstd, np.float32(1e-20) * weight, None, mask)

    def test_columns(self) -> None:
        dy, x = random_data((70, 48), np.float32, 1), random_data((70, 48), np.float32, 2)
        dy[:, ::5] *= np.float32(1e-40)
        x[:, 1::5] = random_data((70, 10), np.float32, 3) * np.float32(1e-40)
        judge("layer_norm_backward", dy, x, [48], np.zeros((70, 1), np.float32), scales((70, 1), 4))

    @EITHER
    @pytest.mark.parametrize("N", [48, 300])
    @pytest.mark.parametrize("in_place", [False, True])
    @pytest.mark.parametrize(("size", "weights", "rstd"), [(1e-40, 1, 1), (1e-30, 1e-15, 1e10), (1e-30, 1e-16, 1e4)])
    def test_tiny_products_beside_a_large_factor(
        self, dtype: Any, N: int, in_place: bool, size: float, weights: float, rstd: float
    ) -> None:
        """In the last case every product with a weight is rounded to 0 in float32."""
        dy, x, weight = _sized((5, N), dtype, size, 1), random_data((5, N), dtype, 2), _sized((N,), dtype, weights, 5)
        dy[1], dy[2] = 0, random_data((N,), dtype, 7)
        statistics = random_data((5, 1), np.float32, 3), scales((5, 1), 4) * np.float32(rstd)
        out = (dy, np.empty(N, dtype), np.empty(N, dtype)) if in_place else None
        judge("layer_norm_backward", dy, x, [N], *statistics, weight, out=out)

    @EITHER
    @pytest.mark.parametrize("N", [48, 300])
    @pytest.mark.parametrize("in_place", [False, True])
    def test_data_so_large_that_rstd_times_a_gradient_is_tiny(self, dtype: Any, N: int, in_place: bool) -> None:
        dy, x = _sized((5, N), dtype, 1e-12, 1), _sized((5, N), dtype, 1e31, 2)
        rstd = scales((5, 1), 4) * np.float32(1e-31)
        out = (x, np.empty(N, dtype), np.empty(N, dtype)) if in_place else None
        judge("layer_norm_backward", dy, x, [N], np.zeros((5, 1), np.float32), rstd, out=out)

    def test_results_between_two_subnormal_bfloat16(self) -> None:
        """A float32 between them would be half way: what was rounded to that was rounded to the wrong one."""
        dy = np.zeros((3, 16), BFLOAT16)
        dy[:, 0] = np.float32(2.0**-132)
        rstd = np.array([[0.75 + 2.0**-18], [0.75 - 2.0**-18], [0.25 + 2.0**-18]], np.float32)
        ones = np.ones((16,), BFLOAT16)
        judge("layer_norm_backward", dy, np.zeros((3, 16), BFLOAT16), [16], np.zeros((3, 1), np.float32), rstd, ones)

    @EITHER
    @pytest.mark.parametrize("mask", [(True, True, True), (False, True, False)])
    def test_columns_whose_products_are_all_rounded_to_zero(self, dtype: Any, mask: tuple[bool, ...]) -> None:
        dy, x = np.full((80, 16), 2.0**-100, dtype), np.full((80, 16), 2.0**-51, dtype)
        x[:, 8:], dy[:, 3] = 1, 0
        statistics = np.zeros((80, 1), np.float32), np.ones((80, 1), np.float32)
        judge("layer_norm_backward", dy, x, [16], *statistics, None, None, mask)


@only_there
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("HxW", [1, 4])
@pytest.mark.parametrize("channels_last", [False, True])
def test_sums_over_samples_of_small_groups(HxW: int, channels_last: bool) -> None:
    """As float32 every sample's products would be rounded to the smallest number or to none."""
    shape = 40, 24, HxW
    dy, x = _sized(shape, np.float32, 1e-43, 1), _sized(shape, np.float32, 1e-2, 2)
    if channels_last:
        dy, x = (np.ascontiguousarray(data.transpose(0, 2, 1)).transpose(0, 2, 1) for data in (dy, x))
    statistics = np.zeros((40, 3), np.float32), scales((40, 3), 4)
    judge("group_norm_backward", dy, x, *statistics, random_data((24,), np.float32, 5), *shape, 3)


# Places side by side, in groups that programs share; channels side by side; groups as rows, also such that programs
# share; several groups in a tile.
GROUPS = [
    ((3, 4, 160, 2), False),
    ((3, 4, 160, 2), True),
    ((3, 6, 25, 2), False),
    ((3, 6, 99, 2), False),
    ((2, 12, 36, 6), False),
    ((2, 12, 36, 6), True),
]


def _groups(
    sizes: tuple[int, ...], dtype: Any, channels_last: bool, size: float, data_size: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients and data, the gradients of a sample zeros and of a group of ordinary size."""
    N, C, HxW, group = sizes
    shape = N, C, HxW
    dy = (random_channels(shape, np.float64, channels_last, 1) * size).astype(np.float32).astype(dtype)
    x = (random_channels(shape, np.float64, channels_last, 2) * data_size).astype(np.float32).astype(dtype)
    dy[1] = 0
    dy[0, : C // group] = random_data((C // group, HxW), dtype, 7)
    return dy, x


@only_there
@pytest.mark.usefixtures("poisoned")
@EITHER
@pytest.mark.parametrize(("sizes", "channels_last"), GROUPS)
class TestGroups:
    @pytest.mark.parametrize(
        ("size", "rstd", "weighted", "mask"),
        [
            (1e-40, 1.0, True, (True, True, True)),
            (1e-43, 1.0, True, (True, True, True)),
            (1e-43, 1e3, False, (True, False, False)),
            (1e-43, 1.0, False, (False, True, False)),
        ],
    )
    def test_of_tiny_gradients(
        self,
        dtype: Any,
        sizes: tuple[int, ...],
        channels_last: bool,
        size: float,
        rstd: float,
        weighted: bool,
        mask: tuple[bool, ...],
    ) -> None:
        N, C, _, group = sizes
        dy, x = _groups(sizes, dtype, channels_last, size)
        weight = random_data((C,), np.float32, 5) if weighted else None
        statistics = random_data((N, group), np.float32, 3), scales((N, group), 4) * np.float32(rstd)
        judge("group_norm_backward", dy, x, *statistics, weight, *sizes, mask)

    def test_with_weights_so_tiny_that_float32_rounds_products_to_zero(
        self, dtype: Any, sizes: tuple[int, ...], channels_last: bool
    ) -> None:
        N, C, _, group = sizes
        dy, x = _groups(sizes, dtype, channels_last, 1e-30)
        weight = _sized((C,), np.float32, 1e-16, 5)
        weight[-1] = 0
        statistics = random_data((N, group), np.float32, 3), scales((N, group), 4) * np.float32(1e4)
        judge("group_norm_backward", dy, x, *statistics, weight, *sizes)

    def test_of_data_so_large_that_rstd_times_a_gradient_is_tiny(
        self, dtype: Any, sizes: tuple[int, ...], channels_last: bool
    ) -> None:
        N, _, _, group = sizes
        dy, x = _groups(sizes, dtype, channels_last, 1e-12, 1e31)
        statistics = np.zeros((N, group), np.float32), scales((N, group), 4) * np.float32(1e-31)
        judge("group_norm_backward", dy, x, *statistics, None, *sizes)

    def test_in_place(self, dtype: Any, sizes: tuple[int, ...], channels_last: bool) -> None:
        N, C, _, group = sizes
        data = _groups(sizes, dtype, channels_last, 1e-43 if dtype == np.float32 else 1e-40)
        statistics = random_data((N, group), np.float32, 3), scales((N, group), 4)
        weight = random_data((C,), np.float32, 5)
        out = data[channels_last], np.empty(C, np.float32), np.empty(C, np.float32)
        judge("group_norm_backward", *data, *statistics, weight, *sizes, out=out)

    def test_channels_whose_products_are_all_rounded_to_zero(
        self, dtype: Any, sizes: tuple[int, ...], channels_last: bool
    ) -> None:
        N, C, _, group = sizes
        dy, x = _groups(sizes, dtype, channels_last, 1e-30)
        x[:, C // group :] = np.float32(2.0**-51)
        dy[:, C // group :] = np.float32(2.0**-100)
        dy[:, C - 1] = 0
        statistics = np.zeros((N, group), np.float32), np.ones((N, group), np.float32)
        judge("group_norm_backward", dy, x, *statistics, None, *sizes, (False, True, False))

    def test_beside_infinite_weights(self, dtype: Any, sizes: tuple[int, ...], channels_last: bool) -> None:
        N, C, _, group = sizes
        dy, x = _groups(sizes, dtype, channels_last, 1e-40)
        weight = random_data((C,), np.float32, 5)
        weight[C // 2] = np.inf
        statistics = random_data((N, group), np.float32, 3), scales((N, group), 4)
        judge("group_norm_backward", dy, x, *statistics, weight, *sizes)

    def test_summed_up_in_stretches(
        self, dtype: Any, sizes: tuple[int, ...], channels_last: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(group_norm_finish, "SEGMENT", 2)
        monkeypatch.setattr(group_norm_flat, "_SUM_TILE", 8)
        monkeypatch.setattr(group_norm_flat, "_SEGMENT", 16)
        N, C, _, group = sizes
        dy, x = _groups(sizes, dtype, channels_last, 1e-43 if dtype == np.float32 else 1e-40)
        statistics = random_data((N, group), np.float32, 3), scales((N, group), 4)
        for mask in ((True, True, True), (True, False, False)):
            judge("group_norm_backward", dy, x, *statistics, random_data((C,), np.float32, 5), *sizes, mask)


@only_there
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("HxW", [16, 15])
@pytest.mark.parametrize("channels_last", [False, True])
def test_groups_between_two_subnormal_bfloat16(HxW: int, channels_last: bool) -> None:
    """A float32 between them would be half way: what was rounded to that was rounded to the wrong one."""
    dy = np.zeros((3, HxW, 4) if channels_last else (3, 4, HxW), BFLOAT16)
    dy = dy.transpose(0, 2, 1) if channels_last else dy
    dy[:, ::2, 0] = np.float32(2.0**-132)
    rstd = np.repeat(np.array([[0.75 + 2.0**-18], [0.75 - 2.0**-18], [0.25 + 2.0**-18]], np.float32), 2, 1)
    judge("group_norm_backward", dy, np.zeros_like(dy), np.zeros((3, 2), np.float32), rstd, None, 3, 4, HxW, 2)


@only_there
@pytest.mark.usefixtures("poisoned")
class TestForward:
    @EITHER
    @pytest.mark.parametrize("N", [48, 300])
    @pytest.mark.parametrize(("size", "eps"), [(1e-25, 0.0), (1e-38, 0.0), (1e-40, 1e-90)])
    def test_squares_too_small_for_float32_count_beside_a_smaller_eps(
        self, dtype: Any, N: int, size: float, eps: float
    ) -> None:
        x = (random_data((5, N), np.float32, 1) * np.float32(size)).astype(dtype)
        judge("layer_norm", x, [N], random_data((N,), dtype, 2), random_data((N,), dtype, 3), eps)

    @pytest.mark.parametrize("N", [48, 300])
    @pytest.mark.parametrize("in_place", [False, True])
    @pytest.mark.parametrize(("size", "eps"), [(1e-40, 1e-5), (1e-43, 1e-12), (1e-38, 1e-26)])
    def test_rows_near_their_mean(self, N: int, in_place: bool, size: float, eps: float) -> None:
        x = _sized((6, N), np.float32, size, 1)
        x[1], x[2] = 0, random_data((N,), np.float32, 7)  # beside rows that are not
        out = (x, np.empty((6, 1), np.float32), np.empty((6, 1), np.float32)) if in_place else None
        judge("layer_norm", x, [N], random_data((N,), np.float32, 2), None, eps, out=out)

    @pytest.mark.parametrize("N", [48, 300])
    def test_bfloat16_near_its_mean(self, N: int) -> None:
        """Where the mean lies between two float32 is seen in results next to the middle of two bfloat16."""
        for size in (1e-38, 1e-40, 3e-41):
            x, weight = _sized((200, N), BFLOAT16, size, 1), _sized((N,), BFLOAT16, 1e3, 2)
            judge("layer_norm", x, [N], weight)

    @pytest.mark.parametrize("N", [48, 300])
    def test_rows_around_a_mean_of_zero(self, N: int) -> None:
        x = _sized((7, N), np.float32, 1e-41, 1)
        x[:, N // 2 :] = -x[:, : N // 2]
        x[4], x[5], x[6, 0] = 0, random_data((N,), np.float32, 7), np.nan  # beside rows that are not
        judge("layer_norm", x, [N], _sized((N,), np.float32, 1e3, 2))

    @pytest.mark.parametrize("N", [16, 300])
    def test_a_number_near_the_mean_of_others_that_are_not(self, N: int) -> None:
        x = np.zeros((2, N), np.float32)
        x[:, 0], x[:, 1], x[:, 2] = 1, -1, np.float32(1e-40)
        judge("layer_norm", x, [N], _sized((N,), np.float32, 1e3, 2))


@only_there
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
@pytest.mark.parametrize("shape", [(2, 3, 196), (40, 3, 64), (300, 3, 1), (2, 3, 1100)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_sums_of_channels(dtype: Any, shape: tuple[int, ...], channels_last: bool) -> None:
    """Beside a channel of zeros and one of ordinary numbers."""
    dy, x = random_data(shape, dtype, 1), random_data(shape, dtype, 2)
    mean = random_data((3,), np.float32, 3)
    x[:, 0], mean[0] = _sized(shape, BFLOAT16, 1e-40, 4)[:, 0].astype(dtype), 1e-41
    dy[:, 2] = 0
    if channels_last:
        dy, x = (np.ascontiguousarray(data.transpose(0, 2, 1)).transpose(0, 2, 1) for data in (dy, x))
    judge("batch_norm_reduce_backward", dy, x, mean, scales((3,), 5), random_data((3,), np.float32, 6))
    small = np.float32(1e-20)
    dy, x = _sized(shape, BFLOAT16, 1e-25, 1), _sized(shape, BFLOAT16, 1e-24, 2)  # all products are 0 in float32
    judge("batch_norm_reduce_backward", dy, x, mean * small, scales((3,), 5) / small, None)
