"""GroupNorm, forward and backward, for any strides of sample, channel and place.

A tile is [PLACES, GROUPS, CHANNELS]: several whole groups where channels lie side by side in memory, part of one group
where places do. A team of PARTS programs holds the GROUPS groups of a sample between them, in registers, so that the
data is read once; teams walk over the samples' groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.common import (
    OUTPUTS,
    SUMS,
    WHOLE,
    again,
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
def _offsets(
    channel_stride,
    place_stride,
    D: tl.constexpr,
    PLACES: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The offsets of a tile's elements from its first, in 64 bits only where they need them."""
    places = tl.arange(0, PLACES)
    channels = tl.arange(0, GROUPS)[:, None] * D + tl.arange(0, CHANNELS)[None, :]
    if WIDE:
        places = places.to(tl.int64)
        channels = channels.to(tl.int64)
    return places[:, None, None] * place_stride + channels[None, :, :] * channel_stride


@triton.jit
def _first(pointer, sample, channel, place, sample_stride, channel_stride, place_stride):
    """Where a tile begins."""
    return pointer + int64(sample) * sample_stride + int64(channel) * channel_stride + int64(place) * place_stride


@triton.jit
def _slots_of(slots, sample, groups, group, PARTS: tl.constexpr, PADDED: tl.constexpr, WORDS: tl.constexpr):
    """All slots of the groups, and which of them there are."""
    parts = tl.arange(0, PADDED)
    mask = (groups < group)[:, None] & (parts < PARTS)[None, :]
    first = int64(sample) * group
    return slots + ((first + groups)[:, None] * PARTS + parts[None, :]) * WORDS, mask


@triton.jit
def group_norm_backward(
    grad_out,  # [N, C, HxW]
    input,  # [N, C, HxW]
    mean,  # [N, group]
    rstd,  # [N, group]
    weight,  # [C], or None
    grad_input,  # [N, C, HxW], or None
    partial,  # float32 [wanted, N·place parts, C]: the weight sums of each tile
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
    PLACES: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLACE_PARTS: tl.constexpr,
    PARTS: tl.constexpr,  # place parts × channel parts
    PADDED_PARTS: tl.constexpr,
    WIDE: tl.constexpr,  # offsets in a tile need 64 bits
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
    WANT_INPUT: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    PHASE: tl.constexpr,
):
    """The gradients of a team's groups, and the sums over a tile's places that the weight's gradients are made of."""
    program = tl.program_id(0)
    part = program % PARTS
    team = int64(program // PARTS)
    place_part = part % PLACE_PARTS
    place = int64(place_part) * PLACES
    channel_in_group = int64(part // PLACE_PARTS) * CHANNELS
    within = channel_in_group + tl.arange(0, CHANNELS)
    in_tile = (place + tl.arange(0, PLACES) < HxW)[:, None, None] & (within < D)[None, None, :]
    read_x = _offsets(input_channel, input_place, D, PLACES, GROUPS, CHANNELS, WIDE)
    read_dy = _offsets(grad_out_channel, grad_out_place, D, PLACES, GROUPS, CHANNELS, WIDE)
    written = _offsets(grad_input_channel, grad_input_place, D, PLACES, GROUPS, CHANNELS, WIDE)
    per_group = 1.0 / (float64(D) * float64(HxW))
    items = int64(samples) * group_blocks
    if PREFETCH:
        groups = (team % group_blocks) * GROUPS + tl.arange(0, GROUPS)
        mask = in_tile & (groups < group)[None, :, None] & (team < items)
        sample = team // group_blocks
        channel = (team % group_blocks) * GROUPS * D + channel_in_group
        x_at = _first(input, sample, channel, place, input_sample, input_channel, input_place)
        dy_at = _first(grad_out, sample, channel, place, grad_out_sample, grad_out_channel, grad_out_place)
        next_x = tl.load(x_at + read_x, mask=mask, other=0.0)
        next_dy = tl.load(dy_at + read_dy, mask=mask, other=0.0)
    if PARTS > 1 and PHASE == WHOLE:
        wait_for_launch_before()
    for item in tl.range(team, items, teams, num_stages=STAGES):
        sample = item // group_blocks
        groups = (item % group_blocks) * GROUPS + tl.arange(0, GROUPS)
        channel = (item % group_blocks) * GROUPS * D + channel_in_group
        channels = groups[:, None] * D + within[None, :]
        known = (groups < group)[:, None] & (within < D)[None, :]
        mask = in_tile & (groups < group)[None, :, None]
        if PREFETCH:
            x, dy = next_x, next_dy
            ahead = item + teams
            groups_ahead = (ahead % group_blocks) * GROUPS + tl.arange(0, GROUPS)
            mask_ahead = in_tile & (groups_ahead < group)[None, :, None] & (ahead < items)
            sample_ahead = ahead // group_blocks
            channel_ahead = (ahead % group_blocks) * GROUPS * D + channel_in_group
            x_at = _first(input, sample_ahead, channel_ahead, place, input_sample, input_channel, input_place)
            dy_at = _first(
                grad_out, sample_ahead, channel_ahead, place, grad_out_sample, grad_out_channel, grad_out_place
            )
            next_x = tl.load(x_at + read_x, mask=mask_ahead, other=0.0)
            next_dy = tl.load(dy_at + read_dy, mask=mask_ahead, other=0.0)
        else:
            x_at = _first(input, sample, channel, place, input_sample, input_channel, input_place)
            dy_at = _first(grad_out, sample, channel, place, grad_out_sample, grad_out_channel, grad_out_place)
            x = tl.load(x_at + read_x, mask=mask, other=0.0)
            dy = tl.load(dy_at + read_dy, mask=mask, other=0.0)
        statistic = int64(sample) * group + groups
        mu = wide(tl.load(mean + statistic, mask=groups < group, other=0.0))[None, :, None]
        rs = wide(tl.load(rstd + statistic, mask=groups < group, other=0.0))[None, :, None]
        g = wide(dy)
        x_hat = tl.where(mask, (wide(x) - mu) * rs, 0.0)  # 0·Inf must not reach the sums
        if weight is not None:
            scale = wide(tl.load(weight + channels, mask=known, other=0.0))
        if PHASE != OUTPUTS:
            sum_dy, sum_dyx = sum_pair(g, g * x_hat, 0)
            line = partial + (int64(sample) * PLACE_PARTS + place_part) * (group * D) + channels
            if WANT_WEIGHT:
                tl.store(line, sum_dyx, mask=known)
                line += int64(samples) * PLACE_PARTS * (group * D)
            if WANT_BIAS:
                tl.store(line, sum_dy, mask=known)
        if WANT_INPUT:
            if PHASE != OUTPUTS:
                if weight is not None:
                    sum_dy = sum_dy * scale
                    sum_dyx = sum_dyx * scale
                sum_g, sum_gx = sum_pair(sum_dy, sum_dyx, 1)
            if PARTS > 1:
                if PHASE != OUTPUTS:
                    publish(sum_g, sum_gx, slots + statistic * PARTS + part, groups < group)
                if PHASE != SUMS:
                    slot, given = _slots_of(slots, sample, groups, group, PARTS, PADDED_PARTS, 1)
                    all_g, all_gx = collect(slot, given, PHASE == WHOLE)
                    total_g = tl.sum(all_g, axis=1)
                    total_gx = tl.sum(all_gx, axis=1)
            else:
                total_g = sum_g.to(tl.float64)
                total_gx = sum_gx.to(tl.float64)
            if PHASE != SUMS:
                mean_g = (total_g * per_group).to(tl.float32)[None, :, None]
                mean_gx = (total_gx * per_group).to(tl.float32)[None, :, None]
                g = wide(again(dy))
                if weight is not None:
                    g *= scale[None, :, :]
                x_hat = (wide(again(x)) - mu) * rs
                result = rs * (g - mean_g - x_hat * mean_gx)
                target = _first(
                    grad_input, sample, channel, place, grad_input_sample, grad_input_channel, grad_input_place
                )
                put(target + written, result, mask)


@triton.jit
def group_norm_forward(
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
    D: tl.constexpr,  # channels of a group
    PLACES: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLACE_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
    PHASE: tl.constexpr,
):
    """The normalised groups of a team and their statistics."""
    program = tl.program_id(0)
    part = program % PARTS
    team = int64(program // PARTS)
    place = int64(part % PLACE_PARTS) * PLACES
    channel_in_group = int64(part // PLACE_PARTS) * CHANNELS
    within = channel_in_group + tl.arange(0, CHANNELS)
    in_tile = (place + tl.arange(0, PLACES) < HxW)[:, None, None] & (within < D)[None, None, :]
    read = _offsets(input_channel, input_place, D, PLACES, GROUPS, CHANNELS, WIDE)
    written = _offsets(output_channel, output_place, D, PLACES, GROUPS, CHANNELS, WIDE)
    count = _held(part, HxW, D, PLACES, CHANNELS, PLACE_PARTS)
    counts = _held(tl.arange(0, PADDED_PARTS), HxW, D, PLACES, CHANNELS, PLACE_PARTS)[None, :]
    whole = float64(D) * float64(HxW)
    eps = float64_of_bits(eps_bits)
    if PARTS > 1 and PHASE == WHOLE:
        wait_for_launch_before()
    for item in tl.range(team, int64(samples) * group_blocks, teams, num_stages=STAGES):
        sample = item // group_blocks
        groups = (item % group_blocks) * GROUPS + tl.arange(0, GROUPS)
        channel = (item % group_blocks) * GROUPS * D + channel_in_group
        channels = groups[:, None] * D + within[None, :]
        known = (groups < group)[:, None] & (within < D)[None, :]
        mask = in_tile & (groups < group)[None, :, None]
        x_at = _first(input, sample, channel, place, input_sample, input_channel, input_place)
        x = wide(tl.load(x_at + read, mask=mask, other=0.0))
        statistic = int64(sample) * group + groups
        if PARTS == 1 or PHASE != OUTPUTS:
            # In float64, since the output near the mean is only as precise as the mean is.
            centre = tl.sum(tl.sum(x.to(tl.float64), axis=0), axis=1) / count
            away = tl.where(mask, x - high(centre)[None, :, None] - low(centre)[None, :, None], 0.0)
            squares = tl.sum(tl.sum(away * away, axis=0), axis=1).to(tl.float64)
        if PARTS > 1:
            if PHASE != OUTPUTS:
                publish_wide(centre, squares, slots + (statistic * PARTS + part) * 2, groups < group)
            if PHASE != SUMS:
                slot, given = _slots_of(slots, sample, groups, group, PARTS, PADDED_PARTS, 2)
                centres, all_squares = collect_wide(slot, given, PHASE == WHOLE)
                centre = tl.sum(tl.where(given, centres * counts, 0.0), axis=1) / whole
                apart = centres - centre[:, None]
                squares = tl.sum(tl.where(given, all_squares + apart * apart * counts, 0.0), axis=1)
        if PHASE != SUMS:
            inverse = (1.0 / tl.sqrt(squares / whole + eps)).to(tl.float32)
            result = (x - high(centre)[None, :, None] - low(centre)[None, :, None]) * inverse[None, :, None]
            if weight is not None:
                result *= wide(tl.load(weight + channels, mask=known, other=0.0))[None, :, :]
            if bias is not None:
                result += wide(tl.load(bias + channels, mask=known, other=0.0))[None, :, :]
            target = _first(output, sample, channel, place, output_sample, output_channel, output_place)
            put(target + written, result, mask)
            first = (groups < group) & (part == 0)
            put(mean + statistic * mean_stride, high(centre), first)
            put(rstd + statistic * rstd_stride, inverse, first)


@triton.jit
def _held(part, HxW, D: tl.constexpr, PLACES: tl.constexpr, CHANNELS: tl.constexpr, PLACE_PARTS: tl.constexpr):
    """How many elements of a group a part has, as float64."""
    places = tl.minimum(tl.maximum(HxW - (part % PLACE_PARTS) * PLACES, 0), PLACES)
    channels = tl.minimum(tl.maximum(D - (part // PLACE_PARTS) * CHANNELS, 0), CHANNELS)
    return places.to(tl.float64) * channels.to(tl.float64)
