"""GroupNorm where the channels of a place lie side by side in memory.

A program has a stretch of places of a block of whole groups, and goes over it twice: for the sums, and once the sums of
the other stretches are known, for the results. The stretches under way together are small enough for the L2 cache,
so that the memory is read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.common import (
    OUTPUTS,
    SUMS,
    WHOLE,
    collect,
    collect_wide,
    float64,
    float64_of_bits,
    high,
    int64,
    low,
    publish,
    publish_wide,
    put,
    sum_pair,
    wait_for_launch_before,
    wide,
)


@triton.jit
def _offsets(channel_stride, place_stride, PLACES: tl.constexpr, CHANNELS: tl.constexpr, FAR: tl.constexpr):
    """The offsets of a tile's elements from its first, in 64 bits only where they need them."""
    places = tl.arange(0, PLACES)
    channels = tl.arange(0, CHANNELS)
    if FAR:
        places = places.to(tl.int64)
        channels = channels.to(tl.int64)
    return places[:, None] * place_stride + channels[None, :] * channel_stride


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
    STAGES: tl.constexpr,
    FAR: tl.constexpr,  # offsets in a tile need 64 bits
    WANT_INPUT: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    PHASE: tl.constexpr,
):
    """The gradients of the blocks of groups of a team, a stretch of places per program."""
    program = tl.program_id(0)
    part = program % PARTS
    team = int64(program // PARTS)
    begin = int64(part) * (PLACES * STEPS)
    within = tl.arange(0, CHANNELS)
    group_within = tl.arange(0, PADDED_GROUPS)
    member = (within[None, :] // D == group_within[:, None]) & (within < GROUPS * D)[None, :]
    read_x = _offsets(input_channel, input_place, PLACES, CHANNELS, FAR)
    read_dy = _offsets(grad_out_channel, grad_out_place, PLACES, CHANNELS, FAR)
    written = _offsets(grad_input_channel, grad_input_place, PLACES, CHANNELS, FAR)
    per_group = 1.0 / (float64(D) * float64(HxW))
    if PARTS > 1 and PHASE == WHOLE:
        wait_for_launch_before()
    for item in range(team, int64(samples) * group_blocks, teams):
        sample = item // group_blocks
        block = item % group_blocks
        channels = block * (GROUPS * D) + within
        known = (within < GROUPS * D) & (channels < group * D)
        groups = block * GROUPS + group_within
        known_group = (group_within < GROUPS) & (groups < group)
        statistic = sample * group + channels // D
        mu = wide(tl.load(mean + statistic, mask=known, other=0.0))[None, :]
        rs = wide(tl.load(rstd + statistic, mask=known, other=0.0))[None, :]
        x_at = input + sample * input_sample + block * (GROUPS * D) * input_channel + begin * input_place
        dy_at = grad_out + sample * grad_out_sample + block * (GROUPS * D) * grad_out_channel + begin * grad_out_place
        if weight is not None:
            scale = wide(tl.load(weight + channels, mask=known, other=0.0))
        if PHASE != OUTPUTS:
            all_dy = tl.zeros((PLACES, CHANNELS), tl.float32)
            all_dyx = tl.zeros((PLACES, CHANNELS), tl.float32)
            for step in tl.range(0, STEPS, num_stages=STAGES):
                first = int64(step) * PLACES
                mask = (begin + first + tl.arange(0, PLACES) < HxW)[:, None] & known[None, :]
                x = tl.load(x_at + first * input_place + read_x, mask=mask, other=0.0)
                dy = wide(tl.load(dy_at + first * grad_out_place + read_dy, mask=mask, other=0.0))
                x_hat = tl.where(mask, (wide(x) - mu) * rs, 0.0)  # 0·Inf must not reach the sums
                all_dy += dy
                all_dyx += dy * x_hat
            sum_dy, sum_dyx = sum_pair(all_dy, all_dyx, 0)
            line = partial + (sample * PARTS + part) * (group * D) + channels
            if WANT_WEIGHT:
                tl.store(line, sum_dyx, mask=known)
                line += int64(samples) * PARTS * (group * D)
            if WANT_BIAS:
                tl.store(line, sum_dy, mask=known)
            if WANT_INPUT:
                if weight is not None:
                    sum_dy *= scale
                    sum_dyx *= scale
                of_groups = tl.where(member, sum_dy[None, :], 0.0)
                of_groups_x = tl.where(member, sum_dyx[None, :], 0.0)
                sum_g, sum_gx = sum_pair(of_groups, of_groups_x, 1)
                if PARTS > 1:
                    publish(sum_g, sum_gx, slots + (sample * group + groups) * PARTS + part, known_group)
        if WANT_INPUT and PHASE != SUMS:
            if PARTS > 1:
                parts = tl.arange(0, PADDED_PARTS)
                given = known_group[:, None] & (parts < PARTS)[None, :]
                places = slots + (sample * group + groups)[:, None] * PARTS + parts[None, :]
                all_g, all_gx = collect(places, given, PHASE == WHOLE)
                total_g = tl.sum(all_g, axis=1)
                total_gx = tl.sum(all_gx, axis=1)
            else:
                total_g = sum_g.to(tl.float64)
                total_gx = sum_gx.to(tl.float64)
            of_groups = tl.where(member, (total_g * per_group).to(tl.float32)[:, None], 0.0)
            of_groups_x = tl.where(member, (total_gx * per_group).to(tl.float32)[:, None], 0.0)
            mean_g, mean_gx = sum_pair(of_groups, of_groups_x, 0)
            target = grad_input + sample * grad_input_sample + block * (GROUPS * D) * grad_input_channel
            target += begin * grad_input_place
            for step in tl.range(0, STEPS, num_stages=STAGES):
                first = int64(step) * PLACES
                mask = (begin + first + tl.arange(0, PLACES) < HxW)[:, None] & known[None, :]
                x = tl.load(x_at + first * input_place + read_x, mask=mask, other=0.0)
                g = wide(tl.load(dy_at + first * grad_out_place + read_dy, mask=mask, other=0.0))
                if weight is not None:
                    g *= scale[None, :]
                x_hat = (wide(x) - mu) * rs
                result = rs * (g - mean_g[None, :] - x_hat * mean_gx[None, :])
                put(target + first * grad_input_place + written, result, mask)


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
    STAGES: tl.constexpr,
    FAR: tl.constexpr,
    PHASE: tl.constexpr,
):
    """The normalised groups of a team and their statistics, a stretch of places per program."""
    program = tl.program_id(0)
    part = program % PARTS
    team = int64(program // PARTS)
    begin = int64(part) * (PLACES * STEPS)
    within = tl.arange(0, CHANNELS)
    group_within = tl.arange(0, PADDED_GROUPS)
    member = (within[None, :] // D == group_within[:, None]) & (within < GROUPS * D)[None, :]
    read = _offsets(input_channel, input_place, PLACES, CHANNELS, FAR)
    written = _offsets(output_channel, output_place, PLACES, CHANNELS, FAR)
    count = float64(D) * float64(HxW)
    eps = float64_of_bits(eps_bits)
    if PARTS > 1 and PHASE == WHOLE:
        wait_for_launch_before()
    for item in range(team, int64(samples) * group_blocks, teams):
        sample = item // group_blocks
        block = item % group_blocks
        channels = block * (GROUPS * D) + within
        known = (within < GROUPS * D) & (channels < group * D)
        groups = block * GROUPS + group_within
        known_group = (group_within < GROUPS) & (groups < group)
        x_at = input + sample * input_sample + block * (GROUPS * D) * input_channel + begin * input_place
        # About the first number of the group: a constant group has no variance at all.
        origin = input + sample * input_sample
        about = wide(tl.load(origin + (channels // D) * D * input_channel, mask=known, other=0.0)).to(tl.float64)
        if PHASE != OUTPUTS:
            all_away = tl.zeros((PLACES, CHANNELS), tl.float64)
            all_squares = tl.zeros((PLACES, CHANNELS), tl.float64)
            for step in tl.range(0, STEPS, num_stages=STAGES):
                first = int64(step) * PLACES
                mask = (begin + first + tl.arange(0, PLACES) < HxW)[:, None] & known[None, :]
                x = wide(tl.load(x_at + first * input_place + read, mask=mask, other=0.0)).to(tl.float64)
                away = tl.where(mask, x - about[None, :], 0.0)
                all_away += away
                all_squares += away * away
            sum_away, sum_squares = sum_pair(all_away, all_squares, 0)
            of_groups = tl.where(member, sum_away[None, :], 0.0)
            of_groups_squares = tl.where(member, sum_squares[None, :], 0.0)
            sum_away, sum_squares = sum_pair(of_groups, of_groups_squares, 1)
            if PARTS > 1:
                place = slots + ((sample * group + groups) * PARTS + part) * 2
                publish_wide(sum_away, sum_squares, place, known_group)
        if PHASE != SUMS:
            if PARTS > 1:
                parts = tl.arange(0, PADDED_PARTS)
                given = known_group[:, None] & (parts < PARTS)[None, :]
                places = slots + ((sample * group + groups)[:, None] * PARTS + parts[None, :]) * 2
                all_sums, all_sums_squares = collect_wide(places, given, PHASE == WHOLE)
                sum_away = tl.sum(all_sums, axis=1)
                sum_squares = tl.sum(all_sums_squares, axis=1)
            drift = sum_away / count
            squares = sum_squares - drift * sum_away
            squares = tl.where(squares < 0.0, 0.0, squares)
            inverse = (1.0 / tl.sqrt(squares / count + eps)).to(tl.float32)
            first_of_group = origin + groups * D * input_channel
            centre = wide(tl.load(first_of_group, mask=known_group, other=0.0)).to(tl.float64) + drift
            statistic = sample * group + groups
            put(mean + statistic * mean_stride, high(centre), known_group & (part == 0))
            put(rstd + statistic * rstd_stride, inverse, known_group & (part == 0))
            wide_centre = about + tl.sum(tl.where(member, drift[:, None], 0.0), axis=0)
            scale = tl.sum(tl.where(member, inverse[:, None], 0.0), axis=0)
            target = output + sample * output_sample + block * (GROUPS * D) * output_channel + begin * output_place
            for step in tl.range(0, STEPS, num_stages=STAGES):
                first = int64(step) * PLACES
                mask = (begin + first + tl.arange(0, PLACES) < HxW)[:, None] & known[None, :]
                x = wide(tl.load(x_at + first * input_place + read, mask=mask, other=0.0))
                result = (x - high(wide_centre)[None, :] - low(wide_centre)[None, :]) * scale[None, :]
                if weight is not None:
                    result *= wide(tl.load(weight + channels, mask=known, other=0.0))[None, :]
                if bias is not None:
                    result += wide(tl.load(bias + channels, mask=known, other=0.0))[None, :]
                put(target + first * output_place + written, result, mask)
