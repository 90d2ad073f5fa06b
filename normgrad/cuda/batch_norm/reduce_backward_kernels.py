"""The kernels of batch_norm_reduce_backward; ``launches`` launches them. See ``reduction`` for the algorithm."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.batch_norm.addressing import column_channels, load_channels
from normgrad.cuda.batch_norm.reduction import block_channels, cta_work, gather_by_channel, reduce_rows, store_entries
from normgrad.cuda.device.cluster_exchange import init_gather, send_to_first_cta, sum_received, wait_for_ctas
from normgrad.cuda.device.indexing import block_indices, int64
from normgrad.cuda.device.pack16 import store_rounded, to_float32
from normgrad.cuda.device.pdl import pdl_launch_dependents, pdl_wait
from normgrad.cuda.device.sums import sum_pair


@triton.jit
def _load_invstd(invstd, channels, C, grad_weight):
    """Load invstd for grad_weight, float64, before the sums are complete; 0 where grad_weight is not wanted."""
    if grad_weight is not None:
        result = to_float32(tl.load(invstd + channels, mask=channels < C, other=0.0)).to(tl.float64)
    else:
        result = 0.0
    return result


@triton.jit
def _store_results(dy, dy_xmu, channel_invstd, channels, C, outputs, strides):
    """Store the sums of a block of channels, and the gradients computed from them, where they are wanted.

    ``outputs`` are (sum_dy, sum_dy_xmu, grad_weight, grad_bias).
    """
    sum_dy, sum_dy_xmu, grad_weight, grad_bias = outputs
    inside = channels < C
    if sum_dy is not None:
        store_rounded(sum_dy + channels * strides[0], dy.to(tl.float32), inside)
    if sum_dy_xmu is not None:
        store_rounded(sum_dy_xmu + channels * strides[1], dy_xmu.to(tl.float32), inside)
    if grad_weight is not None:
        store_rounded(grad_weight + channels * strides[2], (dy_xmu * channel_invstd).to(tl.float32), inside)
    if grad_bias is not None:
        store_rounded(grad_bias + channels * strides[3], dy.to(tl.float32), inside)


@triton.jit
def batch_norm_reduce_backward(
    grad_out,  # [N, columns, positions]
    input,  # [N, columns, positions]
    mean,  # [C]
    partial,  # float64 [2, parts, blocks_per_channel, C], or None where a CTA or a cluster has whole channels
    invstd,  # [C]; this and the outputs are None where there is a ``partial``
    sum_dy,  # [C], or None
    sum_dy_xmu,  # [C], or None
    grad_weight,  # [C], or None
    grad_bias,  # [C], or None
    output_strides,  # of these four
    N,
    columns,
    positions,
    rows_per_part,
    channel_length,  # columns of a channel: 1, or HxW for segment tiles
    blocks_per_channel,
    grad_out_strides,  # of sample, column and position
    input_strides,
    TILE: tl.constexpr,  # tiles.TileSpec
    REDUCE: tl.constexpr,  # tiles.ReduceSpec
):
    """Compute Σ dy and Σ dy·(x − mean) over a part of the rows of a block of columns a program.

    With one part, the results follow at once. With a cluster, each CTA sends its sums to the first, which adds them up
    in the order of the CTAs. Otherwise ``partial`` takes them, and the combine kernel adds them up.
    """
    pdl_launch_dependents()
    COLUMNS: tl.constexpr = TILE.columns
    if REDUCE.cluster > 1:
        exchange = init_gather(REDUCE.channels, REDUCE.cluster)
    block, part, parts, position_blocks, begin, end = cta_work(rows_per_part, N, columns, positions, TILE, REDUCE)
    work = (position_blocks, block, columns, positions)
    ACC_DTYPE: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float32 else tl.float32
    column_mean = load_channels(mean, column_channels(block, channel_length, TILE), columns // channel_length)
    candidates = (tl.reshape(column_mean, (COLUMNS,)),)
    channels, first_column, length, entry, unused = block_channels(
        block, channel_length, columns, blocks_per_channel, TILE, REDUCE
    )
    channel_invstd = _load_invstd(invstd, channels, columns // channel_length, grad_weight)
    data = (grad_out, input, grad_out_strides, input_strides, work)
    dy, dy_xmu = reduce_rows(begin, end, candidates, data, ACC_DTYPE, TILE, REDUCE)
    if REDUCE.channel_elements > 1:
        dy = gather_by_channel(dy, first_column, length, REDUCE)
        dy, dy_xmu = sum_pair(dy, gather_by_channel(dy_xmu, first_column, length, REDUCE), 1)
    outputs = (sum_dy, sum_dy_xmu, grad_weight, grad_bias)
    if REDUCE.cluster > 1:
        send_to_first_cta(dy, dy_xmu, exchange, part, REDUCE.channels, REDUCE.cluster)
        if part == 0:
            total_dy, total_dy_xmu = sum_received(
                wait_for_ctas(exchange, 0, REDUCE.channels, REDUCE.cluster), REDUCE.cluster
            )
            C = columns // channel_length
            _store_results(total_dy, total_dy_xmu, channel_invstd, channels, C, outputs, output_strides)
    elif partial is None:
        _store_results(dy, dy_xmu, channel_invstd, channels, columns // channel_length, outputs, output_strides)
    else:
        C = columns // channel_length
        store_entries(partial, (dy, dy_xmu), channels, C, (part, parts, entry, unused), blocks_per_channel)


@triton.jit
def batch_norm_reduce_backward_combine(
    partial,  # float64 [2, parts, C]
    invstd,  # [C]
    sum_dy,  # [C], or None
    sum_dy_xmu,  # [C], or None
    grad_weight,  # [C], or None
    grad_bias,  # [C], or None
    output_strides,  # of these four
    parts,  # and entries of each
    C,
    ROWS: tl.constexpr,  # parts of a tile
    CHANNELS: tl.constexpr,  # of a tile
    ONE_TILE: tl.constexpr,  # there are no more parts than ROWS
):
    """Second-stage reduction: add up the parts of a block of channels a program, in a fixed order."""
    channels = block_indices(tl.program_id(0), CHANNELS)
    inside = channels < C
    channel_invstd = _load_invstd(invstd, channels, C, grad_weight)  # which the launch before does not write
    pdl_wait()
    partial_dy_xmu = partial + int64(parts) * C
    offsets = tl.arange(0, ROWS).to(tl.int64)[:, None] * C + channels[None, :]
    mask = (tl.arange(0, ROWS) < parts)[:, None] & inside[None, :]
    dy = tl.load(partial + offsets, mask=mask, other=0.0)
    dy_xmu = tl.load(partial_dy_xmu + offsets, mask=mask, other=0.0)
    if not ONE_TILE:
        for start in range(ROWS, parts, ROWS):
            rows = start + tl.arange(0, ROWS)
            mask = (rows < parts)[:, None] & inside[None, :]
            offsets = rows.to(tl.int64)[:, None] * C + channels[None, :]
            dy += tl.load(partial + offsets, mask=mask, other=0.0)
            dy_xmu += tl.load(partial_dy_xmu + offsets, mask=mask, other=0.0)
    outputs = (sum_dy, sum_dy_xmu, grad_weight, grad_bias)
    total_dy, total_dy_xmu = tl.sum(dy, axis=0), tl.sum(dy_xmu, axis=0)
    _store_results(total_dy, total_dy_xmu, channel_invstd, channels, C, outputs, output_strides)
