"""GroupNorm where the channels and places of a group lie side by side: a group of a sample is a row.

Teams of PARTS programs stay with a group and walk over the samples together, ROWS at a time, as LayerNorm's do; so the
weights of a row's columns are loaded once, and their gradients are summed up column by column. Rows begin at even
addresses where channels of an odd number of places do not.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.common import (
    OUTPUTS,
    SINGLE,
    SUMS,
    WHOLE,
    collect,
    collect_wide,
    divided,
    float64,
    float64_of_bits,
    indices,
    int64,
    let_next_launch_begin,
    offsets_in,
    publish,
    publish_wide,
    put,
    put_numbers,
    settled,
    sum_pair,
    wait_for_launch_before,
    wide,
)
from normgrad.cuda.device.formulas import gradient, near_and_rest, normalised, precise, wider
from normgrad.cuda.helper_kernels import put_sums
from normgrad.cuda.layer_norm.addressing import first_of, known_multiple, part_of_team, row_mask, rows_of, times
from normgrad.cuda.layer_norm.backward_kernel import over_rows
from normgrad.cuda.layer_norm.forward_kernel import row_sums


@triton.jit
def _channels_of(part, HxW, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """The channels that a part's columns belong to, of those of the group."""
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    if WIDE:
        columns = indices(part, COLUMNS)
    return columns // HxW


@triton.jit
def _weights(pointer, first_channel, channels, in_row):
    """The weights of the channels of a group's columns, in float32."""
    return wide(tl.load(pointer + first_channel + channels, mask=in_row, other=0.0))[None, :]


@triton.jit
def group_norm_flat_backward(
    grad_out,  # [samples, group, D·HxW]
    input,  # [samples, group, D·HxW]
    mean,  # [samples, group]
    rstd,  # [samples, group]
    weight,  # [group·D], or None
    grad_input,  # [samples, group, D·HxW], or None
    partial,  # float32 or, of EXACT sums, float64 [wanted, teams, group, D·HxW]: the columns' sums of each team
    slots,  # int64 [samples, group, PARTS], or of EXACT sums [samples, group, PARTS, 2]
    samples,
    group,
    HxW,
    N,  # columns of a row: D·HxW
    groups_at_once,  # as many groups have teams at a time
    teams,  # of a group
    grad_out_strides,  # of sample, in vectors, and column
    input_strides,
    grad_input_strides,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    MASKED: tl.constexpr,  # COLUMNS·PARTS is more than a row has
    WIDE: tl.constexpr,  # offsets in a tile need 64 bits
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,  # the sums are made of float64
    VECTOR: tl.constexpr,  # what divides the strides of samples and, in words, the columns
    PAIRS: tl.constexpr,  # how 16-bit data comes
    WANT_INPUT: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    PHASE: tl.constexpr,
):
    """The gradients of a team's rows, and the sums over them that the weight's gradients are made of."""
    LAG: tl.constexpr = 1 if (WANT_INPUT and PARTS > 1) and PHASE == WHOLE else 0
    # Equal numbers that a thread adds up one by one may be rounded the same way each time.
    MANY_ROWS: tl.constexpr = ROWS >= 32
    WORDS: tl.constexpr = COLUMNS if PAIRS == SINGLE else COLUMNS // 2
    N = known_multiple(N, VECTOR, PAIRS)
    row_words = N // (COLUMNS // WORDS)
    crew, part, columns, in_row, word_in_row = part_of_team(N, COLUMNS, PARTS, PAIRS)
    team = crew // groups_at_once
    channels = _channels_of(part, HxW, COLUMNS, WIDE)
    per_row = 1.0 / float64(N)
    tiles = tl.cdiv(samples, ROWS)
    input_strides = times(input_strides, VECTOR, WIDE)
    grad_out_strides = times(grad_out_strides, VECTOR, WIDE)
    grad_input_strides = times(grad_input_strides, VECTOR, WIDE)
    read_x = offsets_in(input_strides, ROWS, WORDS, WIDE)
    read_dy = offsets_in(grad_out_strides, ROWS, WORDS, WIDE)
    written = offsets_in(grad_input_strides, ROWS, WORDS, WIDE)
    for of_group in range(crew % groups_at_once, group, groups_at_once):
        begin = int64(of_group) * row_words
        weight_sum = tl.zeros((COLUMNS,), tl.float64)
        bias_sum = tl.zeros((COLUMNS,), tl.float64)
        scale = None
        if weight is not None:
            scale = _weights(weight, int64(of_group) * D, channels, columns < N)
        if LAG:
            x_before = tl.zeros((ROWS, WORDS), input.dtype.element_ty)
            dy_before = tl.zeros((ROWS, WORDS), grad_out.dtype.element_ty)
            mu_before = tl.zeros((ROWS,), tl.float32)
            rs_before = tl.zeros((ROWS,), tl.float32)
            wait_for_launch_before()
        for tile in tl.range(team, tiles + LAG * teams, teams, num_stages=STAGES):
            done = tile - LAG * teams
            rows = indices(tile, ROWS)
            mask = row_mask(rows < samples, word_in_row, MASKED)
            x = tl.load(
                first_of(input + begin, tile, part, input_strides, ROWS, WORDS, VECTOR) + read_x, mask=mask, other=0
            )
            dy_at = first_of(grad_out + begin, tile, part, grad_out_strides, ROWS, WORDS, VECTOR)
            dy = tl.load(dy_at + read_dy, mask=mask, other=0)
            mu = wide(tl.load(mean + rows * group + of_group, mask=rows < samples, other=0.0))
            rs = wide(tl.load(rstd + rows * group + of_group, mask=rows < samples, other=0.0))
            if PHASE != OUTPUTS:
                g = wider(dy, PAIRS, EXACT)
                x_hat = (wider(x, PAIRS, EXACT) - mu[:, None]) * rs[:, None]
                if MASKED:
                    x_hat = tl.where(in_row, x_hat, 0.0)  # 0·Inf must not reach the sums
                if WANT_WEIGHT:
                    weight_sum += over_rows(g * x_hat, MANY_ROWS)
                if WANT_BIAS:
                    bias_sum += over_rows(g, MANY_ROWS)
                if WANT_INPUT:
                    if weight is not None:
                        g = g * wider(scale, SINGLE, EXACT)
                    sum_g, sum_gx = sum_pair(g, g * x_hat, 1)
                    if PARTS > 1:
                        slot = (rows * group + of_group) * PARTS + part
                        if EXACT:
                            publish_wide(sum_g, sum_gx, slots + slot * 2, rows < samples)
                        else:
                            publish(sum_g, sum_gx, slots + slot, rows < samples)
            if WANT_INPUT and PHASE != SUMS:
                rows, known = rows_of(done, samples, ROWS, LAG)
                if LAG:
                    x, x_before = x_before, x
                    dy, dy_before = dy_before, dy
                    mu, mu_before = mu_before, mu
                    rs, rs_before = rs_before, rs
                if PARTS > 1:
                    places, given = _slots(slots, rows, known, group, of_group, PARTS, PADDED_PARTS, 2 if EXACT else 1)
                    if EXACT:
                        all_g, all_gx = collect_wide(places, given, PHASE == WHOLE)
                    else:
                        all_g, all_gx = collect(places, given, PHASE == WHOLE)
                    sum_g = settled(tl.sum(all_g, axis=1), ROWS)
                    sum_gx = settled(tl.sum(all_gx, axis=1), ROWS)
                mean_g = (sum_g.to(tl.float64) * per_row)[:, None]
                mean_gx = (sum_gx.to(tl.float64) * per_row)[:, None]
                g, values = precise(dy, PAIRS), precise(x, PAIRS)
                result = gradient(g, values, mu[:, None], rs[:, None], scale, mean_g, mean_gx)
                target = first_of(grad_input + begin, done, part, grad_input_strides, ROWS, WORDS, VECTOR)
                put_numbers(target + written, result, row_mask(known, word_in_row, MASKED), (ROWS, WORDS, 2), PAIRS)
        let_next_launch_begin()
        if PHASE != OUTPUTS:
            line = partial + (int64(team) * group + of_group) * N + columns
            if WANT_WEIGHT:
                tl.store(line, weight_sum, mask=columns < N)
                line += int64(teams) * group * N
            if WANT_BIAS:
                tl.store(line, bias_sum, mask=columns < N)


@triton.jit
def _slots(slots, rows, known, group, of_group, PARTS: tl.constexpr, PADDED: tl.constexpr, WORDS: tl.constexpr):
    """All slots of a group's rows, and which of them there are."""
    parts = tl.arange(0, PADDED)
    first = (rows * group + of_group) * PARTS
    return slots + (first[:, None] + parts[None, :]) * WORDS, known[:, None] & (parts < PARTS)[None, :]


@triton.jit
def group_norm_flat_forward(
    input,  # [samples, group, D·HxW]
    weight,  # [group·D], or None
    bias,  # [group·D], or None
    output,  # [samples, group, D·HxW]
    mean,  # [samples, group]
    rstd,  # [samples, group]
    slots,  # int64 [samples, group, PARTS, 2]
    samples,
    group,
    HxW,
    N,
    eps_bits,  # float64
    groups_at_once,
    teams,
    input_strides,
    output_strides,
    mean_stride,
    rstd_stride,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    VECTOR: tl.constexpr,
    PAIRS: tl.constexpr,
    FOLD: tl.constexpr,  # stretches of a program's columns that are added up first; 1 where a thread has few
    PHASE: tl.constexpr,
):
    """The normalised rows of a team and their statistics."""
    LAG: tl.constexpr = 1 if PARTS > 1 and PHASE == WHOLE else 0
    WORDS: tl.constexpr = COLUMNS if PAIRS == SINGLE else COLUMNS // 2
    N = known_multiple(N, VECTOR, PAIRS)
    row_words = N // (COLUMNS // WORDS)
    crew, part, columns, in_row, word_in_row = part_of_team(N, COLUMNS, PARTS, PAIRS)
    team = crew // groups_at_once
    channels = _channels_of(part, HxW, COLUMNS, WIDE)
    input_strides = times(input_strides, VECTOR, WIDE)
    output_strides = times(output_strides, VECTOR, WIDE)
    read = offsets_in(input_strides, ROWS, WORDS, WIDE)
    written = offsets_in(output_strides, ROWS, WORDS, WIDE)
    eps = float64_of_bits(eps_bits)
    whole = float64(N)
    per_row = 1.0 / whole
    count = float64(tl.minimum(N - part * COLUMNS, COLUMNS))
    per_part = 1.0 / count
    counts = tl.maximum(tl.minimum(N - tl.arange(0, PADDED_PARTS) * COLUMNS, COLUMNS), 0).to(tl.float64)[None, :]
    per_parts = 1.0 / counts
    for of_group in range(crew % groups_at_once, group, groups_at_once):
        begin = int64(of_group) * row_words
        factor = None
        term = None
        if weight is not None:
            factor = _weights(weight, int64(of_group) * D, channels, columns < N)
        if bias is not None:
            term = _weights(bias, int64(of_group) * D, channels, columns < N)
        if LAG:
            x_before = tl.zeros((ROWS, WORDS), input.dtype.element_ty)
            wait_for_launch_before()
        for tile in tl.range(team, tl.cdiv(samples, ROWS) + LAG * teams, teams, num_stages=STAGES):
            done = tile - LAG * teams
            rows = indices(tile, ROWS)
            mask = row_mask(rows < samples, word_in_row, MASKED)
            x = tl.load(
                first_of(input + begin, tile, part, input_strides, ROWS, WORDS, VECTOR) + read, mask=mask, other=0
            )
            if PHASE != OUTPUTS:
                # In float64, since the output near the mean is only as precise as the mean is.
                values = wider(x, PAIRS, EXACT)
                total = tl.sum(values.to(tl.float64), axis=1)
                centre = divided(total, count, per_part)
                near, rest = near_and_rest(centre, values.dtype)
                away = values - near[:, None]
                if MASKED:
                    away = tl.where(in_row, away, 0.0)
                squares = row_sums(away * away, FOLD, PAIRS)
                if FOLD > 1 and PARTS == 1:
                    squares = settled(squares, ROWS)
                squares -= rest * rest * count
                squares = tl.where(squares < 0.0, 0.0, squares)
                if PARTS > 1:
                    slot = slots + ((rows * group + of_group) * PARTS + part) * 2
                    publish_wide(total, squares, slot, rows < samples)
            if PHASE != SUMS:
                rows, known = rows_of(done, samples, ROWS, LAG)
                if LAG:
                    x, x_before = x_before, x
                if PARTS > 1:
                    places, given = _slots(slots, rows, known, group, of_group, PARTS, PADDED_PARTS, 2)
                    sums, all_squares = collect_wide(places, given, PHASE == WHOLE)
                    centre = divided(tl.sum(sums, axis=1), whole, per_row)
                    apart = sums - centre[:, None] * counts
                    squares = tl.sum(tl.where(given, all_squares + apart * apart * per_parts, 0.0), axis=1)
                    centre = settled(centre, ROWS)
                    squares = settled(squares, ROWS)
                inverse = 1.0 / tl.sqrt(squares * per_row + eps)
                result = normalised(precise(x, PAIRS), centre[:, None], inverse[:, None], factor, term)
                target = first_of(output + begin, done, part, output_strides, ROWS, WORDS, VECTOR)
                put_numbers(target + written, result, row_mask(known, word_in_row, MASKED), (ROWS, WORDS, 2), PAIRS)
                first = known & (part == 0)
                put(mean + (rows * group + of_group) * mean_stride, centre, first)
                put(rstd + (rows * group + of_group) * rstd_stride, inverse, first)


@triton.jit
def group_norm_flat_sums(
    partial,  # float32 or float64 [outputs, K, C, HxW]
    first,  # [segments, C]
    second,  # [segments, C], or None
    first_stride,
    second_stride,
    K,
    C,
    HxW,
    segment,  # positions per program
    TEAMS: tl.constexpr,
    CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Second-stage reduction: sum a segment of the positions of a block of channels over all teams, in float64.

    The order is fixed: teams, then positions, then the tree of a tile. The segment is the program's second index, the
    output its third.
    """
    wait_for_launch_before()
    channels = indices(tl.program_id(0), CHANNELS)
    inside = channels < C
    begin = tl.program_id(1).to(tl.int64) * segment
    end = tl.minimum(begin + segment, HxW)
    which = tl.program_id(2)
    source = partial + which.to(tl.int64) * K * C * HxW
    total = tl.zeros((TEAMS, CHANNELS, POSITIONS), tl.float64)
    for team in range(0, K, TEAMS):
        teams = int64(team) + tl.arange(0, TEAMS)
        rows = (teams[:, None] * C + channels[None, :]) * HxW
        known_rows = (teams < K)[:, None] & inside[None, :]
        for start in range(begin, end, POSITIONS):
            positions = start + tl.arange(0, POSITIONS)
            mask = known_rows[:, :, None] & (positions < end)[None, None, :]
            value = tl.load(source + rows[:, :, None] + positions[None, None, :], mask=mask, other=0.0)
            total += value.to(tl.float64)
    result = tl.sum(tl.sum(total, axis=2), axis=0)
    target = tl.program_id(1).to(tl.int64) * C + channels
    put_sums(first, second, which, target, result, first_stride, second_stride, inside)
