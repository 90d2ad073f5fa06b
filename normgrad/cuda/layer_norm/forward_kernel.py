"""LayerNorm's forward pass: teams of programs as in the backward pass."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.clusters import open_slots, tell, told_by, wait_for_all
from normgrad.cuda.device.common import (
    OUTPUTS,
    SINGLE,
    SUMS,
    WHOLE,
    collect_wide,
    divided,
    float64,
    float64_of_bits,
    indices,
    numbers,
    publish_wide,
    put,
    put_numbers,
    settled,
    wait_for_launch_before,
)
from normgrad.cuda.device.formulas import near_and_rest, normalised
from normgrad.cuda.layer_norm.addressing import (
    known_multiple,
    of_columns,
    offsets_within,
    part_of_team,
    row_mask,
    rows_of,
    scaled_strides,
    slots_of,
    tile_at,
    unpacked,
)


@triton.jit
def _of_parts(slots, rows, M, counts, whole, per_row, PARTS: tl.constexpr, PADDED: tl.constexpr, WAIT: tl.constexpr):
    """The means of rows and the sums of their squares about them, from those of their parts."""
    places, given = slots_of(slots, rows, M, PARTS, PADDED, 2)
    sums, all_squares = collect_wide(places, given, WAIT)
    centre = divided(tl.sum(sums, axis=1), whole, per_row)
    between = sums - centre[:, None] * counts
    return centre, tl.sum(tl.where(given, all_squares + between * between * (1.0 / counts), 0.0), axis=1)


@triton.jit
def _of_cluster(places, N, per_row, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """As ``_of_parts``, from what the programs of a cluster have told; all but the last have COLUMNS."""
    count = float64(N - (PARTS - 1) * COLUMNS)
    total, squares = told_by(PARTS - 1, places)
    sums = total
    for part in tl.static_range(PARTS - 1):
        one, more = told_by(part, places)
        sums += one
        squares += more
    centre = divided(sums, float64(N), per_row)
    between = total - centre * count
    squares += between * between * (1.0 / count)
    for part in tl.static_range(PARTS - 1):
        one, _ = told_by(part, places)
        between = one - centre * COLUMNS
        squares += between * between * (1.0 / COLUMNS)
    return centre, squares


@triton.jit
def row_sums(squares, FOLD: tl.constexpr, PAIRS: tl.constexpr):
    """Sums of rows in float64, of a thread's numbers up to eight as float32: there an outlier's square meets few."""
    ROWS: tl.constexpr = squares.shape[0]
    COLUMNS: tl.constexpr = squares.shape[1]
    if FOLD == 1:
        result = tl.sum(squares, axis=1).to(tl.float64)
    else:
        few = tl.sum(tl.reshape(squares, (ROWS, FOLD, COLUMNS // FOLD)), axis=1)
        if PAIRS != SINGLE:
            few = tl.sum(tl.reshape(few, (ROWS, COLUMNS // FOLD // 2, 2)), axis=2)
        result = tl.sum(few.to(tl.float64), axis=1)
    return result


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
    row_grid,  # sizes of the outer dimensions that cannot be merged into one, the last fastest: M is their product
    input_strides,  # of each of these, in vectors, and of columns
    output_strides,
    mean_stride,
    rstd_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    PREFETCH: tl.constexpr,  # load the next rows before the sums of these are known, into registers
    STAGES: tl.constexpr,
    CLUSTER: tl.constexpr,
    FOLD: tl.constexpr,  # stretches of a program's columns that are added up first; 1 where a thread has few
    PAIRS: tl.constexpr,
    EXACT: tl.constexpr,  # all is float64, for an eps so small that squares below float32's range decide about rstd
    PHASE: tl.constexpr,
):
    """The normalised rows of a team and their statistics."""
    SLOTS: tl.constexpr = PARTS > 1 and not CLUSTER
    LAG: tl.constexpr = 1 if SLOTS and PHASE == WHOLE else 0
    WORDS: tl.constexpr = COLUMNS if PAIRS == SINGLE else COLUMNS // 2
    N = known_multiple(N, VECTOR, PAIRS)
    input_strides = scaled_strides(input_strides, row_grid, VECTOR, WIDE)
    output_strides = scaled_strides(output_strides, row_grid, VECTOR, WIDE)
    team, part, _, in_row, word_in_row = part_of_team(N, COLUMNS, PARTS, PAIRS)
    read = offsets_within(row_grid, input_strides, ROWS, WORDS, WIDE)
    written = offsets_within(row_grid, output_strides, ROWS, WORDS, WIDE)
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
    if CLUSTER:
        told = open_slots()
        turns = 0
    if PREFETCH:
        mask = row_mask(indices(team, ROWS) < M, word_in_row, MASKED)
        x_at = tile_at(input, read, team, part, row_grid, input_strides, ROWS, WORDS, VECTOR, WIDE)
        next_x = tl.load(x_at, mask=mask, other=0)
    for tile in tl.range(team, tl.cdiv(M, ROWS) + LAG * teams, teams, num_stages=STAGES):
        done = tile - LAG * teams
        ahead = tile + teams if PREFETCH else tile
        mask = row_mask(indices(ahead, ROWS) < M, word_in_row, MASKED)
        x_at = tile_at(input, read, ahead, part, row_grid, input_strides, ROWS, WORDS, VECTOR, WIDE)
        x = tl.load(x_at, mask=mask, other=0)
        if PREFETCH:
            x, next_x = next_x, x
        rows = indices(tile, ROWS)
        if PHASE != OUTPUTS:
            # In float64, since the output near the mean is only as precise as the mean is.
            values = numbers(x, PAIRS)
            if EXACT:
                values = values.to(tl.float64)
            total = tl.sum(values.to(tl.float64), axis=1)
            centre = divided(total, count, per_part)
            number, rest = near_and_rest(centre, values.dtype)
            away = values - number[:, None]
            if MASKED:
                away = tl.where(in_row, away, 0.0)
            squares = row_sums(away * away, FOLD, PAIRS)
            if FOLD > 1 and not SLOTS:
                squares = settled(squares, ROWS)
            squares -= rest * rest * count
            if CLUSTER:
                tell(total, squares, told, part, turns, ROWS, PARTS)
            elif SLOTS:
                publish_wide(total, squares, slots + (rows * PARTS + part) * 2, rows < M)
        if PHASE != SUMS:
            rows, known = rows_of(done, M, ROWS, LAG)
            if LAG:
                x, x_before = x_before, x
            if CLUSTER:
                centre, squares = _of_cluster(wait_for_all(told, turns, ROWS, PARTS), N, per_row, COLUMNS, PARTS)
                turns += 1
            elif SLOTS:
                centre, squares = _of_parts(slots, rows, M, counts, whole, per_row, PARTS, PADDED_PARTS, PHASE == WHOLE)
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
                values = values.to(tl.float64)
            result = normalised(values, centre[:, None], inverse[:, None], factor, term)
            target = tile_at(output, written, done, part, row_grid, output_strides, ROWS, WORDS, VECTOR, WIDE)
            put_numbers(target, result, row_mask(known, word_in_row, MASKED), (ROWS, WORDS, 2), PAIRS)
            first = known & (part == 0)
            if mean is not None:
                put(mean + rows * mean_stride, centre, first)
            if rstd is not None:
                put(rstd + rows * rstd_stride, inverse, first)
