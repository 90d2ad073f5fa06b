"""The kernels of GroupNorm where a group of a sample is one contiguous row; ``launches`` launches them.

CTA groups stay with one group and walk over the samples, a tile of rows at a time, as LayerNorm's do over rows. Rows
begin at even addresses where channels of an odd number of positions do not, so they can be loaded in vectors.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device import mailbox
from normgrad.cuda.device.formulas import input_gradient, nan_where_infinite, normalize, row_moments
from normgrad.cuda.device.indexing import block_indices, float64, float64_from_bits, int64, tile_offsets
from normgrad.cuda.device.mailbox import APPLY, FUSED, REDUCE
from normgrad.cuda.device.pack16 import UNPACKED, store_elements, store_rounded, to_float32, unpack, unpack_acc_dtype
from normgrad.cuda.device.pdl import pdl_launch_dependents, pdl_wait
from normgrad.cuda.device.sums import column_sums, store_partials, sum_pair
from normgrad.cuda.helper_kernels import store_sums
from normgrad.cuda.layer_norm import addressing


@triton.jit
def _column_channels(part, HxW, TILE: tl.constexpr):
    """Return the channel within the group of each of the CTA's columns."""
    columns = part * TILE.columns + tl.arange(0, TILE.columns)
    if TILE.offset64:
        columns = block_indices(part, TILE.columns)
    return columns // HxW


@triton.jit
def _load_channels(pointer, first_channel, channels, mask):
    """Load a parameter of the channels of the CTA's columns, float32 [1, columns]."""
    return to_float32(tl.load(pointer + first_channel + channels, mask=mask, other=0.0))[None, :]


@triton.jit
def group_norm_backward_rows(
    grad_out,  # [N, group, columns]
    input,  # [N, group, columns]
    mean,  # [N, group]
    rstd,  # [N, group]
    weight,  # [group·D], or None
    grad_input,  # [N, group, columns], or None
    partial,  # float32, or float64 for FLOAT64, [outputs, cta_groups, group, columns]: sums over a CTA group's samples
    slots,  # mailbox: int64 [N, group, parts], or [N, group, parts, 2] for FLOAT64; None without one
    N,
    group,
    HxW,
    columns,  # of a row: D·HxW
    groups_at_once,  # groups that have CTA groups at the same time
    cta_groups,  # of a group
    grad_out_strides,  # of sample, in vectors, and of column
    input_strides,
    grad_input_strides,
    TILE: tl.constexpr,  # layer_norm.tiles.RowTileSpec
    D: tl.constexpr,  # channels of a group
    FLOAT64: tl.constexpr,  # sums are computed in float64
    WANT: tl.constexpr,  # steps.WantedGradients
    PHASE: tl.constexpr,  # of device.mailbox
):
    """Compute grad_input of all rows, and the partial sums of grad_weight and grad_bias by column.

    The formulas are those of LayerNorm backward, with the weight of each column's channel. A CTA group takes the groups
    i, i + groups_at_once, …, and of each the tiles of samples j, j + cta_groups, … A tile stays in registers, so that
    the data is read once; so do the sums of columns (float64) until the CTA group is done with a group and writes them
    to ``partial``. ``group_norm_backward_rows_sum_partials`` adds them up.

    CTAs that share rows exchange the rows' sums through the mailbox, and compute the results one iteration later (LAG).
    Deterministic: the order of every sum follows from the tile alone; exchanged sums are added up by part.
    """
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    WORDS: tl.constexpr = TILE.words
    LAG: tl.constexpr = 1 if (WANT.input and TILE.parts > 1) and PHASE == FUSED else 0
    # Equal elements of many rows, which a thread adds up one by one in float32, may all be rounded the same way.
    MANY_ROWS: tl.constexpr = ROWS >= 32
    columns = addressing.assume_divisible(columns, TILE)
    row_words = columns // (COLUMNS // WORDS)
    program_group, part, column, in_row, word_in_row = addressing.cta_columns(columns, TILE)
    cta = (part, word_in_row)
    cta_group = program_group // groups_at_once
    channels = _column_channels(part, HxW, TILE)
    reciprocal_columns = 1.0 / float64(columns)
    tiles = tl.cdiv(N, ROWS)
    input_strides = addressing.in_words(input_strides, TILE)
    grad_out_strides = addressing.in_words(grad_out_strides, TILE)
    grad_input_strides = addressing.in_words(grad_input_strides, TILE)
    x_layout = addressing.row_layout(input_strides, (N,), TILE)
    dy_layout = addressing.row_layout(grad_out_strides, (N,), TILE)
    output_offsets = tile_offsets(grad_input_strides, ROWS, WORDS, TILE.offset64)
    for group_index in range(program_group % groups_at_once, group, groups_at_once):
        first_word = int64(group_index) * row_words
        weight_sum = tl.zeros((COLUMNS,), tl.float64)
        bias_sum = tl.zeros((COLUMNS,), tl.float64)
        first_channel = int64(group_index) * D
        w = _load_channels(weight, first_channel, channels, column < columns) if weight is not None else None
        if LAG:
            zeros = tl.zeros((ROWS,), tl.float32)
            previous_x = tl.zeros((ROWS, WORDS), input.dtype.element_ty)
            previous = (previous_x, tl.zeros((ROWS, WORDS), grad_out.dtype.element_ty), zeros, zeros)
            pdl_wait()
        for tile in tl.range(cta_group, tiles + LAG * cta_groups, cta_groups, num_stages=TILE.stages):
            result_tile = tile - LAG * cta_groups
            rows = block_indices(tile, ROWS)
            x = addressing.load_tile(input + first_word, x_layout, tile, cta, N, TILE)
            dy = addressing.load_tile(grad_out + first_word, dy_layout, tile, cta, N, TILE)
            row_mean = to_float32(tl.load(mean + rows * group + group_index, mask=rows < N, other=0.0))
            row_rstd = to_float32(tl.load(rstd + rows * group + group_index, mask=rows < N, other=0.0))
            if PHASE != APPLY:
                g = unpack(dy, TILE.packing, FLOAT64)
                x_hat = (unpack(x, TILE.packing, FLOAT64) - row_mean[:, None]) * row_rstd[:, None]
                if TILE.masked:
                    x_hat = tl.where(in_row, x_hat, 0.0)  # 0·Inf must not reach the sums
                if WANT.weight:
                    weight_sum += column_sums(g * x_hat, MANY_ROWS)
                if WANT.bias:
                    bias_sum += column_sums(g, MANY_ROWS)
                if WANT.input:
                    if weight is not None:
                        g = g * unpack(w, UNPACKED, FLOAT64)
                    sum_g, sum_gx = sum_pair(g, g * x_hat, 1)
                    if TILE.parts > 1:
                        slot = (rows * group + group_index) * TILE.parts + part
                        mailbox.publish_sums(sum_g, sum_gx, slots, slot, rows < N, FLOAT64)
            if WANT.input and PHASE != REDUCE:
                rows, row_inside = addressing.tile_rows(result_tile, N, TILE, LAG)
                if LAG:
                    current, previous = previous, (x, dy, row_mean, row_rstd)
                    x, dy, row_mean, row_rstd = current
                if TILE.parts > 1:
                    statistic = rows * group + group_index
                    sum_g, sum_gx = mailbox.receive_totals(slots, statistic, row_inside, PHASE == FUSED, FLOAT64, TILE)
                mean_g = (sum_g.to(tl.float64) * reciprocal_columns)[:, None]
                mean_gx = (sum_gx.to(tl.float64) * reciprocal_columns)[:, None]
                dy_values, x_values = unpack_acc_dtype(dy, TILE.packing), unpack_acc_dtype(x, TILE.packing)
                result = input_gradient(dy_values, x_values, row_mean[:, None], row_rstd[:, None], w, mean_g, mean_gx)
                start = addressing.tile_start(grad_input + first_word, result_tile, part, grad_input_strides, TILE)
                mask = addressing.element_mask(row_inside, word_in_row, TILE)
                store_elements(start + output_offsets, result, mask, TILE.packing)
        pdl_launch_dependents()
        if PHASE != APPLY:
            target = partial + (int64(cta_group) * group + group_index) * columns + column
            store_partials(target, int64(cta_groups) * group, columns, weight_sum, bias_sum, column < columns, WANT)


@triton.jit
def group_norm_forward_rows(
    input,  # [N, group, columns]
    weight,  # [group·D], or None
    bias,  # [group·D], or None
    output,  # [N, group, columns]
    mean,  # [N, group]
    rstd,  # [N, group]
    slots,  # mailbox: int64 [N, group, parts, 2]; None without one
    N,
    group,
    HxW,
    columns,  # of a row: D·HxW
    eps_bits,  # of a float64
    groups_at_once,  # groups that have CTA groups at the same time
    cta_groups,  # of a group
    input_strides,  # of sample, in vectors, and of column
    output_strides,
    mean_stride,
    rstd_stride,
    TILE: tl.constexpr,  # layer_norm.tiles.RowTileSpec
    D: tl.constexpr,  # channels of a group
    FLOAT64: tl.constexpr,  # squares are computed in float64
    SEGMENTS: tl.constexpr,  # of a CTA's columns whose squares are added up first; 1 where a thread holds few columns
    PHASE: tl.constexpr,  # of device.mailbox
):
    """Compute output = (x − mean)·rstd·weight + bias, and mean and rstd of all rows.

    CTA groups take groups and tiles of samples as in the backward kernel. The moments of a row are those of LayerNorm
    forward: the float64 sum, then the squares about the mean; of parts of a row combined by Chan's formula, through the
    mailbox and with the results one iteration later (LAG). Deterministic: by part, not by arrival.
    """
    ROWS: tl.constexpr = TILE.rows
    WORDS: tl.constexpr = TILE.words
    LAG: tl.constexpr = 1 if TILE.parts > 1 and PHASE == FUSED else 0
    columns = addressing.assume_divisible(columns, TILE)
    row_words = columns // (TILE.columns // WORDS)
    program_group, part, column, in_row, word_in_row = addressing.cta_columns(columns, TILE)
    cta = (part, word_in_row)
    cta_group = program_group // groups_at_once
    channels = _column_channels(part, HxW, TILE)
    input_strides = addressing.in_words(input_strides, TILE)
    output_strides = addressing.in_words(output_strides, TILE)
    x_layout = addressing.row_layout(input_strides, (N,), TILE)
    output_offsets = tile_offsets(output_strides, ROWS, WORDS, TILE.offset64)
    eps = float64_from_bits(eps_bits)
    count, cta_count, part_counts = addressing.column_counts(columns, part, TILE)
    counts = (part_counts, 1.0 / part_counts)
    for group_index in range(program_group % groups_at_once, group, groups_at_once):
        first_word = int64(group_index) * row_words
        first_channel = int64(group_index) * D
        w = _load_channels(weight, first_channel, channels, column < columns) if weight is not None else None
        b = _load_channels(bias, first_channel, channels, column < columns) if bias is not None else None
        if LAG:
            previous_x = tl.zeros((ROWS, WORDS), input.dtype.element_ty)
            pdl_wait()
        for tile in tl.range(cta_group, tl.cdiv(N, ROWS) + LAG * cta_groups, cta_groups, num_stages=TILE.stages):
            result_tile = tile - LAG * cta_groups
            rows = block_indices(tile, ROWS)
            x = addressing.load_tile(input + first_word, x_layout, tile, cta, N, TILE)
            if PHASE != APPLY:
                values = unpack(x, TILE.packing, FLOAT64)
                total, row_mean, squares = row_moments(values, in_row, cta_count, SEGMENTS, TILE.parts == 1, TILE)
                squares = tl.where(squares < 0.0, 0.0, squares)
                if TILE.parts > 1:
                    slot = slots + ((rows * group + group_index) * TILE.parts + part) * 2
                    mailbox.publish_float64(total, squares, slot, rows < N)
            if PHASE != REDUCE:
                rows, row_inside = addressing.tile_rows(result_tile, N, TILE, LAG)
                if LAG:
                    x, previous_x = previous_x, x
                if TILE.parts > 1:
                    row_mean, squares = mailbox.receive_moments(
                        slots, rows * group + group_index, row_inside, counts, count, PHASE == FUSED, TILE
                    )
                row_rstd = 1.0 / tl.sqrt(nan_where_infinite(squares) * count[1] + eps)
                result = normalize(unpack_acc_dtype(x, TILE.packing), row_mean[:, None], row_rstd[:, None], w, b)
                start = addressing.tile_start(output + first_word, result_tile, part, output_strides, TILE)
                mask = addressing.element_mask(row_inside, word_in_row, TILE)
                store_elements(start + output_offsets, result, mask, TILE.packing)
                first_part = row_inside & (part == 0)
                store_rounded(mean + (rows * group + group_index) * mean_stride, row_mean, first_part)
                store_rounded(rstd + (rows * group + group_index) * rstd_stride, row_rstd, first_part)


@triton.jit
def group_norm_backward_rows_sum_partials(
    partial,  # float32 or float64 [outputs, cta_groups, C, HxW]
    first,  # [segments, C]: the sums of partial[0]
    second,  # [segments, C]: the sums of partial[1], or None
    first_stride,  # of a channel
    second_stride,
    cta_groups,
    C,
    HxW,
    segment,  # positions that a program adds up
    CTA_GROUPS: tl.constexpr,  # of a tile
    CHANNELS: tl.constexpr,  # of a tile
    POSITIONS: tl.constexpr,  # of a tile
):
    """Second-stage reduction: sum a segment of the positions of a block of channels over all CTA groups, in float64.

    Program (i, j, k) sums segment j of channel block i of partial[k]. The order is fixed: each thread adds up CTA
    groups, then positions; a tree then adds up the threads of a channel.
    """
    pdl_wait()
    channels = block_indices(tl.program_id(0), CHANNELS)
    inside = channels < C
    begin = tl.program_id(1).to(tl.int64) * segment
    end = tl.minimum(begin + segment, HxW)
    which = tl.program_id(2)
    source = partial + which.to(tl.int64) * cta_groups * C * HxW
    total = tl.zeros((CTA_GROUPS, CHANNELS, POSITIONS), tl.float64)
    for start in range(0, cta_groups, CTA_GROUPS):
        groups = int64(start) + tl.arange(0, CTA_GROUPS)
        rows = (groups[:, None] * C + channels[None, :]) * HxW
        row_inside = (groups < cta_groups)[:, None] & inside[None, :]
        for first_position in range(begin, end, POSITIONS):
            positions = first_position + tl.arange(0, POSITIONS)
            mask = row_inside[:, :, None] & (positions < end)[None, None, :]
            value = tl.load(source + rows[:, :, None] + positions[None, None, :], mask=mask, other=0.0)
            total += value.to(tl.float64)
    sums = tl.sum(tl.sum(total, axis=2), axis=0)
    index = tl.program_id(1).to(tl.int64) * C + channels
    store_sums(first, second, which, index, sums, first_stride, second_stride, inside)
