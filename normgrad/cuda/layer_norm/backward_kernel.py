"""LayerNorm backward.

Teams of PARTS programs walk over the rows together, ROWS at a time; every program keeps its COLUMNS of them in
registers, so that the data is read once. Row sums go through the shared memory of a cluster, or through slots in the
GPU's memory; a program alone with its rows needs neither.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device import warp_sums
from normgrad.cuda.device.common import (
    OUTPUTS,
    SINGLE,
    SUMS,
    WHOLE,
    collect,
    collect_wide,
    float64,
    high,
    indices,
    int64,
    lane_zero,
    let_next_launch_begin,
    publish,
    publish_wide,
    put_numbers,
    settled,
    sum_pair,
    wait_for_launch_before,
    wide,
)
from normgrad.cuda.device.formulas import gradient, precise, wider
from normgrad.cuda.layer_norm.addressing import (
    known_multiple,
    offsets_within,
    part_of_team,
    row_mask,
    rows_of,
    scaled_strides,
    slots_of,
    tile_at,
)


@triton.jit
def over_rows(values, MANY: tl.constexpr):
    """The sums of columns; where a thread has MANY rows it adds up eight stretches of them first."""
    if MANY:
        values = tl.sum(tl.reshape(values, (8, values.shape[0] // 8, values.shape[1])), axis=0)
    return tl.sum(values, axis=0)


@triton.jit
def _loaded(
    tensors,  # input, grad_out, mean, rstd
    offsets,  # of a tile's elements in the first two
    strides,
    row_grid,
    tile,
    part,
    M,
    word_in_row,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    VECTOR: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    AHEAD: tl.constexpr,  # into registers, where they are needed an iteration later
):
    """A tile of the input and of its gradients, and its rows' statistics."""
    rows = indices(tile, ROWS)
    mask = row_mask(rows < M, word_in_row, MASKED)
    x_at = tile_at(tensors[0], offsets[0], tile, part, row_grid, strides[0], ROWS, WORDS, VECTOR, WIDE)
    x = tl.load(x_at, mask=mask, other=0)
    dy_at = tile_at(tensors[1], offsets[1], tile, part, row_grid, strides[1], ROWS, WORDS, VECTOR, WIDE)
    dy = tl.load(dy_at, mask=mask, other=0)
    if AHEAD:  # ptxas would load warp-uniform addresses into uniform registers, and stall the warp an iteration early
        rows = indices(tile + lane_zero(), ROWS)
    mu = tl.load(tensors[2] + rows, mask=rows < M, other=0.0)
    rs = tl.load(tensors[3] + rows, mask=rows < M, other=0.0)
    return x, dy, mu, rs


@triton.jit
def layer_norm_backward(
    grad_out,  # [M, N]
    input,  # [M, N]
    mean,  # [M]
    rstd,  # [M]
    weight,  # [N], or None
    grad_input,  # [M, N], or None
    partial,  # float32 or float64 [wanted, teams, N]: the weight sums of each team
    slots,  # int64 [M, PARTS], or of EXACT sums [M, PARTS, 2]
    M,
    N,
    teams,
    row_grid,  # sizes of the outer dimensions that cannot be merged into one, the last fastest: M is their product
    grad_out_strides,  # of each of these, in vectors, and of columns
    input_strides,
    grad_input_strides,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,  # what divides the strides of rows and, in words, the columns
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    MASKED: tl.constexpr,  # COLUMNS·PARTS is more than N
    WIDE: tl.constexpr,  # offsets in a tile need 64 bits
    PREFETCH: tl.constexpr,  # load the next rows before the sums of these are known, into registers
    STAGES: tl.constexpr,  # of the rows' way through shared memory; 1 for none
    FOLD: tl.constexpr,  # stretches of a program's columns that are added up first; 1 where a thread has few
    CLUSTER: tl.constexpr,  # the programs of a team reach each other's shared memory
    WARPS: tl.constexpr,
    PAIRS: tl.constexpr,  # how 16-bit data comes; pairs are what COLUMNS and the strides of pairs count
    EXACT: tl.constexpr,  # all is computed with as float64
    FEW: tl.constexpr,  # so are the weight sums alone, of rows or columns so few that each rounding is seen
    WANT_INPUT: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    PHASE: tl.constexpr,
):
    """The gradients of the rows of a team, and the sums over them that the weight's gradients are made of."""
    SLOTS: tl.constexpr = PARTS > 1 and not CLUSTER
    LAG: tl.constexpr = 1 if (WANT_INPUT and SLOTS) and PHASE == WHOLE else 0
    WORDS: tl.constexpr = COLUMNS if PAIRS == SINGLE else COLUMNS // 2
    # Equal numbers that a thread adds up one by one may be rounded the same way each time.
    MANY_ROWS: tl.constexpr = ROWS >= 32 and input.dtype.element_ty != tl.float32
    N = known_multiple(N, VECTOR, PAIRS)
    input_strides = scaled_strides(input_strides, row_grid, VECTOR, WIDE)
    grad_out_strides = scaled_strides(grad_out_strides, row_grid, VECTOR, WIDE)
    grad_input_strides = scaled_strides(grad_input_strides, row_grid, VECTOR, WIDE)
    team, part, columns, in_row, word_in_row = part_of_team(N, COLUMNS, PARTS, PAIRS)
    per_row = 1.0 / float64(N)
    tiles = tl.cdiv(M, ROWS)
    tensors = (input, grad_out, mean, rstd)
    strides = (input_strides, grad_out_strides)
    x_offsets = offsets_within(row_grid, input_strides, ROWS, WORDS, WIDE)
    dy_offsets = offsets_within(row_grid, grad_out_strides, ROWS, WORDS, WIDE)
    offsets = (x_offsets, dy_offsets)
    written = offsets_within(row_grid, grad_input_strides, ROWS, WORDS, WIDE)
    weight_sum = tl.zeros((COLUMNS,), tl.float64)
    bias_sum = tl.zeros((COLUMNS,), tl.float64)
    WIDTH: tl.constexpr = 32 * VECTOR * (1 if PAIRS == SINGLE else 2)  # columns that a cluster's warp has side by side
    scale = None
    if weight is not None:
        scale = wide(tl.load(weight + columns, mask=columns < N, other=0.0))[None, :]
    if CLUSTER:
        told = warp_sums.open_slots()
        turns = 0
    if PARTS == 1:  # noqa: SIM102 - one is known at compile time
        if tiles <= teams:  # no rows follow these, so that the next launch may take its place early
            let_next_launch_begin()
    if PREFETCH:
        next_x, next_dy, next_mean, next_rstd = _loaded(
            tensors, offsets, strides, row_grid, team, part, M, word_in_row, ROWS, WORDS, VECTOR, MASKED, WIDE, True
        )
    if LAG:
        x_before = tl.zeros((ROWS, WORDS), input.dtype.element_ty)
        dy_before = tl.zeros((ROWS, WORDS), grad_out.dtype.element_ty)
        mu_before = tl.zeros((ROWS,), tl.float32)
        rs_before = tl.zeros((ROWS,), tl.float32)
        wait_for_launch_before()
    for tile in tl.range(team, tiles + LAG * teams, teams, num_stages=STAGES):
        done = tile - LAG * teams
        ahead = tile + teams if PREFETCH else tile
        x, dy, mu, rs = _loaded(
            tensors,
            offsets,
            strides,
            row_grid,
            ahead,
            part,
            M,
            word_in_row,
            ROWS,
            WORDS,
            VECTOR,
            MASKED,
            WIDE,
            PREFETCH,
        )
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
                weight_sum += over_rows(product, MANY_ROWS)
            if WANT_BIAS:
                bias_sum += over_rows(wider(dy, PAIRS, FEW), MANY_ROWS)
        if WANT_INPUT:
            if PHASE != OUTPUTS:
                if weight is not None:
                    g *= wider(scale, SINGLE, EXACT)
                sum_g, sum_gx = g, g * x_hat
                if FOLD > 1:
                    STRETCHES: tl.constexpr = (ROWS, FOLD, COLUMNS // FOLD)
                    sum_g, sum_gx = sum_pair(tl.reshape(sum_g, STRETCHES), tl.reshape(sum_gx, STRETCHES), 1)
                if CLUSTER:
                    sum_g, sum_gx = warp_sums.of_warps(sum_g, sum_gx, WIDTH, WARPS)
                    warp_sums.tell(sum_g, sum_gx, told, part, turns, PARTS)
                else:
                    sum_g, sum_gx = sum_pair(sum_g, sum_gx, 1)
                if SLOTS:
                    if EXACT:
                        publish_wide(sum_g, sum_gx, slots + (rows * PARTS + part) * 2, rows < M)
                    else:
                        publish(sum_g, sum_gx, slots + rows * PARTS + part, rows < M)
            if PHASE != SUMS:
                rows, known = rows_of(done, M, ROWS, LAG)
                if LAG:
                    x, x_before = x_before, x
                    dy, dy_before = dy_before, dy
                    mu, mu_before = mu_before, mu
                    rs, rs_before = rs_before, rs
                if CLUSTER:
                    sum_g, sum_gx = warp_sums.sums_of_all(told, turns, ROWS, PARTS, WARPS)
                    turns += 1
                elif SLOTS:
                    places, given = slots_of(slots, rows, M, PARTS, PADDED_PARTS, 2 if EXACT else 1)
                    if EXACT:
                        all_g, all_gx = collect_wide(places, given, PHASE == WHOLE)
                    else:
                        all_g, all_gx = collect(places, given, PHASE == WHOLE)
                if SLOTS:
                    mean_g = tl.sum(all_g, axis=1) * per_row
                    mean_gx = tl.sum(all_gx, axis=1) * per_row
                    if not EXACT:
                        mean_g = high(mean_g)
                        mean_gx = high(mean_gx)
                else:
                    mean_g = sum_g.to(tl.float64) * per_row
                    mean_gx = sum_gx.to(tl.float64) * per_row
                if SLOTS:
                    mean_g = settled(mean_g, ROWS)
                    mean_gx = settled(mean_gx, ROWS)
                if CLUSTER:
                    mean_g = warp_sums.over_columns(mean_g, COLUMNS, WIDTH)
                    mean_gx = warp_sums.over_columns(mean_gx, COLUMNS, WIDTH)
                else:
                    mean_g, mean_gx = mean_g[:, None], mean_gx[:, None]
                g, values = wider(dy, PAIRS, EXACT), wider(x, PAIRS, EXACT)
                result = gradient(g, values, mu[:, None], rs[:, None], scale, mean_g, mean_gx)
                target = tile_at(
                    grad_input, written, done, part, row_grid, grad_input_strides, ROWS, WORDS, VECTOR, WIDE
                )
                put_numbers(target, result, row_mask(known, word_in_row, MASKED), (ROWS, WORDS, 2), PAIRS)
    if PHASE != OUTPUTS:
        line = partial + int64(team) * N + columns
        if WANT_WEIGHT:
            tl.store(line, weight_sum, mask=columns < N)
            line += int64(teams) * N
        if WANT_BIAS:
            tl.store(line, bias_sum, mask=columns < N)
