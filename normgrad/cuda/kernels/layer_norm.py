"""LayerNorm, forward and backward.

Teams of PARTS programs walk over the rows together, ROWS at a time; every program keeps its COLUMNS of them in
registers, so that the data is read once. Row sums go through slots, which a program alone with its rows does not need.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.common import (
    OUTPUTS,
    SINGLE,
    SUMS,
    WHOLE,
    apart,
    collect,
    collect_wide,
    divided,
    float64,
    float64_of_bits,
    high,
    indices,
    int64,
    kept,
    look,
    look_again,
    numbers,
    publish,
    publish_wide,
    put,
    put_numbers,
    settled,
    sum_pair,
    two_of,
    wait_for_launch_before,
    wide,
)
from normgrad.cuda.kernels.formulas import away_from, gradient, normalised, precise, wider


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
def _row_mask(known, in_row, MASKED: tl.constexpr):
    mask = known[:, None]
    if MASKED:
        mask = mask & in_row
    return mask


@triton.jit
def _of_columns(pointer, part, N, COLUMNS: tl.constexpr):
    """Weights of a part's columns, as they are kept: float32, or pairs of 16 bits in an int32."""
    if pointer.dtype.element_ty == tl.int32:
        words = indices(part, COLUMNS // 2)
        kept_so = tl.load(pointer + words, mask=words < N // 2, other=0)
    else:
        columns = indices(part, COLUMNS)
        kept_so = wide(tl.load(pointer + columns, mask=columns < N, other=0.0))
    return kept_so[None, :]


@triton.jit
def _unpacked(weights, PAIRS: tl.constexpr):
    """Weights of columns in float32."""
    if weights.dtype == tl.int32:
        weights = apart(weights, PAIRS)
    return weights


@triton.jit
def _slots_of(slots, rows, M, PARTS: tl.constexpr, PADDED: tl.constexpr, WORDS: tl.constexpr):
    """All slots of the rows, and which of them there are."""
    parts = tl.arange(0, PADDED)
    mask = ((rows >= 0) & (rows < M))[:, None] & (parts < PARTS)[None, :]
    return slots + (rows[:, None] * PARTS + parts[None, :]) * WORDS, mask


@triton.jit
def layer_norm_backward(
    grad_out,  # [M, N]
    input,  # [M, N]
    mean,  # [M]
    rstd,  # [M]
    weight,  # [N], or None
    grad_input,  # [M, N], or None
    partial,  # float32 or float64 [wanted, teams, N]: the weight sums of each team
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
    LATER: tl.constexpr,  # turns from a tile's sums to its results, where programs wait for each other: 1 or 2
    PAIRS: tl.constexpr,  # how 16-bit data comes; pairs are what COLUMNS and the strides of pairs count
    EXACT: tl.constexpr,  # float32 is computed with as float64
    FEW: tl.constexpr,  # so are the weight sums alone, of rows so few that each rounding is seen
    WANT_INPUT: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    PHASE: tl.constexpr,
):
    """The gradients of the rows of a team, and the sums over them that the weight's gradients are made of."""
    LAG: tl.constexpr = LATER if (WANT_INPUT and PARTS > 1) and PHASE == WHOLE else 0
    WORDS: tl.constexpr = COLUMNS if PAIRS == SINGLE else COLUMNS // 2
    program = tl.program_id(0)
    part = program % PARTS
    team = program // PARTS
    columns = indices(part, COLUMNS)
    in_row = (columns < N)[None, :]
    word_in_row = in_row if PAIRS == SINGLE else (indices(part, WORDS) < N // 2)[None, :]
    per_row = 1.0 / float64(N)
    tiles = tl.cdiv(M, ROWS)
    read_x = _offsets(input_row, input_column, ROWS, WORDS, WIDE)
    read_dy = _offsets(grad_out_row, grad_out_column, ROWS, WORDS, WIDE)
    written = _offsets(grad_input_row, grad_input_column, ROWS, WORDS, WIDE)
    weight_sum = tl.zeros((COLUMNS,), tl.float64)
    bias_sum = tl.zeros((COLUMNS,), tl.float64)
    scale = None
    if weight is not None:
        scale = wide(tl.load(weight + columns, mask=columns < N, other=0.0))[None, :]
    if PREFETCH:
        rows = indices(team, ROWS)
        mask = _row_mask(rows < M, word_in_row, MASKED)
        next_x = tl.load(_first(input, team, part, input_row, input_column, ROWS, WORDS) + read_x, mask=mask, other=0)
        next_dy = tl.load(
            _first(grad_out, team, part, grad_out_row, grad_out_column, ROWS, WORDS) + read_dy, mask=mask, other=0
        )
        next_mean = tl.load(mean + rows, mask=rows < M, other=0.0)
        next_rstd = tl.load(rstd + rows, mask=rows < M, other=0.0)
    if LAG:
        x_before = tl.zeros((ROWS, WORDS), input.dtype.element_ty)
        dy_before = tl.zeros((ROWS, WORDS), grad_out.dtype.element_ty)
        mu_before = tl.zeros((ROWS,), tl.float32)
        rs_before = tl.zeros((ROWS,), tl.float32)
        wait_for_launch_before()
    if LAG == 2:
        # Zeros of their own, since Triton carries on what a first turn, which starts with these, has changed.
        x_earlier = tl.zeros((ROWS, WORDS), input.dtype.element_ty)
        dy_earlier = tl.zeros((ROWS, WORDS), grad_out.dtype.element_ty)
        mu_earlier = tl.zeros((ROWS,), tl.float32)
        rs_earlier = tl.zeros((ROWS,), tl.float32)
    for tile in tl.range(team, tiles + LAG * teams, teams, num_stages=STAGES):
        done = tile - LAG * teams
        if LAG == 2:  # they were written a turn ago, so what is seen here will be there when it is needed
            places, given = _slots_of(slots, indices(done, ROWS), M, PARTS, PADDED_PARTS, 1)
            seen = look(places, given)
        ahead = tile + teams if PREFETCH else tile
        rows = indices(ahead, ROWS)
        mask = _row_mask(rows < M, word_in_row, MASKED)
        x = tl.load(_first(input, ahead, part, input_row, input_column, ROWS, WORDS) + read_x, mask=mask, other=0)
        dy = tl.load(
            _first(grad_out, ahead, part, grad_out_row, grad_out_column, ROWS, WORDS) + read_dy, mask=mask, other=0
        )
        mu = tl.load(mean + rows, mask=rows < M, other=0.0)
        rs = tl.load(rstd + rows, mask=rows < M, other=0.0)
        if PREFETCH:
            x, next_x = next_x, x
            dy, next_dy = next_dy, dy
            mu, next_mean = next_mean, mu
            rs, next_rstd = next_rstd, rs
        rows = indices(tile, ROWS)
        mu = wide(mu)
        rs = wide(rs)
        g = wider(dy, PAIRS, EXACT)
        x_hat = (wider(x, PAIRS, EXACT) - mu[:, None]) * rs[:, None]
        if MASKED:
            x_hat = tl.where(in_row, x_hat, 0.0)  # 0·Inf must not reach the sums
        if PHASE != OUTPUTS:
            if WANT_WEIGHT:
                product = g * x_hat
                if FEW:
                    product = precise(dy, PAIRS) * ((precise(x, PAIRS) - mu[:, None]) * rs[:, None])
                weight_sum += tl.sum(product, axis=0)
            if WANT_BIAS:
                bias_sum += tl.sum(wider(dy, PAIRS, FEW), axis=0)
        if WANT_INPUT:
            if PHASE != OUTPUTS:
                if weight is not None:
                    g *= wider(scale, SINGLE, EXACT)
                sum_g, sum_gx = sum_pair(g, g * x_hat, 1)
                if PARTS > 1:
                    publish(sum_g, sum_gx, slots + rows * PARTS + part, rows < M)
            if PHASE != SUMS:
                rows = indices(done, ROWS)
                known = rows < M
                if LAG:
                    known = known & (rows >= 0)
                    x, x_before = x_before, x
                    dy, dy_before = dy_before, dy
                    mu, mu_before = mu_before, mu
                    rs, rs_before = rs_before, rs
                if LAG == 2:
                    x, x_earlier = x_earlier, kept(x)
                    dy, dy_earlier = dy_earlier, kept(dy)
                    mu, mu_earlier = mu_earlier, kept(mu)
                    rs, rs_earlier = rs_earlier, kept(rs)
                    all_g, all_gx = two_of(look_again(seen, places))
                elif PARTS > 1:
                    places, given = _slots_of(slots, rows, M, PARTS, PADDED_PARTS, 1)
                    all_g, all_gx = collect(places, given, PHASE == WHOLE)
                if PARTS > 1:
                    sum_g = settled(tl.sum(all_g, axis=1), ROWS)
                    sum_gx = settled(tl.sum(all_gx, axis=1), ROWS)
                mean_g = (sum_g.to(tl.float64) * per_row)[:, None]
                mean_gx = (sum_gx.to(tl.float64) * per_row)[:, None]
                g, values = wider(dy, PAIRS, EXACT), wider(x, PAIRS, EXACT)
                result = gradient(g, values, mu[:, None], rs[:, None], scale, mean_g, mean_gx)
                target = _first(grad_input, done, part, grad_input_row, grad_input_column, ROWS, WORDS)
                mask = _row_mask(known, word_in_row, MASKED)
                put_numbers(target + written, result, mask, (ROWS, WORDS, 2), PAIRS)
    if PHASE != OUTPUTS:
        line = partial + int64(team) * N + columns
        if WANT_WEIGHT:
            tl.store(line, weight_sum, mask=columns < N)
            line += int64(teams) * N
        if WANT_BIAS:
            tl.store(line, bias_sum, mask=columns < N)


@triton.jit
def layer_norm_forward(
    input,  # [M, N]
    weight,  # [N], in pairs perhaps, or None
    bias,  # [N], in pairs perhaps, or None
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
    PAIRS: tl.constexpr,
    PHASE: tl.constexpr,
):
    """The normalised rows of a team and their statistics."""
    LAG: tl.constexpr = 1 if PARTS > 1 and PHASE == WHOLE else 0
    WORDS: tl.constexpr = COLUMNS if PAIRS == SINGLE else COLUMNS // 2
    program = tl.program_id(0)
    part = program % PARTS
    team = program // PARTS
    columns = indices(part, COLUMNS)
    in_row = (columns < N)[None, :]
    word_in_row = in_row if PAIRS == SINGLE else (indices(part, WORDS) < N // 2)[None, :]
    read = _offsets(input_row, input_column, ROWS, WORDS, WIDE)
    written = _offsets(output_row, output_column, ROWS, WORDS, WIDE)
    eps = float64_of_bits(eps_bits)
    whole = float64(N)
    per_row = 1.0 / whole
    count = float64(tl.minimum(N - part * COLUMNS, COLUMNS))
    per_part = 1.0 / count
    parts = tl.arange(0, PADDED_PARTS)
    counts = tl.maximum(tl.minimum(N - parts * COLUMNS, COLUMNS), 0).to(tl.float64)[None, :]
    if weight is not None:
        scale = _of_columns(weight, part, N, COLUMNS)
    if bias is not None:
        shift = _of_columns(bias, part, N, COLUMNS)
    if LAG:
        x_before = tl.zeros((ROWS, WORDS), input.dtype.element_ty)
        wait_for_launch_before()
    for tile in tl.range(team, tl.cdiv(M, ROWS) + LAG * teams, teams, num_stages=STAGES):
        done = tile - LAG * teams
        rows = indices(tile, ROWS)
        mask = _row_mask(rows < M, word_in_row, MASKED)
        x = tl.load(_first(input, tile, part, input_row, input_column, ROWS, WORDS) + read, mask=mask, other=0)
        if PHASE != OUTPUTS:
            # In float64, since the output near the mean is only as precise as the mean is.
            values = numbers(x, PAIRS)
            centre = divided(tl.sum(values.to(tl.float64), axis=1), count, per_part)
            away = away_from(values, centre[:, None])
            if MASKED:
                away = tl.where(in_row, away, 0.0)
            squares = tl.sum(away * away, axis=1).to(tl.float64)
            if PARTS > 1:
                publish_wide(centre, squares, slots + (rows * PARTS + part) * 2, rows < M)
        if PHASE != SUMS:
            rows = indices(done, ROWS)
            known = rows < M
            if LAG:
                known = known & (rows >= 0)
                x, x_before = x_before, x
            if PARTS > 1:
                places, given = _slots_of(slots, rows, M, PARTS, PADDED_PARTS, 2)
                centres, all_squares = collect_wide(places, given, PHASE == WHOLE)
                centre = divided(tl.sum(tl.where(given, centres * counts, 0.0), axis=1), whole, per_row)
                between = centres - centre[:, None]
                squares = tl.sum(tl.where(given, all_squares + between * between * counts, 0.0), axis=1)
                centre = settled(centre, ROWS)
                squares = settled(squares, ROWS)
            inverse = 1.0 / tl.sqrt(squares * per_row + eps)
            factor = None
            term = None
            if weight is not None:
                factor = _unpacked(scale, PAIRS)
            if bias is not None:
                term = _unpacked(shift, PAIRS)
            result = normalised(numbers(x, PAIRS), centre[:, None], inverse[:, None], factor, term)
            target = _first(output, done, part, output_row, output_column, ROWS, WORDS)
            put_numbers(target + written, result, _row_mask(known, word_in_row, MASKED), (ROWS, WORDS, 2), PAIRS)
            first = known & (part == 0)
            if mean is not None:
                put(mean + rows * mean_stride, high(centre), first)
            if rstd is not None:
                put(rstd + rows * rstd_stride, high(inverse), first)
