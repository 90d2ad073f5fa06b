"""LayerNorm, forward and backward.

Teams of PARTS programs walk over the rows together, ROWS at a time; every program keeps its COLUMNS of them in
registers, so that the data is read once. Row sums go through slots, which a program alone with its rows does not need.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.common import (
    OUTPUTS,
    SUMS,
    WHOLE,
    add_exactly,
    again,
    collect,
    collect_wide,
    float64,
    float64_of_bits,
    high,
    indices,
    int64,
    low,
    publish,
    publish_wide,
    put,
    rounded_sum,
    sum_pair,
    wait_for_launch_before,
    wide,
)


@triton.jit
def _offsets(row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """The offsets of a tile's elements from its first, in 64 bits only where they need them."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    if WIDE:
        rows = rows.to(tl.int64)
        columns = columns.to(tl.int64)
    return rows[:, None] * row_stride + columns[None, :] * column_stride


@triton.jit
def _first(pointer, tile, part, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where a tile begins."""
    return pointer + int64(tile) * ROWS * row_stride + int64(part) * COLUMNS * column_stride


@triton.jit
def _row_mask(rows, M, in_row, MASKED: tl.constexpr):
    mask = (rows < M)[:, None]
    if MASKED:
        mask = mask & in_row
    return mask


@triton.jit
def _slots_of(slots, rows, M, PARTS: tl.constexpr, PADDED: tl.constexpr, WORDS: tl.constexpr):
    """All slots of the rows, and which of them there are."""
    parts = tl.arange(0, PADDED)
    mask = (rows < M)[:, None] & (parts < PARTS)[None, :]
    return slots + (rows[:, None] * PARTS + parts[None, :]) * WORDS, mask


@triton.jit
def layer_norm_backward(
    grad_out,  # [M, N]
    input,  # [M, N]
    mean,  # [M]
    rstd,  # [M]
    weight,  # [N], or None
    grad_input,  # [M, N], or None
    partial,  # float32 [wanted, teams, N]: the weight sums of each team
    slots,  # int64 [M, PARTS]
    M,
    N,
    teams,
    grad_out_row,
    grad_out_column,
    input_row,
    input_column,
    grad_input_row,
    grad_input_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    MASKED: tl.constexpr,  # COLUMNS·PARTS is more than N
    WIDE: tl.constexpr,  # offsets in a tile need 64 bits
    PREFETCH: tl.constexpr,  # load the next rows before the sums of these are known, into registers
    STAGES: tl.constexpr,  # of the rows' way through shared memory; 1 for none
    WANT_INPUT: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    PHASE: tl.constexpr,
):
    """The gradients of the rows of a team, and the sums over them that the weight's gradients are made of."""
    program = tl.program_id(0)
    part = program % PARTS
    team = program // PARTS
    columns = indices(part, COLUMNS)
    in_row = (columns < N)[None, :]
    per_row = 1.0 / float64(N)
    tiles = tl.cdiv(M, ROWS)
    read_x = _offsets(input_row, input_column, ROWS, COLUMNS, WIDE)
    read_dy = _offsets(grad_out_row, grad_out_column, ROWS, COLUMNS, WIDE)
    written = _offsets(grad_input_row, grad_input_column, ROWS, COLUMNS, WIDE)
    weight_sum = tl.zeros((COLUMNS,), tl.float32)
    weight_rest = tl.zeros((COLUMNS,), tl.float32)
    bias_sum = tl.zeros((COLUMNS,), tl.float32)
    bias_rest = tl.zeros((COLUMNS,), tl.float32)
    if weight is not None:
        scale = tl.load(weight + columns, mask=columns < N, other=0.0)[None, :]
    if PREFETCH:
        rows = indices(team, ROWS)
        mask = _row_mask(rows, M, in_row, MASKED)
        x_at = _first(input, team, part, input_row, input_column, ROWS, COLUMNS)
        dy_at = _first(grad_out, team, part, grad_out_row, grad_out_column, ROWS, COLUMNS)
        next_x = tl.load(x_at + read_x, mask=mask, other=0.0)
        next_dy = tl.load(dy_at + read_dy, mask=mask, other=0.0)
        next_mean = tl.load(mean + rows, mask=rows < M, other=0.0)
        next_rstd = tl.load(rstd + rows, mask=rows < M, other=0.0)
    if PARTS > 1 and PHASE == WHOLE:
        wait_for_launch_before()
    for tile in tl.range(team, tiles, teams, num_stages=STAGES):
        rows = indices(tile, ROWS)
        mask = _row_mask(rows, M, in_row, MASKED)
        if PREFETCH:
            x, dy, mu, rs = next_x, next_dy, next_mean, next_rstd
            ahead = indices(tile + teams, ROWS)
            mask_ahead = _row_mask(ahead, M, in_row, MASKED)
            x_at = _first(input, tile + teams, part, input_row, input_column, ROWS, COLUMNS)
            dy_at = _first(grad_out, tile + teams, part, grad_out_row, grad_out_column, ROWS, COLUMNS)
            next_x = tl.load(x_at + read_x, mask=mask_ahead, other=0.0)
            next_dy = tl.load(dy_at + read_dy, mask=mask_ahead, other=0.0)
            next_mean = tl.load(mean + ahead, mask=ahead < M, other=0.0)
            next_rstd = tl.load(rstd + ahead, mask=ahead < M, other=0.0)
        else:
            x_at = _first(input, tile, part, input_row, input_column, ROWS, COLUMNS)
            dy_at = _first(grad_out, tile, part, grad_out_row, grad_out_column, ROWS, COLUMNS)
            x = tl.load(x_at + read_x, mask=mask, other=0.0)
            dy = tl.load(dy_at + read_dy, mask=mask, other=0.0)
            mu = tl.load(mean + rows, mask=rows < M, other=0.0)
            rs = tl.load(rstd + rows, mask=rows < M, other=0.0)
        mu = wide(mu)[:, None]
        rs = wide(rs)[:, None]
        g = wide(dy)
        x_hat = (wide(x) - mu) * rs
        if MASKED:
            x_hat = tl.where(in_row, x_hat, 0.0)  # 0·Inf must not reach the sums
        if PHASE != OUTPUTS:
            if WANT_WEIGHT:
                weight_sum, weight_rest = add_exactly(weight_sum, weight_rest, tl.sum(g * x_hat, axis=0))
            if WANT_BIAS:
                bias_sum, bias_rest = add_exactly(bias_sum, bias_rest, tl.sum(g, axis=0))
        if WANT_INPUT:
            if weight is not None:
                g *= wide(scale)
            if PARTS == 1:
                sum_g, sum_gx = sum_pair(g, g * x_hat, 1)
                mean_g = (sum_g.to(tl.float64) * per_row).to(tl.float32)[:, None]
                mean_gx = (sum_gx.to(tl.float64) * per_row).to(tl.float32)[:, None]
            else:
                if PHASE != OUTPUTS:
                    sum_g, sum_gx = sum_pair(g, g * x_hat, 1)
                    publish(sum_g, sum_gx, slots + rows * PARTS + part, rows < M)
                if PHASE != SUMS:
                    places, given = _slots_of(slots, rows, M, PARTS, PADDED_PARTS, 1)
                    all_g, all_gx = collect(places, given, PHASE == WHOLE)
                    mean_g = (tl.sum(all_g, axis=1) * per_row).to(tl.float32)[:, None]
                    mean_gx = (tl.sum(all_gx, axis=1) * per_row).to(tl.float32)[:, None]
            if PHASE != SUMS:
                g = wide(again(dy))
                if weight is not None:
                    g *= wide(scale)
                x_hat = (wide(again(x)) - mu) * rs
                result = rs * (g - mean_g - x_hat * mean_gx)
                target = _first(grad_input, tile, part, grad_input_row, grad_input_column, ROWS, COLUMNS)
                put(target + written, result, mask)
    if PHASE != OUTPUTS:
        line = partial + int64(team) * N + columns
        if WANT_WEIGHT:
            tl.store(line, rounded_sum(weight_sum, weight_rest), mask=columns < N)
            line += int64(teams) * N
        if WANT_BIAS:
            tl.store(line, rounded_sum(bias_sum, bias_rest), mask=columns < N)


@triton.jit
def layer_norm_forward(
    input,  # [M, N]
    weight,  # [N], or None
    bias,  # [N], or None
    output,  # [M, N]
    mean,  # [M], or None
    rstd,  # [M], or None
    slots,  # int64 [M, PARTS, 2]
    M,
    N,
    eps_bits,  # float64
    teams,
    input_row,
    input_column,
    output_row,
    output_column,
    mean_stride,
    rstd_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
    PHASE: tl.constexpr,
):
    """The normalised rows of a team and their statistics."""
    program = tl.program_id(0)
    part = program % PARTS
    team = program // PARTS
    columns = indices(part, COLUMNS)
    in_row = (columns < N)[None, :]
    read = _offsets(input_row, input_column, ROWS, COLUMNS, WIDE)
    written = _offsets(output_row, output_column, ROWS, COLUMNS, WIDE)
    eps = float64_of_bits(eps_bits)
    count = float64(tl.minimum(N - part * COLUMNS, COLUMNS))
    parts = tl.arange(0, PADDED_PARTS)
    counts = tl.maximum(tl.minimum(N - parts * COLUMNS, COLUMNS), 0).to(tl.float64)[None, :]
    if weight is not None:
        scale = wide(tl.load(weight + columns, mask=columns < N, other=0.0))[None, :]
    if bias is not None:
        shift = wide(tl.load(bias + columns, mask=columns < N, other=0.0))[None, :]
    if PARTS > 1 and PHASE == WHOLE:
        wait_for_launch_before()
    for tile in tl.range(team, tl.cdiv(M, ROWS), teams, num_stages=STAGES):
        rows = indices(tile, ROWS)
        mask = _row_mask(rows, M, in_row, MASKED)
        x_at = _first(input, tile, part, input_row, input_column, ROWS, COLUMNS)
        x = wide(tl.load(x_at + read, mask=mask, other=0.0))
        if PARTS == 1 or PHASE != OUTPUTS:
            # In float64, since the output near the mean is only as precise as the mean is.
            centre = tl.sum(x.to(tl.float64), axis=1) / count
            away = x - high(centre)[:, None] - low(centre)[:, None]
            if MASKED:
                away = tl.where(in_row, away, 0.0)
            squares = tl.sum(away * away, axis=1).to(tl.float64)
        if PARTS > 1:
            if PHASE != OUTPUTS:
                publish_wide(centre, squares, slots + (rows * PARTS + part) * 2, rows < M)
            if PHASE != SUMS:
                places, given = _slots_of(slots, rows, M, PARTS, PADDED_PARTS, 2)
                centres, all_squares = collect_wide(places, given, PHASE == WHOLE)
                centre = tl.sum(tl.where(given, centres * counts, 0.0), axis=1) / float64(N)
                apart = centres - centre[:, None]
                squares = tl.sum(tl.where(given, all_squares + apart * apart * counts, 0.0), axis=1)
        if PHASE != SUMS:
            inverse = (1.0 / tl.sqrt(squares / float64(N) + eps)).to(tl.float32)
            result = (x - high(centre)[:, None] - low(centre)[:, None]) * inverse[:, None]
            if weight is not None:
                result = result * scale
            if bias is not None:
                result = result + shift
            target = _first(output, tile, part, output_row, output_column, ROWS, COLUMNS)
            put(target + written, result, mask)
            first = (rows < M) & (part == 0)
            if mean is not None:
                put(mean + rows * mean_stride, high(centre), first)
            if rstd is not None:
                put(rstd + rows * rstd_stride, inverse, first)
