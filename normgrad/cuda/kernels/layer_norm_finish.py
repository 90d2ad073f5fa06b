"""What is left of LayerNorm backward when all rows have been walked over: the teams' sums, and what is near zero.

Float32 products near zero are rounded as subnormals, and results then miss their bound. Rows and columns of which that
may be are computed once more, in float64 and element by element: they are rare, and this need not be fast.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.common import float64, indices, int64, wait_for_launch_before, wide
from normgrad.cuda.kernels.memory import put_sums, sums_over
from normgrad.cuda.kernels.near_zero import NEAR_ZERO, any_of, is_above_zero_below, put_float64

_CHUNK = tl.constexpr(512)
# Half of what makes a row doubtful, so that every row below it is in a team that was found to have one.
_SMALL = tl.constexpr(2.0**-91)


@triton.jit
def _as_float64(pointers, mask):
    return wide(tl.load(pointers, mask=mask, other=0.0)).to(tl.float64)


@triton.jit
def _at(pointer, rows, columns, strides):
    """Where numbers lie."""
    return pointer + rows * strides[0] + columns * strides[1]


@triton.jit
def _terms(grad_out, input, weight, mu, rs, row, columns, N, grad_out_strides, input_strides):
    """``g`` and ``x̂`` of a few columns of a row."""
    inside = columns < N
    g = _as_float64(_at(grad_out, row, columns, grad_out_strides), inside)
    x_hat = tl.where(inside, (_as_float64(_at(input, row, columns, input_strides), inside) - mu) * rs, 0.0)
    if weight is not None:
        g *= _as_float64(weight + columns, inside)
    return g, x_hat


@triton.jit
def _row(grad_out, input, mean, rstd, weight, grad_input, row, N, grad_out_strides, input_strides, grad_input_strides):
    """The gradient of a row, if it is near zero."""
    mu = wide(tl.load(mean + row)).to(tl.float64)
    rs = wide(tl.load(rstd + row)).to(tl.float64)
    sum_g = tl.zeros((_CHUNK,), tl.float64)
    sum_gx = tl.zeros((_CHUNK,), tl.float64)
    sizes = tl.zeros((_CHUNK,), tl.float64)
    for chunk in range(tl.cdiv(N, _CHUNK)):
        columns = indices(chunk, _CHUNK)
        g, x_hat = _terms(grad_out, input, weight, mu, rs, row, columns, N, grad_out_strides, input_strides)
        sum_g += g
        sum_gx += g * x_hat
        sizes += tl.abs(g)
    share = tl.minimum(tl.abs(rs), 1.0) / float64(N)
    is_small = is_above_zero_below(tl.sum(sizes, axis=0) * share, _SMALL)
    mean_g = tl.sum(sum_g, axis=0) / float64(N)
    mean_gx = tl.sum(sum_gx, axis=0) / float64(N)
    chunks = tl.where(is_small, tl.cdiv(N, _CHUNK), 0)
    for chunk in range(chunks):
        columns = indices(chunk, _CHUNK)
        g, x_hat = _terms(grad_out, input, weight, mu, rs, row, columns, N, grad_out_strides, input_strides)
        result = rs * (g - mean_g - x_hat * mean_gx)
        put_float64(_at(grad_input, row, columns, grad_input_strides), result, columns < N)


@triton.jit
def layer_norm_finish(
    first,  # [N]: the weight's gradient, or the bias's where that is not wanted; None where neither is
    second,  # [N], or None
    partial,  # float32 or float64 [wanted, K, N]; where products are ROUNDED [2, K, N]
    grad_out,  # [M, N]
    input,  # [M, N]
    mean,  # [M]
    rstd,  # [M]
    weight,  # [N], or None
    grad_input,  # [M, N], or None
    doubtful,  # int32 [K, PARTS]: programs of teams with rows near zero; or None
    first_stride,
    second_stride,
    K,
    M,
    N,
    grad_out_strides,  # of row and column
    input_strides,
    grad_input_strides,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # of the tiles that the teams have walked over
    TEAMS: tl.constexpr,  # how many of these a program looks after
    PARTS: tl.constexpr,  # the programs of a team
    PADDED_PARTS: tl.constexpr,
    ROUNDED: tl.constexpr,  # the first is the weight's gradient, of rounded products
):
    """The sums over the teams in float64, in their order, and once more what rows and columns are near zero."""
    wait_for_launch_before()
    which = tl.program_id(1)
    programs = tl.num_programs(0) * tl.num_programs(1)
    program = which * tl.num_programs(0) + tl.program_id(0)
    if doubtful is not None:  # early, since the answer takes as long as the sums do
        parts = tl.arange(0, PADDED_PARTS)
        teams = program + tl.arange(0, TEAMS) * programs
        of_teams = (teams < K)[:, None] & (parts < PARTS)[None, :]
        flags = tl.load(doubtful + teams[:, None] * PARTS + parts[None, :], mask=of_teams, other=0)
    if first is not None:
        columns = indices(tl.program_id(0), COLUMNS)
        inside = columns < N
        result = sums_over(partial + which.to(tl.int64) * K * N, 0, K, columns, N, ROWS, COLUMNS)
        if ROUNDED:
            small = (tl.abs(result) < NEAR_ZERO) & (inside & (which == 0))
            if any_of(small):  # unless there are but zeros to be summed up
                some = tl.zeros((ROWS, COLUMNS), tl.int1)
                for start in range(0, K, ROWS):
                    rows = start + tl.arange(0, ROWS)
                    mask = (rows < K)[:, None] & small[None, :]
                    place = (K + rows.to(tl.int64))[:, None] * N + columns[None, :]
                    some = some | (tl.load(partial + place, mask=mask, other=0.0) != 0.0)
                small = small & ((result != 0.0) | (tl.max(some.to(tl.int32), axis=0) != 0))
            if any_of(small):
                total = tl.zeros((ROWS, COLUMNS), tl.float64)
                for block in range(tl.cdiv(M, ROWS)):
                    rows = indices(block, ROWS)
                    mask = (rows < M)[:, None] & small[None, :]
                    dy = _as_float64(_at(grad_out, rows[:, None], columns[None, :], grad_out_strides), mask)
                    x = _as_float64(_at(input, rows[:, None], columns[None, :], input_strides), mask)
                    mu, rs = _as_float64(mean + rows, rows < M), _as_float64(rstd + rows, rows < M)
                    total += dy * ((x - mu[:, None]) * rs[:, None])
                result = tl.where(small, tl.sum(total, axis=0), result)
        put_sums(first, second, which, columns, result, first_stride, second_stride, inside)
    if doubtful is not None:  # noqa: SIM102 - one is known at compile time
        if tl.max(flags) != 0:
            for team in range(program, K, programs):
                of_team = tl.load(doubtful + team * PARTS + parts, mask=parts < PARTS, other=0)
                tiles = tl.where(any_of(of_team), tl.cdiv(M, TILE_ROWS), 0)
                for tile in range(team, tiles, K):
                    for row in range(tile * TILE_ROWS, tl.minimum(tile * TILE_ROWS + TILE_ROWS, M)):
                        _row(
                            grad_out,
                            input,
                            mean,
                            rstd,
                            weight,
                            grad_input,
                            int64(row),
                            N,
                            grad_out_strides,
                            input_strides,
                            grad_input_strides,
                        )
