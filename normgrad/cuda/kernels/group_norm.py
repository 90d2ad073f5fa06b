"""GroupNorm's backward pass.

A team of PARTS programs holds the GROUPS groups of a sample between them, in registers, so that the data is read once;
teams walk over the samples' groups. The results of a tile follow when the next is loaded and its sums are on their way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels import group_norm_tiles as tiles
from normgrad.cuda.kernels.common import (
    OUTPUTS,
    SINGLE,
    SUMS,
    WHOLE,
    collect,
    float64,
    int64,
    let_next_launch_begin,
    publish,
    put_numbers,
    settled,
    sum_pair,
    wait_for_launch_before,
    wide,
)
from normgrad.cuda.kernels.formulas import gradient, precise, wider


@triton.jit
def group_norm_backward(
    grad_out,  # [N, C, HxW]
    input,  # [N, C, HxW]
    mean,  # [N, group]
    rstd,  # [N, group]
    weight,  # [C], or None
    grad_input,  # [N, C, HxW], or None
    partial,  # float32 or, of EXACT sums, float64 [wanted, N·place parts, C]: the weight sums of each tile
    slots,  # int64 [N, group, PARTS]
    samples,
    group,
    group_blocks,
    HxW,
    teams,
    grad_out_strides,  # of sample, channel and place
    input_strides,
    grad_input_strides,
    D: tl.constexpr,  # channels of a group
    PLACES: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLACE_PARTS: tl.constexpr,
    PARTS: tl.constexpr,  # place parts × channel parts
    PADDED_PARTS: tl.constexpr,
    MASKED: tl.constexpr,  # the tiles are more than the groups
    WIDE: tl.constexpr,  # offsets in a tile, or the number of items, need 64 bits
    STAGES: tl.constexpr,
    STRETCHES: tl.constexpr,  # of a tile's places; in each a thread adds up
    NEIGHBOURS: tl.constexpr,  # those that it has side by side before the others, so that no sum is of many one by one
    EXACT: tl.constexpr,  # the sums are float64
    VECTOR: tl.constexpr,  # what divides strides of samples and channels, which count vectors, and a channel's words
    PAIRS: tl.constexpr,  # how 16-bit data comes; pairs are what the strides of pairs count
    ALIKE: tl.constexpr,  # the tensors' strides of channel and place are the same
    WANT_INPUT: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    PHASE: tl.constexpr,
):
    """The gradients of a team's groups, and the sums over a tile's places that the weight's gradients are made of."""
    let_next_launch_begin()
    LAG: tl.constexpr = 1 if (WANT_INPUT and PARTS > 1) and PHASE == WHOLE else 0
    WORDS: tl.constexpr = PLACES if PAIRS == SINGLE else PLACES // 2
    FOLDED: tl.constexpr = (GROUPS, CHANNELS, STRETCHES, PLACES // (STRETCHES * NEIGHBOURS), NEIGHBOURS)
    input_strides = tiles.strides_of(input_strides, VECTOR, WIDE)
    grad_out_strides = tiles.strides_of(grad_out_strides, VECTOR, WIDE)
    grad_input_strides = tiles.strides_of(grad_input_strides, VECTOR, WIDE)
    team, part, place_part, word, within, in_tile, word_in_tile = tiles.part_of_team(
        HxW, D, GROUPS, CHANNELS, PLACES, WORDS, PLACE_PARTS, PARTS, VECTOR
    )
    channel_in_group = (part // PLACE_PARTS) * CHANNELS
    read_x = tiles.tile_offsets(input_strides, D, GROUPS, CHANNELS, WORDS, WIDE)
    read_dy, written = read_x, read_x
    if not ALIKE:
        read_dy = tiles.tile_offsets(grad_out_strides, D, GROUPS, CHANNELS, WORDS, WIDE)
        written = tiles.tile_offsets(grad_input_strides, D, GROUPS, CHANNELS, WORDS, WIDE)
    per_group = 1.0 / (float64(D) * float64(HxW))
    items = samples * group_blocks
    if WIDE:
        items = int64(samples) * group_blocks
        team = int64(team)
    if LAG:
        x_before = tl.zeros((GROUPS, CHANNELS, WORDS), input.dtype.element_ty)
        dy_before = tl.zeros((GROUPS, CHANNELS, WORDS), grad_out.dtype.element_ty)
        mu_before = tl.zeros((GROUPS,), tl.float32)
        rs_before = tl.zeros((GROUPS,), tl.float32)
        if weight is not None:
            scale_before = tl.zeros((GROUPS, CHANNELS), tl.float32)
    for item in tl.range(team, items + LAG * teams, teams, num_stages=STAGES):
        done = item - LAG * teams
        sample, groups, known = tiles.groups_of(item, items, group, group_blocks, GROUPS)
        channel = (item % group_blocks) * GROUPS * D + channel_in_group
        mask = tiles.tile_mask(known, word_in_tile, MASKED)
        x_at = tiles.tile_at(input, sample, channel, word, input_strides)
        dy_at = tiles.tile_at(grad_out, sample, channel, word, grad_out_strides)
        x = tl.load(x_at + read_x, mask=mask, other=0)
        dy = tl.load(dy_at + read_dy, mask=mask, other=0)
        statistic = int64(sample) * group + groups
        mu = wide(tl.load(mean + statistic, mask=known, other=0.0))
        rs = wide(tl.load(rstd + statistic, mask=known, other=0.0))
        channels = groups[:, None] * D + within[None, :]
        known_channels = known[:, None] & (within < D)[None, :]
        if weight is not None:
            scale = wide(tl.load(weight + channels, mask=known_channels, other=0.0))
        if PHASE != OUTPUTS:
            g = tl.reshape(wider(dy, PAIRS, EXACT), FOLDED)
            x_hat = tl.reshape(wider(x, PAIRS, EXACT), FOLDED)
            x_hat = (x_hat - tiles.of_groups(mu)) * tiles.of_groups(rs)
            if MASKED:
                x_hat = tl.where(tl.reshape(in_tile, FOLDED), x_hat, 0.0)  # 0·Inf must not reach the sums
            sum_g, sum_gx = sum_pair(g, g * x_hat, 4)
            sum_g, sum_gx = sum_pair(sum_g, sum_gx, 2)
            sum_g, sum_gx = sum_pair(sum_g, sum_gx, 2)
            line = partial + (int64(sample) * PLACE_PARTS + place_part) * (group * D) + channels
            if WANT_WEIGHT:
                tl.store(line, sum_gx, mask=known_channels)
                line += int64(samples) * PLACE_PARTS * (group * D)
            if WANT_BIAS:
                tl.store(line, sum_g, mask=known_channels)
            if WANT_INPUT:
                if weight is not None:
                    sum_g = sum_g.to(tl.float64) * scale
                    sum_gx = sum_gx.to(tl.float64) * scale
                sum_g, sum_gx = sum_pair(sum_g, sum_gx, 1)
                if PARTS > 1:
                    if PHASE == WHOLE:
                        wait_for_launch_before()
                    publish(sum_g, sum_gx, slots + statistic * PARTS + part, known)
        if WANT_INPUT and PHASE != SUMS:
            if LAG:
                sample, groups, known = tiles.groups_of(done, items, group, group_blocks, GROUPS)
                channel = (done % group_blocks) * GROUPS * D + channel_in_group
                x, x_before = x_before, x
                dy, dy_before = dy_before, dy
                mu, mu_before = mu_before, mu
                rs, rs_before = rs_before, rs
                if weight is not None:
                    scale, scale_before = scale_before, scale
            if PARTS > 1:
                slot, given = tiles.slots_of(slots, sample, groups, known, group, PARTS, PADDED_PARTS, 1)
                all_g, all_gx = collect(slot, given, PHASE == WHOLE)
                sum_g = settled(tl.sum(all_g, axis=1), GROUPS)
                sum_gx = settled(tl.sum(all_gx, axis=1), GROUPS)
            mean_g = tiles.of_groups(sum_g.to(tl.float64) * per_group)
            mean_gx = tiles.of_groups(sum_gx.to(tl.float64) * per_group)
            by_channel = None
            if weight is not None:
                by_channel = tiles.of_channels(scale)
            g, values = tl.reshape(precise(dy, PAIRS), FOLDED), tl.reshape(precise(x, PAIRS), FOLDED)
            result = gradient(g, values, tiles.of_groups(mu), tiles.of_groups(rs), by_channel, mean_g, mean_gx)
            result = tl.reshape(result, (GROUPS, CHANNELS, PLACES))
            target = tiles.tile_at(grad_input, sample, channel, word, grad_input_strides)
            mask = tiles.tile_mask(known, word_in_tile, MASKED)
            put_numbers(target + written, result, mask, (GROUPS, CHANNELS, WORDS, 2), PAIRS)
