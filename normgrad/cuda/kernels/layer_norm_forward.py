"""LayerNorm's forward pass: teams of programs as in the backward pass."""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.clusters import open_slots, tell, told_by, wait_for_all
from normgrad.cuda.kernels.common import (
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
    offsets_in,
    publish_wide,
    settled,
    wait_for_launch_before,
)
from normgrad.cuda.kernels.formulas import near_and_rest, normalised
from normgrad.cuda.kernels.layer_norm_tiles import (
    first_of,
    known_multiple,
    of_columns,
    part_of_team,
    row_mask,
    rows_of,
    slots_of,
    times,
    unpacked,
)
from normgrad.cuda.kernels.near_zero import (
    NEAR_MEAN,
    any_of,
    marked,
    mean_size,
    next_turn,
    put_float64,
    put_results,
)

# Half of what marks a row, so that every row below it was marked, whatever other rows there are.
_NEARER = tl.constexpr(2.0**-61)


@triton.jit
def _some_columns(
    input,
    rows,
    tile,
    place,
    N,
    strides,
    FEW: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """A few columns of some rows of a tile in float64, and which of their words there are."""
    ROWS: tl.constexpr = rows.shape[0]
    WORDS: tl.constexpr = FEW if PAIRS == SINGLE else FEW // 2
    mask = rows[:, None] & (indices(place, WORDS) < (N if PAIRS == SINGLE else N // 2))[None, :]
    source = first_of(input, tile, place, strides, ROWS, WORDS, VECTOR)
    x = tl.load(source + offsets_in(strides, ROWS, WORDS, WIDE), mask=mask, other=0)
    return numbers(x, PAIRS).to(tl.float64), mask


@triton.jit
def _statistics(
    input,
    rows,
    tile,
    chunks,
    N,
    strides,
    FEW: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The means of some rows of a tile and the sums of their squares about them, in float64."""
    total = tl.zeros((rows.shape[0], FEW), tl.float64)
    for chunk in range(chunks):
        values, _ = _some_columns(input, rows, tile, chunk, N, strides, FEW, VECTOR, WIDE, PAIRS)
        total += values
    centre = tl.sum(total, axis=1) / float64(N)
    squares = tl.zeros((rows.shape[0], FEW), tl.float64)
    for chunk in range(chunks):
        values, _ = _some_columns(input, rows, tile, chunk, N, strides, FEW, VECTOR, WIDE, PAIRS)
        away = tl.where((indices(chunk, FEW) < N)[None, :], values - centre[:, None], 0.0)
        squares += away * away
    return centre, tl.sum(squares, axis=1)


@triton.jit
def _once_more(
    rows,
    centre,
    inverse,
    input,
    weight,
    bias,
    output,
    tile,
    part,
    N,
    input_strides,
    output_strides,
    CHUNKS: tl.constexpr,
    FEW: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Some rows of a tile by way of float64, a few columns at a time."""
    ROWS: tl.constexpr = rows.shape[0]
    WORDS: tl.constexpr = FEW if PAIRS == SINGLE else FEW // 2
    written = offsets_in(output_strides, ROWS, WORDS, WIDE)
    for chunk in range(CHUNKS):
        place = part * CHUNKS + chunk
        values, mask = _some_columns(input, rows, tile, place, N, input_strides, FEW, VECTOR, WIDE, PAIRS)
        factor, term = None, None
        if weight is not None:
            factor = unpacked(of_columns(weight, place, N, FEW), PAIRS)
        if bias is not None:
            term = unpacked(of_columns(bias, place, N, FEW), PAIRS)
        result = normalised(values, centre[:, None], inverse[:, None], factor, term)
        target = first_of(output, tile, place, output_strides, ROWS, WORDS, VECTOR)
        put_results(target + written, result, mask, (ROWS, WORDS, 2), PAIRS)


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
    input_strides,  # of row, in vectors, and column
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
    EXACT: tl.constexpr,  # all is computed as float64, for an eps beside which the smallest squares count
    PHASE: tl.constexpr,
):
    """The normalised rows of a team and their statistics."""
    SLOTS: tl.constexpr = PARTS > 1 and not CLUSTER
    LAG: tl.constexpr = 1 if SLOTS and PHASE == WHOLE else 0
    WORDS: tl.constexpr = COLUMNS if PAIRS == SINGLE else COLUMNS // 2
    CAREFUL: tl.constexpr = not EXACT and input.dtype.element_ty == tl.float32
    N = known_multiple(N, VECTOR, PAIRS)
    input_strides = times(input_strides, VECTOR, WIDE)
    output_strides = times(output_strides, VECTOR, WIDE)
    team, part, _, in_row, word_in_row = part_of_team(N, COLUMNS, PARTS, PAIRS)
    read = offsets_in(input_strides, ROWS, WORDS, WIDE)
    written = offsets_in(output_strides, ROWS, WORDS, WIDE)
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
    nearest = tl.full((ROWS,), float("inf"), tl.float32)
    near_rows = tl.zeros((ROWS,), tl.uint32)
    turn = tl.full((), 1, tl.uint32)
    if PREFETCH:
        mask = row_mask(indices(team, ROWS) < M, word_in_row, MASKED)
        next_x = tl.load(first_of(input, team, part, input_strides, ROWS, WORDS, VECTOR) + read, mask=mask, other=0)
    for tile in tl.range(team, tl.cdiv(M, ROWS) + LAG * teams, teams, num_stages=STAGES):
        done = tile - LAG * teams
        ahead = tile + teams if PREFETCH else tile
        mask = row_mask(indices(ahead, ROWS) < M, word_in_row, MASKED)
        x = tl.load(first_of(input, ahead, part, input_strides, ROWS, WORDS, VECTOR) + read, mask=mask, other=0)
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
            if CAREFUL:
                size = mean_size(centre, inverse)
                if SLOTS:  # what is cheaper beside the waiting
                    nearest = tl.where((size < nearest) & known, size, nearest)
                else:
                    near_rows = marked(near_rows, (size < NEAR_MEAN) & known, turn)
                    turn = next_turn(turn)
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
            target = first_of(output, done, part, output_strides, ROWS, WORDS, VECTOR)
            put_results(target + written, result, row_mask(known, word_in_row, MASKED), (ROWS, WORDS, 2), PAIRS)
            first = known & (part == 0)
            if mean is not None:
                put_float64(mean + rows * mean_stride, centre, first)
            if rstd is not None:
                put_float64(rstd + rows * rstd_stride, inverse, first)
    if CAREFUL and PHASE != SUMS:
        CHUNKS: tl.constexpr = 8 if COLUMNS >= 256 else 1
        FEW: tl.constexpr = COLUMNS // CHUNKS
        if any_of(nearest < NEAR_MEAN if SLOTS else near_rows != 0):
            tl.debug_barrier()  # what is written once more must be what stays
            turn = tl.full((), 1, tl.uint32)
            for tile in range(team, tl.cdiv(M, ROWS), teams):
                rows = indices(tile, ROWS)
                near = rows < M
                if not SLOTS:
                    near = near & (near_rows & turn != 0)
                    turn = next_turn(turn)
                if any_of(near):
                    if SLOTS:
                        centre, squares = _of_parts(
                            slots, rows, M, counts, whole, per_row, PARTS, PADDED_PARTS, PHASE == WHOLE
                        )
                    else:
                        chunks = PARTS * CHUNKS
                        centre, squares = _statistics(
                            input, near, tile, chunks, N, input_strides, FEW, VECTOR, WIDE, PAIRS
                        )
                        near = near & ((centre != 0.0) | (squares != 0.0))  # zeros are right as they are
                    inverse = 1.0 / tl.sqrt(squares * per_row + eps)
                    near = near & (mean_size(centre, inverse) < _NEARER)
                    tensors = (input, weight, bias, output)
                    strides = (input_strides, output_strides)
                    if any_of(near):
                        _once_more(
                            near, centre, inverse, *tensors, tile, part, N, *strides, CHUNKS, FEW, VECTOR, WIDE, PAIRS
                        )
