"""Values on which kernels go wrong, on the GPU against the oracle: NaN, tiny, constant, far from the mean."""

from __future__ import annotations

import pytest
import torch

from support.gpu import DTYPES, channels_last, check_call, generator

TWO_DTYPES = (torch.float32, torch.bfloat16)


class Data:
    """Random tensors about 0.5 times a size, rounded once to the dtype."""

    def __init__(self, dtype):
        self.dtype, self.random = dtype, generator()

    def __call__(self, *shape, size=1.0, dtype=None):
        made = torch.randn(shape, device="cuda", generator=self.random, dtype=torch.float64) + 0.5
        return (made * size).float().to(dtype or self.dtype)

    def positive(self, *shape):
        return torch.rand(shape, device="cuda", generator=self.random) + 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 40, 100), (6, 8, 49), (4, 8, 9000)])
def test_nan_and_inf_go_where_the_formula_sends_them(shape, dtype):
    data = Data(dtype)
    x, dy = data(*shape), data(*shape)
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0], device="cuda", dtype=dtype)
    x[0, 1, :4], x[1, 2, 0], dy[2, 3, :3] = odd, torch.inf, odd[:3]
    N, C, HxW = shape
    v, groups, rows = data.positive(C), data.positive(N, 4), data.positive(N * C, 1)
    flat = (dy.reshape(-1, HxW), x.reshape(-1, HxW))
    check_call("batch_norm_stats", x)
    check_call("batch_norm_reduce_backward", dy, x, v, v, v)
    check_call("layer_norm_backward", *flat, [HxW], rows, rows)
    check_call("layer_norm", flat[1], [HxW])
    for view in (x, channels_last(x)):
        check_call("group_norm_backward", dy, view, groups, groups, None, *shape, 4)
        check_call("group_norm", view, None, None, *shape, 4)


@pytest.mark.parametrize("dtype", TWO_DTYPES)
@pytest.mark.parametrize(("M", "N"), [(5, 300), (70, 300), (9, 4000), (70, 9000), (6, 70000)])
def test_layer_norm_of_tiny_values_beside_others(M, N, dtype):
    data = Data(dtype)
    x, w, mean = data(M, N), data(N), data(M, 1, dtype=torch.float32)
    rstd = data.positive(M, 1)
    for size, weights, scale in ((1e-40, 1, 1), (1e-30, 1e-15, 1e6), (1e-30, 1e-16, 1e4)):
        dy = data(M, N, size=size)
        dy[1], dy[2] = 0, x[2]
        given = (dy, x, [N], mean, rstd * scale, w * weights)
        label = f"of {size} and {weights}"
        check_call("layer_norm_backward", *given, label=label)
        out = (dy, torch.empty_like(w), torch.empty_like(w))
        check_call("layer_norm_backward", *given, label=f"{label}, in place", out=out)
    dy, large = data(M, N, size=1e-12), data(M, N, size=1e31)
    check_call("layer_norm_backward", dy, large, [N], mean, rstd * 1e-31, label="large input")
    dy = data(M, N)
    dy[:, ::5] = data(M, (N + 4) // 5, size=1e-40)
    check_call("layer_norm_backward", dy, x, [N], mean, rstd, w, label="tiny columns")
    for size, eps in ((1e-25, 0.0), (1e-40, 1e-5), (1e-38, 1e-26)):
        small = data(M, N, size=size)
        small[1], small[2] = 0, x[2]
        label = f"of {size}, eps {eps}"
        check_call("layer_norm", small, [N], w, w, eps, label=label)
        check_call("layer_norm", small, [N], w, None, eps, label=f"{label}, no bias")
        out = (small, torch.empty_like(mean), torch.empty_like(mean))
        check_call("layer_norm", small, [N], w, None, eps, label=f"{label}, in place", out=out)


EVERY, INPUT_ALONE, WEIGHT_ALONE = (True, True, True), (True, False, False), (False, True, False)


@pytest.mark.parametrize("dtype", TWO_DTYPES)
@pytest.mark.parametrize(  # shared groups, several in a tile, rows, shared rows, many samples
    "sizes", [(3, 32, 4096, 4), (5, 48, 256, 8), (9, 64, 49, 4), (3, 16, 9025, 4), (4200, 4, 132, 1)]
)
def test_group_norm_backward_of_tiny_values_beside_others(sizes, dtype):
    N, C, HxW, group = sizes
    data = Data(dtype)
    x, w, mean = data(N, C, HxW), data(C, dtype=torch.float32), data(N, group, dtype=torch.float32)
    rstd = data.positive(N, group)
    for size, weights, scale, mask in (
        (1e-40, 1, 1, EVERY),
        (1e-43, 1, 1, EVERY),
        (1e-40, 1, 1, INPUT_ALONE),
        (1e-43, None, 1e3, INPUT_ALONE),
        (1e-43, None, 1, WEIGHT_ALONE),
        (1e-30, 1e-15, 1e6, EVERY),
        (1e-30, 1e-16, 1e4, EVERY),
    ):
        dy = data(N, C, HxW, size=size)
        dy[1], dy[0, : C // group] = 0, x[0, : C // group]
        weight = None if weights is None else w * weights
        for view in (x, channels_last(x)):
            like = torch.empty_like(view).copy_(dy)
            given = (like, view, mean, rstd * scale, weight, *sizes, mask)
            label = f"of {size} and {weights} {view.stride()} {mask}"
            check_call("group_norm_backward", *given, label=label)
            if mask == EVERY:
                out = (like, torch.empty_like(w), torch.empty_like(w))
                check_call("group_norm_backward", *given, label=f"{label}, in place", out=out)
    dy, large = data(N, C, HxW, size=1e-12), data(N, C, HxW, size=1e31)
    given = (dy, large, torch.zeros_like(mean), rstd * 1e-31, None, *sizes)
    check_call("group_norm_backward", *given, label="large input")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 196), (300, 70, 1), (40, 3, 49), (8, 64, 4096)])
def test_batch_norm_sums_of_subnormal_products_beside_a_channel_of_zeros(shape, dtype):
    random = generator()
    dy, x = (torch.randn(shape, device="cuda", generator=random).to(dtype) for _ in range(2))
    v = torch.rand(shape[1], device="cuda", generator=random) + 0.5
    mean = v.clone()
    x[:, 0], mean[0], dy[:, 2] = x[:, 0] * 1e-40, 1e-41, 0
    for view in (x, channels_last(x)):
        check_call("batch_norm_reduce_backward", dy, view, mean, v, v, label=str(view.stride()))


@pytest.mark.parametrize("dtype", TWO_DTYPES)
@pytest.mark.parametrize(("C", "HxW", "group"), [(6, 15, 3), (256, 49, 2), (2, 3136, 2), (8, 9000, 2)])
def test_the_result_at_the_mean_is_the_bias_however_large_the_weight(C, HxW, group, dtype):
    x = torch.round(3 * torch.randn(20, C, HxW, device="cuda", generator=generator()))
    x[:5] = 1
    x[5:10, :, HxW // 2], x[5:10, :, HxW - HxW // 2 :] = 0, -x[5:10, :, : HxW // 2]  # the mean is 0
    x, w = x.to(dtype), torch.full((C,), 3008.0, device="cuda", dtype=dtype)
    for view in (x, channels_last(x)):
        check_call("group_norm", view, w, None, 20, C, HxW, group, 1e-12)
    check_call("layer_norm", x, [HxW], None, None, 1e-12)
    check_call("batch_norm_stats", x, 1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 60, 2047, 1), (2, 16, 3136, 8), (2, 512, 64, 4), (3, 12, 50, 4)])
def test_group_norm_of_strided_positions(sizes, dtype):
    N, C, HxW, group = sizes
    x = torch.randn(N, C, HxW, device="cuda", generator=generator()).to(dtype)
    statistics = torch.zeros(N, group, device="cuda"), torch.ones(N, group, device="cuda")
    views = [x.repeat_interleave(step, -1)[..., ::step] for step in (2, 16)]
    for view in (*views, x[..., :1].expand(N, C, HxW)):
        check_call("group_norm", view, None, None, *sizes, label=str(view.stride()))
        check_call("group_norm_backward", view, view, *statistics, None, *sizes, label=str(view.stride()))


@pytest.mark.parametrize("dtype", TWO_DTYPES)
@pytest.mark.parametrize(("C", "HxW", "group"), [(60, 64, 60), (32, 49, 4), (64, 1000, 8), (8, 9000, 2)])
def test_outliers_that_are_nearly_all_of_the_variance(C, HxW, group, dtype):
    """Adding the squares of the other elements to an outlier's rounds each time the same way."""
    random = generator()
    x = torch.randn(8, C, HxW, device="cuda", generator=random)
    x[..., :: max(HxW // 3, 1)] *= 10.0 ** (1 + 7 * torch.rand(8, C, 1, device="cuda", generator=random))
    x[0] = torch.randn(C, HxW, device="cuda", generator=random)
    x[0, :, 1], x[0, :, 9] = 2.0**15, -(2.0**15)  # nothing of these is left in the mean
    x = x.to(dtype)
    for view in (x, channels_last(x)):
        check_call("group_norm", view, None, None, 8, C, HxW, group)
    check_call("layer_norm", x, [HxW])
    check_call("batch_norm_stats", x)


def constants(dtype, *shape):
    return (torch.randn(shape, device="cuda", generator=generator()) * 20).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("C", "HxW", "group"), [(60, 3136, 20), (60, 3137, 20), (60, 4096, 60), (500, 64, 4)])
def test_constant_channels(C, HxW, group, dtype):
    """A running sum of equal terms is rounded the same way each time."""
    x = constants(dtype, 1, C, 1).repeat(1, 1, HxW)
    statistics = torch.zeros(1, group, device="cuda"), torch.ones(1, group, device="cuda")
    for view in (x, channels_last(x)):
        label = str(view.stride())
        check_call("group_norm_backward", view, view, *statistics, None, 1, C, HxW, group, label=label)
    x = x.repeat(40, 1, 1) if C == 500 else x
    zeros, ones = torch.zeros(C, device="cuda"), torch.ones(C, device="cuda")
    for view in (x, channels_last(x)):
        check_call("batch_norm_reduce_backward", view, view, zeros, ones, ones, label=str(view.stride()))
        check_call("batch_norm_stats", view, label=str(view.stride()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "N"), [(512, 17), (512, 33), (512, 512), (64, 4096), (16, 40000)])
def test_constant_rows_and_columns(M, N, dtype):
    statistics, w = (torch.zeros(M, 1, device="cuda"), torch.ones(M, 1, device="cuda")), torch.ones(N, device="cuda")
    rows = constants(dtype, M, 1).repeat(1, N)
    views = [constants(dtype, 1, N).repeat(M, 1), rows]
    if N == 512:
        views.append(rows.T.contiguous().T)
    for x in views:
        check_call("layer_norm_backward", x, x, [N], *statistics, w, label=str(x.stride()))
