"""LayerNorm's forward pass: teams of programs as in the backward pass."""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.common import (
    OUTPUTS,
    SINGLE,
    SUMS,
    WHOLE,
    collect_wide,
    divided,
    float64,
    float64_of_bits,
    high,
    indices,
    numbers,
    publish_wide,
    put,
    put_numbers,
    settled,
    wait_for_launch_before,
)
from normgrad.cuda.kernels.formulas import away_from, normalised
from normgrad.cuda.kernels.layer_norm_tiles import first_of, of_columns, offsets_in, row_mask, slots_of, unpacked


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
    EXACT: tl.constexpr,  # all is computed as float64, for an eps beside which the smallest squares count
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
    read = offsets_in(input_row, input_column, ROWS, WORDS, WIDE)
    written = offsets_in(output_row, output_column, ROWS, WORDS, WIDE)
    eps = float64_of_bits(eps_bits)
    whole = float64(N)
    per_row = 1.0 / whole
    count = float64(tl.minimum(N - part * COLUMNS, COLUMNS))
    per_part = 1.0 / count
    parts = tl.arange(0, PADDED_PARTS)
    counts = tl.maximum(tl.minimum(N - parts * COLUMNS, COLUMNS), 0).to(tl.float64)[None, :]
    if weight is not None:
        scale = of_columns(weight, part, N, COLUMNS)
    if bias is not None:
        shift = of_columns(bias, part, N, COLUMNS)
    if LAG:
        x_before = tl.zeros((ROWS, WORDS), input.dtype.element_ty)
        wait_for_launch_before()
    for tile in tl.range(team, tl.cdiv(M, ROWS) + LAG * teams, teams, num_stages=STAGES):
        done = tile - LAG * teams
        rows = indices(tile, ROWS)
        mask = row_mask(rows < M, word_in_row, MASKED)
        x = tl.load(first_of(input, tile, part, input_row, input_column, ROWS, WORDS) + read, mask=mask, other=0)
        if PHASE != OUTPUTS:
            # In float64, since the output near the mean is only as precise as the mean is.
            values = numbers(x, PAIRS)
            if EXACT:
                values = values.to(tl.float64)
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
                places, given = slots_of(slots, rows, M, PARTS, PADDED_PARTS, 2)
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
                factor = unpacked(scale, PAIRS)
            if bias is not None:
                term = unpacked(shift, PAIRS)
            values = numbers(x, PAIRS)
            if EXACT:
                result = normalised(values.to(tl.float64), centre[:, None], inverse[:, None], factor, term)
                result = result.to(tl.float32)
            else:
                result = normalised(values, centre[:, None], inverse[:, None], factor, term)
            target = first_of(output, done, part, output_row, output_column, ROWS, WORDS)
            put_numbers(target + written, result, row_mask(known, word_in_row, MASKED), (ROWS, WORDS, 2), PAIRS)
            first = known & (part == 0)
            if mean is not None:
                put(mean + rows * mean_stride, high(centre), first)
            if rstd is not None:
                put(rstd + rows * rstd_stride, high(inverse), first)
