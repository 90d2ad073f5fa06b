"""GroupNorm where the channels of a place lie side by side in memory.

A program has a stretch of STEPS·PLACES places of a block of whole groups. One of a single step stays in registers until
the sums of the other stretches are known; a longer one is read again then, while it is still in the L2 cache. In
between, the program makes the sums of its next stretch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.common import (
    OUTPUTS,
    SINGLE,
    SUMS,
    WHOLE,
    add_with_rest,
    collect,
    collect_wide,
    divided,
    first_of_pair,
    float64,
    float64_of_bits,
    high,
    int64,
    numbers,
    publish,
    publish_wide,
    put,
    put_numbers,
    rounded_sum,
    sum_pair,
    wait_for_launch_before,
    wide,
)
from normgrad.cuda.kernels.formulas import gradient, normalised, precise, wider
from normgrad.cuda.kernels.group_norm_blocks import (
    known_channels,
    of_channels,
    of_groups,
    slots_of,
    tile_mask,
    tile_offsets,
)


@triton.jit
def group_norm_backward_channels(
    grad_out,  # [N, C, HxW]
    input,  # [N, C, HxW]
    mean,  # [N, group]
    rstd,  # [N, group]
    weight,  # [C], or None
    grad_input,  # [N, C, HxW], or None
    partial,  # float32 [wanted, N·PARTS, C]: the weight sums of each stretch
    slots,  # int64 [N, group, PARTS]
    samples,
    group,
    group_blocks,
    HxW,
    teams,
    grad_out_sample,
    grad_out_channel,
    grad_out_place,
    input_sample,
    input_channel,
    input_place,
    grad_input_sample,
    grad_input_channel,
    grad_input_place,
    D: tl.constexpr,  # channels of a group
    GROUPS: tl.constexpr,  # of a block
    PADDED_GROUPS: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEPS: tl.constexpr,  # tiles of a stretch
    PARTS: tl.constexpr,  # stretches of a sample
    PADDED_PARTS: tl.constexpr,
    MASKED: tl.constexpr,  # the stretches are more than the places
    WIDE: tl.constexpr,  # offsets in a tile, or the number of items, need 64 bits
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,  # how 16-bit data comes; pairs are what the strides of pairs count
    WANT_INPUT: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    PHASE: tl.constexpr,
):
    """The gradients of the blocks of groups of a team, a stretch of places per program."""
    LAG: tl.constexpr = 1 if WANT_INPUT and PARTS > 1 and PHASE == WHOLE else 0
    HELD: tl.constexpr = STEPS == 1
    # The roundings of few numbers are seen in their sums.
    EXACT: tl.constexpr = input.dtype.element_ty == tl.float32 and PARTS == 1 and HELD and D * PLACES <= 512
    PER_WORD: tl.constexpr = 1 if PAIRS == SINGLE else 2
    WORDS: tl.constexpr = CHANNELS // PER_WORD
    program = tl.program_id(0)
    part = program % PARTS
    team = program // PARTS
    begin = int64(part) * (PLACES * STEPS)
    within = tl.arange(0, CHANNELS)
    group_within = tl.arange(0, PADDED_GROUPS)
    member = (within[None, :] // D == group_within[:, None]) & (within < GROUPS * D)[None, :]
    read_x = tile_offsets(input_channel, input_place, PLACES, WORDS, WIDE)
    read_dy = tile_offsets(grad_out_channel, grad_out_place, PLACES, WORDS, WIDE)
    written = tile_offsets(grad_input_channel, grad_input_place, PLACES, WORDS, WIDE)
    per_group = 1.0 / (float64(D) * float64(HxW))
    C = group * D
    items = samples * group_blocks
    if WIDE:
        items = int64(samples) * group_blocks
        team = int64(team)
    if LAG:
        mu_before = tl.zeros((CHANNELS,), tl.float32)
        rs_before = tl.zeros((CHANNELS,), tl.float32)
        if weight is not None:
            scale_before = tl.zeros((CHANNELS,), tl.float32)
        if HELD:
            x_before = tl.zeros((PLACES, WORDS), input.dtype.element_ty)
            dy_before = tl.zeros((PLACES, WORDS), grad_out.dtype.element_ty)
        wait_for_launch_before()
    for item in tl.range(team, items + LAG * teams, teams, num_stages=STAGES if HELD else 1):
        done = item - LAG * teams
        sample = item // group_blocks
        channel = (item % group_blocks) * (GROUPS * D)
        word = channel // PER_WORD
        known = known_channels(item, items, channel, C, CHANNELS, GROUPS * D)
        known_words = known_channels(item, items, word, C // PER_WORD, WORDS, GROUPS * D // PER_WORD)
        statistic = int64(sample) * group + (channel + within) // D
        x_at = input + int64(sample) * input_sample + int64(word) * input_channel + begin * input_place
        dy_at = grad_out + int64(sample) * grad_out_sample + int64(word) * grad_out_channel + begin * grad_out_place
        if HELD:
            mask = tile_mask(begin, HxW, known_words, PLACES, MASKED)
            x = tl.load(x_at + read_x, mask=mask, other=0)
            dy = tl.load(dy_at + read_dy, mask=mask, other=0)
        mu = wide(tl.load(mean + statistic, mask=known, other=0.0))
        rs = wide(tl.load(rstd + statistic, mask=known, other=0.0))
        if weight is not None:
            scale = wide(tl.load(weight + channel + within, mask=known, other=0.0))
        if PHASE != OUTPUTS:
            if HELD:
                g = wider(dy, PAIRS, EXACT)
                x_hat = (wider(x, PAIRS, EXACT) - mu[None, :]) * rs[None, :]
                if MASKED:  # 0·Inf must not reach the sums
                    x_hat = tl.where(tile_mask(begin, HxW, known, PLACES, MASKED), x_hat, 0.0)
                sum_g, sum_gx = sum_pair(g, g * x_hat, 0)
            else:
                all_g = tl.zeros((PLACES, CHANNELS), tl.float32)
                all_gx = tl.zeros((PLACES, CHANNELS), tl.float32)
                rest_g = tl.zeros((PLACES, CHANNELS), tl.float32)
                rest_gx = tl.zeros((PLACES, CHANNELS), tl.float32)
                for step in tl.range(0, STEPS, num_stages=STAGES):
                    ahead = int64(step) * PLACES
                    mask = tile_mask(begin + ahead, HxW, known_words, PLACES, MASKED)
                    x = tl.load(x_at + ahead * input_place + read_x, mask=mask, other=0)
                    g = numbers(tl.load(dy_at + ahead * grad_out_place + read_dy, mask=mask, other=0), PAIRS)
                    x_hat = (numbers(x, PAIRS) - mu[None, :]) * rs[None, :]
                    if MASKED:
                        x_hat = tl.where(tile_mask(begin + ahead, HxW, known, PLACES, MASKED), x_hat, 0.0)
                    all_g, rest_g = add_with_rest(all_g, rest_g, g)
                    all_gx, rest_gx = add_with_rest(all_gx, rest_gx, g * x_hat)
                sum_g, sum_gx = sum_pair(rounded_sum(all_g, rest_g), rounded_sum(all_gx, rest_gx), 0)
            line = partial + (int64(sample) * PARTS + part) * C + channel + within
            if WANT_WEIGHT:
                tl.store(line, sum_gx, mask=known)
                line += int64(samples) * PARTS * C
            if WANT_BIAS:
                tl.store(line, sum_g, mask=known)
            if WANT_INPUT:
                if weight is not None:
                    sum_g = sum_g.to(tl.float64) * scale
                    sum_gx = sum_gx.to(tl.float64) * scale
                sum_g, sum_gx = of_groups(sum_g, sum_gx, member)
                if PARTS > 1:
                    groups = channel // D + group_within
                    place = slots + (int64(sample) * group + groups) * PARTS + part
                    publish(sum_g, sum_gx, place, (group_within < GROUPS) & (groups < group) & (item < items))
        if WANT_INPUT and PHASE != SUMS:
            if LAG:
                mu, mu_before = mu_before, mu
                rs, rs_before = rs_before, rs
                if weight is not None:
                    scale, scale_before = scale_before, scale
                if HELD:
                    x, x_before = x_before, x
                    dy, dy_before = dy_before, dy
            sample = done // group_blocks
            channel = (done % group_blocks) * (GROUPS * D)
            word = channel // PER_WORD
            known = known_channels(done, items, channel, C, CHANNELS, GROUPS * D)
            known_words = known_channels(done, items, word, C // PER_WORD, WORDS, GROUPS * D // PER_WORD)
            if PARTS > 1:
                slot, given = slots_of(
                    slots, sample, channel, done >= 0, group, D, GROUPS, PADDED_GROUPS, PARTS, PADDED_PARTS, 1
                )
                all_sums, all_sums_x = collect(slot, given, PHASE == WHOLE)
                sum_g = tl.sum(all_sums, axis=1)
                sum_gx = tl.sum(all_sums_x, axis=1)
            mean_g = of_channels(sum_g.to(tl.float64) * per_group, D, CHANNELS, PADDED_GROUPS)[None, :]
            mean_gx = of_channels(sum_gx.to(tl.float64) * per_group, D, CHANNELS, PADDED_GROUPS)[None, :]
            by_channel = None
            if weight is not None:
                by_channel = scale[None, :]
            target = grad_input + int64(sample) * grad_input_sample + int64(word) * grad_input_channel
            target += begin * grad_input_place
            x_at = input + int64(sample) * input_sample + int64(word) * input_channel + begin * input_place
            dy_at = grad_out + int64(sample) * grad_out_sample + int64(word) * grad_out_channel
            dy_at += begin * grad_out_place
            for step in tl.range(0, STEPS, num_stages=STAGES):
                ahead = int64(step) * PLACES
                mask = tile_mask(begin + ahead, HxW, known_words, PLACES, MASKED)
                if not HELD:
                    x = tl.load(x_at + ahead * input_place + read_x, mask=mask, other=0)
                    dy = tl.load(dy_at + ahead * grad_out_place + read_dy, mask=mask, other=0)
                grads, values = precise(dy, PAIRS), precise(x, PAIRS)
                result = gradient(grads, values, mu[None, :], rs[None, :], by_channel, mean_g, mean_gx)
                put_numbers(target + ahead * grad_input_place + written, result, mask, (PLACES, WORDS, 2), PAIRS)


@triton.jit
def group_norm_forward_channels(
    input,  # [N, C, HxW]
    weight,  # [C], or None
    bias,  # [C], or None
    output,  # [N, C, HxW]
    mean,  # [N, group]
    rstd,  # [N, group]
    slots,  # int64 [N, group, PARTS, 2]
    samples,
    group,
    group_blocks,
    HxW,
    eps_bits,  # float64
    teams,
    input_sample,
    input_channel,
    input_place,
    output_sample,
    output_channel,
    output_place,
    mean_stride,
    rstd_stride,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,
    PHASE: tl.constexpr,
):
    """The normalised groups of a team and their statistics, a stretch of places per program."""
    LAG: tl.constexpr = 1 if PARTS > 1 and PHASE == WHOLE else 0
    HELD: tl.constexpr = STEPS == 1
    PER_WORD: tl.constexpr = 1 if PAIRS == SINGLE else 2
    WORDS: tl.constexpr = CHANNELS // PER_WORD
    program = tl.program_id(0)
    part = program % PARTS
    team = program // PARTS
    begin = int64(part) * (PLACES * STEPS)
    within = tl.arange(0, CHANNELS)
    group_within = tl.arange(0, PADDED_GROUPS)
    member = (within[None, :] // D == group_within[:, None]) & (within < GROUPS * D)[None, :]
    read = tile_offsets(input_channel, input_place, PLACES, WORDS, WIDE)
    written = tile_offsets(output_channel, output_place, PLACES, WORDS, WIDE)
    whole = float64(D) * float64(HxW)
    eps = float64_of_bits(eps_bits)
    parts = tl.arange(0, PADDED_PARTS)
    per_group = 1.0 / whole
    per_part = 1.0 / (tl.minimum(HxW - begin, PLACES * STEPS).to(tl.float64) * D)
    counts = tl.maximum(tl.minimum(HxW - int64(parts) * (PLACES * STEPS), PLACES * STEPS), 0).to(tl.float64) * D
    C = group * D
    items = samples * group_blocks
    if WIDE:
        items = int64(samples) * group_blocks
        team = int64(team)
    if LAG:
        if HELD:
            x_before = tl.zeros((PLACES, WORDS), input.dtype.element_ty)
        wait_for_launch_before()
    for item in tl.range(team, items + LAG * teams, teams, num_stages=STAGES if HELD else 1):
        done = item - LAG * teams
        sample = item // group_blocks
        channel = (item % group_blocks) * (GROUPS * D)
        word = channel // PER_WORD
        known = known_channels(item, items, channel, C, CHANNELS, GROUPS * D)
        known_words = known_channels(item, items, word, C // PER_WORD, WORDS, GROUPS * D // PER_WORD)
        x_at = input + int64(sample) * input_sample + int64(word) * input_channel + begin * input_place
        if HELD:
            mask = tile_mask(begin, HxW, known_words, PLACES, MASKED)
            x = tl.load(x_at + read, mask=mask, other=0)
        if PHASE != OUTPUTS:
            # About the group's first number here: a constant group has no variance at all.
            first_within = (within // D) * D
            about = tl.load(x_at + first_within // PER_WORD * input_channel, mask=known, other=0)
            if PAIRS == SINGLE:
                about = wide(about)
            else:
                about = first_of_pair(about, PAIRS)
            about = tl.where(about - about == 0.0, about, 0.0).to(tl.float64)
            if HELD:
                away = numbers(x, PAIRS).to(tl.float64) - about[None, :]
                away = tl.where(tile_mask(begin, HxW, known, PLACES, MASKED), away, 0.0)
                sum_away, sum_squares = sum_pair(away, away * away, 0)
            else:
                all_away = tl.zeros((PLACES, CHANNELS), tl.float64)
                all_squares = tl.zeros((PLACES, CHANNELS), tl.float64)
                for step in tl.range(0, STEPS, num_stages=STAGES):
                    ahead = int64(step) * PLACES
                    mask = tile_mask(begin + ahead, HxW, known_words, PLACES, MASKED)
                    x = tl.load(x_at + ahead * input_place + read, mask=mask, other=0)
                    away = numbers(x, PAIRS).to(tl.float64) - about[None, :]
                    away = tl.where(tile_mask(begin + ahead, HxW, known, PLACES, MASKED), away, 0.0)
                    all_away += away
                    all_squares += away * away
                sum_away, sum_squares = sum_pair(all_away, all_squares, 0)
            sum_away, sum_squares = of_groups(sum_away, sum_squares, member)
            origin = tl.sum(tl.where(member & (within == first_within)[None, :], about[None, :], 0.0), axis=1)
            drift = sum_away * per_part
            centre = origin + drift
            squares = sum_squares - drift * sum_away
            squares = tl.where(squares < 0.0, 0.0, squares)
            if PARTS > 1:
                groups = channel // D + group_within
                place = slots + ((int64(sample) * group + groups) * PARTS + part) * 2
                publish_wide(centre, squares, place, (group_within < GROUPS) & (groups < group) & (item < items))
        if PHASE != SUMS:
            if LAG and HELD:
                x, x_before = x_before, x
            sample = done // group_blocks
            channel = (done % group_blocks) * (GROUPS * D)
            word = channel // PER_WORD
            known = known_channels(done, items, channel, C, CHANNELS, GROUPS * D)
            known_words = known_channels(done, items, word, C // PER_WORD, WORDS, GROUPS * D // PER_WORD)
            groups = channel // D + group_within
            known_groups = (group_within < GROUPS) & (groups < group) & (done >= 0)
            statistic = int64(sample) * group + groups
            if PARTS > 1:
                slot, given = slots_of(
                    slots, sample, channel, done >= 0, group, D, GROUPS, PADDED_GROUPS, PARTS, PADDED_PARTS, 2
                )
                centres, all_squares = collect_wide(slot, given, PHASE == WHOLE)
                centre = divided(tl.sum(tl.where(given, centres * counts[None, :], 0.0), axis=1), whole, per_group)
                apart = centres - centre[:, None]
                squares = tl.sum(tl.where(given, all_squares + apart * apart * counts[None, :], 0.0), axis=1)
            inverse = 1.0 / tl.sqrt(squares * per_group + eps)
            put(mean + statistic * mean_stride, high(centre), known_groups & (part == 0))
            put(rstd + statistic * rstd_stride, high(inverse), known_groups & (part == 0))
            centre = of_channels(centre, D, CHANNELS, PADDED_GROUPS)[None, :]
            inverse = of_channels(inverse, D, CHANNELS, PADDED_GROUPS)[None, :]
            factor = None
            shift = None
            if weight is not None:
                factor = wide(tl.load(weight + channel + within, mask=known, other=0.0))[None, :]
            if bias is not None:
                shift = wide(tl.load(bias + channel + within, mask=known, other=0.0))[None, :]
            target = output + int64(sample) * output_sample + int64(word) * output_channel + begin * output_place
            x_at = input + int64(sample) * input_sample + int64(word) * input_channel + begin * input_place
            for step in tl.range(0, STEPS, num_stages=STAGES):
                ahead = int64(step) * PLACES
                mask = tile_mask(begin + ahead, HxW, known_words, PLACES, MASKED)
                if not HELD:
                    x = tl.load(x_at + ahead * input_place + read, mask=mask, other=0)
                result = normalised(precise(x, PAIRS), centre, inverse, factor, shift)
                put_numbers(target + ahead * output_place + written, result, mask, (PLACES, WORDS, 2), PAIRS)
