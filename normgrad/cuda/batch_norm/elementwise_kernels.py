"""The elementwise kernels of BatchNorm: the output from given statistics, and grad_input from given sums.

``launches`` launches them; tiles as in ``addressing``. One tile a program, the blocks of columns fastest.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.batch_norm import addressing
from normgrad.cuda.device.pack16 import store_rounded, to_float32


@triton.jit
def _total_count(counter, ranks, RANKS: tl.constexpr):
    """Return the sum of the ranks' element counts, as float64."""
    total = tl.zeros((RANKS,), tl.float64)
    for start in range(0, ranks, RANKS):
        rank = start + tl.arange(0, RANKS)
        total += tl.load(counter + rank, mask=rank < ranks, other=0).to(tl.float64)
    return tl.sum(total)


@triton.jit
def _gradient(dy, deviation, invstd, sum_dy, sum_dy_xmu, reciprocal_count, weight):
    """Return ``(dy − sum_dy/n − (x − mean)·invstd²·sum_dy_xmu/n)·invstd·weight``.

    ``dy`` and ``deviation`` are tiles, the parameters [columns], ``reciprocal_count`` is 1/n in float64. float32: in
    the order of the formula, since a coefficient like invstd² may overflow where none of the terms does.
    """
    if dy.dtype == tl.float64:
        invstd = invstd.to(tl.float64)
        factor = invstd
        if weight is not None:
            factor = factor * weight
        mean_dy = sum_dy * reciprocal_count
        slope = invstd * invstd * (sum_dy_xmu * reciprocal_count)
        result = (dy - mean_dy[None, None, :] - deviation * slope[None, None, :]) * factor[None, None, :]
    else:
        share = reciprocal_count.to(tl.float32)
        mean_dy, mean_dy_xmu = (sum_dy * share)[None, None, :], (sum_dy_xmu * share)[None, None, :]
        invstd = invstd[None, None, :]
        result = (dy - mean_dy - deviation * invstd * invstd * mean_dy_xmu) * invstd
        if weight is not None:
            result = result * weight[None, None, :]
    return result


@triton.jit
def batch_norm_elemt_backward(
    grad_out,  # [N, columns, positions]
    input,  # [N, columns, positions]
    mean,  # [C]
    invstd,  # [C]
    weight,  # [C], or None
    sum_dy,  # [C]
    sum_dy_xmu,  # [C]
    counter,  # int32 [ranks]
    grad_input,  # [N, columns, positions]
    ranks,
    N,
    columns,
    positions,
    channel_length,  # columns of a channel: 1, or HxW for segment tiles
    grad_out_strides,  # of sample, column and position
    input_strides,
    grad_input_strides,
    TILE: tl.constexpr,  # tiles.TileSpec
    RANKS: tl.constexpr,  # whose counts are added up at a time
):
    """Compute grad_input = (dy − Σdy/n − (x − mean)·invstd²·Σ(dy·(x − mean))/n)·invstd·weight of one tile a program.

    n is the sum of the counter. In float64 where float32 is written, so that it is rounded once.
    """
    rows, work, mask = addressing.program_tile(N, columns, positions, TILE)
    dy_pointers = addressing.tile_pointers(grad_out, rows, work, grad_out_strides, TILE)
    x_pointers = addressing.tile_pointers(input, rows, work, input_strides, TILE)
    dy = tl.load(dy_pointers, mask=mask)
    x = tl.load(x_pointers, mask=mask)
    channels = addressing.column_channels(work[1], channel_length, TILE)
    ACC_DTYPE: tl.constexpr = tl.float64 if grad_input.dtype.element_ty == tl.float32 else tl.float32
    C = columns // channel_length
    channel_mean = addressing.load_channels(mean, channels, C)
    channel_invstd = addressing.load_channels(invstd, channels, C)
    channel_dy = addressing.load_channels(sum_dy, channels, C)
    channel_dy_xmu = addressing.load_channels(sum_dy_xmu, channels, C)
    w = addressing.load_channels(weight, channels, C) if weight is not None else None
    reciprocal_count = 1.0 / _total_count(counter, ranks, RANKS)
    deviation = to_float32(x).to(ACC_DTYPE) - channel_mean[None, None, :]
    dy = to_float32(dy).to(ACC_DTYPE)
    result = _gradient(dy, deviation, channel_invstd, channel_dy, channel_dy_xmu, reciprocal_count, w)
    store_rounded(addressing.tile_pointers(grad_input, rows, work, grad_input_strides, TILE), result, mask)


@triton.jit
def batch_norm_elemt(
    input,  # [N, columns, positions]
    weight,  # [C], or None
    bias,  # [C], or None
    mean,  # [C]
    invstd,  # [C]
    output,  # [N, columns, positions]
    N,
    columns,
    positions,
    channel_length,  # columns of a channel: 1, or HxW for segment tiles
    input_strides,  # of sample, column and position
    output_strides,
    TILE: tl.constexpr,  # tiles.TileSpec
):
    """Compute output = (x − mean)·invstd·weight + bias of one tile a program.

    In float64 where float32 is written, so that it is rounded once.
    """
    rows, work, mask = addressing.program_tile(N, columns, positions, TILE)
    x = tl.load(addressing.tile_pointers(input, rows, work, input_strides, TILE), mask=mask)
    channels = addressing.column_channels(work[1], channel_length, TILE)
    ACC_DTYPE: tl.constexpr = tl.float64 if output.dtype.element_ty == tl.float32 else tl.float32
    C = columns // channel_length
    channel_mean = addressing.load_channels(mean, channels, C)
    channel_invstd = addressing.load_channels(invstd, channels, C)
    w = addressing.load_channels(weight, channels, C) if weight is not None else None
    b = addressing.load_channels(bias, channels, C) if bias is not None else None
    result = (to_float32(x).to(ACC_DTYPE) - channel_mean[None, None, :]) * channel_invstd[None, None, :]
    if weight is not None:
        result = result * w[None, None, :]
    if bias is not None:
        result = result + b[None, None, :]
    store_rounded(addressing.tile_pointers(output, rows, work, output_strides, TILE), result, mask)
