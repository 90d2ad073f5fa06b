"""LayerNorm backward.

Teams of PARTS programs walk over the rows together, ROWS at a time; every program keeps its COLUMNS of them in
registers, so that the data is read once. Row sums go through the shared memory of a cluster, or through slots in the
GPU's memory; a program alone with its rows needs neither.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels import warp_sums
from normgrad.cuda.kernels.common import (
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
    kept,
    lane_zero,
    let_next_launch_begin,
    look,
    look_again,
    offsets_in,
    publish,
    publish_wide,
    settled,
    sum_pair,
    two_of,
    wait_for_launch_before,
    wide,
)
from normgrad.cuda.kernels.formulas import gradient, precise, wider
from normgrad.cuda.kernels.layer_norm_tiles import (
    first_of,
    known_multiple,
    part_of_team,
    row_mask,
    rows_of,
    slots_of,
    times,
)
from normgrad.cuda.kernels.near_zero import NEAR_ZERO, any_of, are_zeros, marked, next_turn, put_results


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
    tile,
    part,
    M,
    word_in_row,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    VECTOR: tl.constexpr,
    MASKED: tl.constexpr,
    AHEAD: tl.constexpr,  # into registers, where they are needed a turn later
):
    """A tile of the input and of its gradients, and its rows' statistics."""
    rows = indices(tile, ROWS)
    mask = row_mask(rows < M, word_in_row, MASKED)
    x = tl.load(first_of(tensors[0], tile, part, strides[0], ROWS, WORDS, VECTOR) + offsets[0], mask=mask, other=0)
    dy = tl.load(first_of(tensors[1], tile, part, strides[1], ROWS, WORDS, VECTOR) + offsets[1], mask=mask, other=0)
    if AHEAD:  # a register of the whole warp would have them at once, and the warp would wait for them
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
    doubtful,  # int32 [teams, PARTS]: there is a row so small that a subnormal's rounding counts; None where none does
    slots,  # int64 [M, PARTS], or of EXACT sums [M, PARTS, 2]
    M,
    N,
    teams,
    grad_out_strides,  # of row, in vectors, and column
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
    LATER: tl.constexpr,  # turns from a tile's sums to its results, where programs wait for each other: 1 or 2
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
    LAG: tl.constexpr = LATER if (WANT_INPUT and SLOTS) and PHASE == WHOLE else 0
    WORDS: tl.constexpr = COLUMNS if PAIRS == SINGLE else COLUMNS // 2
    # Equal numbers that a thread adds up one by one may be rounded the same way each time.
    MANY_ROWS: tl.constexpr = ROWS >= 32 and input.dtype.element_ty != tl.float32
    N = known_multiple(N, VECTOR, PAIRS)
    input_strides = times(input_strides, VECTOR, WIDE)
    grad_out_strides = times(grad_out_strides, VECTOR, WIDE)
    grad_input_strides = times(grad_input_strides, VECTOR, WIDE)
    team, part, columns, in_row, word_in_row = part_of_team(N, COLUMNS, PARTS, PAIRS)
    per_row = 1.0 / float64(N)
    tiles = tl.cdiv(M, ROWS)
    tensors = (input, grad_out, mean, rstd)
    strides = (input_strides, grad_out_strides)
    offsets = (offsets_in(input_strides, ROWS, WORDS, WIDE), offsets_in(grad_out_strides, ROWS, WORDS, WIDE))
    written = offsets_in(grad_input_strides, ROWS, WORDS, WIDE)
    weight_sum = tl.zeros((COLUMNS,), tl.float64)
    bias_sum = tl.zeros((COLUMNS,), tl.float64)
    WIDTH: tl.constexpr = 32 * VECTOR * (1 if PAIRS == SINGLE else 2)  # columns that a cluster's warp has side by side
    small_rows = tl.zeros((ROWS, WARPS, 32) if CLUSTER else (ROWS,), tl.uint32)
    turn = tl.full((), 1, tl.uint32)
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
            tensors, offsets, strides, team, part, M, word_in_row, ROWS, WORDS, VECTOR, MASKED, True
        )
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
            places, given = slots_of(slots, indices(done, ROWS), M, PARTS, PADDED_PARTS, 1)
            seen = look(places, given)
        ahead = tile + teams if PREFETCH else tile
        x, dy, mu, rs = _loaded(
            tensors, offsets, strides, ahead, part, M, word_in_row, ROWS, WORDS, VECTOR, MASKED, PREFETCH
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
                if LAG == 2:
                    x, x_earlier = x_earlier, kept(x)
                    dy, dy_earlier = dy_earlier, kept(dy)
                    mu, mu_earlier = mu_earlier, kept(mu)
                    rs, rs_earlier = rs_earlier, kept(rs)
                    all_g, all_gx = two_of(look_again(seen, places))
                elif CLUSTER:
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
                if doubtful is not None:
                    size, share, there = tl.abs(high(mean_g)), tl.minimum(tl.abs(rs), 1.0), known
                    if CLUSTER:  # every thread has marks of its own, as it has the sums
                        size, share, there = size[:, :, None], share[:, None, None], there[:, None, None]
                    small = tl.broadcast_to((size * share < NEAR_ZERO) & there, small_rows.shape)
                    small_rows = marked(small_rows, small, turn)
                    turn = next_turn(turn)
                if CLUSTER:
                    mean_g = warp_sums.over_columns(mean_g, COLUMNS, WIDTH)
                    mean_gx = warp_sums.over_columns(mean_gx, COLUMNS, WIDTH)
                else:
                    mean_g, mean_gx = mean_g[:, None], mean_gx[:, None]
                g, values = wider(dy, PAIRS, EXACT), wider(x, PAIRS, EXACT)
                result = gradient(g, values, mu[:, None], rs[:, None], scale, mean_g, mean_gx)
                target = first_of(grad_input, done, part, grad_input_strides, ROWS, WORDS, VECTOR)
                mask = row_mask(known, word_in_row, MASKED)
                put_results(target + written, result, mask, (ROWS, WORDS, 2), PAIRS)
    if doubtful is not None:
        some = 0
        if CLUSTER:
            small_rows = tl.max(tl.max(small_rows, axis=2), axis=1)
        if any_of(small_rows != 0):
            turn = tl.full((), 1 << LAG, tl.uint32)
            for tile in range(team, tiles, teams):
                rows = indices(tile, ROWS)
                small = (small_rows & turn != 0) & (rows < M)
                turn = next_turn(turn)
                if any_of(small):  # gradients that are 0 are right as they are
                    first = first_of(grad_out, tile, part, grad_out_strides, ROWS, WORDS, VECTOR)
                    dy = tl.load(first + offsets[1], mask=row_mask(small, word_in_row, MASKED), other=0)
                    some |= any_of(~are_zeros(dy)).to(tl.int32)
        tl.store(doubtful + tl.program_id(0), some)
    if PHASE != OUTPUTS:
        line = partial + int64(team) * N + columns
        if WANT_WEIGHT:
            tl.store(line, weight_sum, mask=columns < N)
            line += int64(teams) * N
        if WANT_BIAS:
            tl.store(line, bias_sum, mask=columns < N)
