"""GroupNorm's backward pass.

A team of PARTS programs holds the GROUPS groups of a sample between them, in registers, so that the data is read once;
teams walk over the samples' groups. Sums go through the shared memory of a cluster, or through slots in the GPU's
memory: then the results of a tile follow when the next is loaded and its sums are on their way.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.clusters import open_slots, sums_of_all, tell, wait_for_all
from normgrad.cuda.device.common import (
    OUTPUTS,
    SINGLE,
    SUMS,
    WHOLE,
    collect,
    float64,
    int64,
    lane_zero,
    let_next_launch_begin,
    publish,
    put_numbers,
    settled,
    sum_pair,
    wait_for_launch_before,
    wide,
)
from normgrad.cuda.device.formulas import gradient, precise, wider
from normgrad.cuda.group_norm import contiguous_addressing as tiles


@triton.jit
def _statistics(mean, rstd, item, totals, GROUPS: tl.constexpr, AHEAD: tl.constexpr):
    """Mean and rstd of an item's groups; AHEAD: they are needed a turn later."""
    items, group, group_blocks = totals
    sample, groups, known = tiles.groups_of(item, items, group, group_blocks, GROUPS)
    statistic = int64(sample) * group + groups
    if AHEAD:  # a register of the whole warp would have them at once, and the warp would wait for them
        statistic += lane_zero()
    mu = tl.load(mean + statistic, mask=known, other=0.0)
    return mu, tl.load(rstd + statistic, mask=known, other=0.0)


@triton.jit
def _channels(item, totals, within, D: tl.constexpr, GROUPS: tl.constexpr):
    """The channels of an item's tile, and which of them there are."""
    items, group, group_blocks = totals
    _, groups, known = tiles.groups_of(item, items, group, group_blocks, GROUPS)
    return groups[:, None] * D + within[None, :], known[:, None] & (within < D)[None, :]


@triton.jit
def _weights(weight, item, totals, within, D: tl.constexpr, GROUPS: tl.constexpr, AHEAD: tl.constexpr):
    """The weights of an item's channels; AHEAD: they are needed a turn later."""
    channels, known = _channels(item, totals, within, D, GROUPS)
    if AHEAD:  # as above; times 16, so that they still come in vectors
        channels += 16 * lane_zero()
    return tl.load(weight + channels, mask=known, other=0.0)


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
    CLUSTER: tl.constexpr,  # a team's programs reach each other's shared memory; they load a turn ahead, into registers
    PAIRS: tl.constexpr,  # how 16-bit data comes; pairs are what the strides of pairs count
    ALIKE: tl.constexpr,  # the tensors' strides of channel and place are the same
    WANT_INPUT: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    PHASE: tl.constexpr,
):
    """The gradients of a team's groups, and the sums over a tile's places that the weight's gradients are made of."""
    let_next_launch_begin()
    SLOTS: tl.constexpr = PARTS > 1 and not CLUSTER
    LAG: tl.constexpr = 1 if (WANT_INPUT and SLOTS) and PHASE == WHOLE else 0
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
    totals = (items, group, group_blocks)
    begin = (channel_in_group, word, word_in_tile)
    if CLUSTER:
        told = open_slots()
        turns = 0
        next_x = tiles.loaded(input, read_x, input_strides, team, totals, begin, D, GROUPS, MASKED)
        next_dy = tiles.loaded(grad_out, read_dy, grad_out_strides, team, totals, begin, D, GROUPS, MASKED)
        next_mean, next_rstd = _statistics(mean, rstd, team, totals, GROUPS, True)
        if weight is not None:
            next_scale = _weights(weight, team, totals, within, D, GROUPS, True)
    if LAG:
        x_before = tl.zeros((GROUPS, CHANNELS, WORDS), input.dtype.element_ty)
        dy_before = tl.zeros((GROUPS, CHANNELS, WORDS), grad_out.dtype.element_ty)
        mu_before = tl.zeros((GROUPS,), tl.float32)
        rs_before = tl.zeros((GROUPS,), tl.float32)
        if weight is not None:
            scale_before = tl.zeros((GROUPS, CHANNELS), tl.float32)
    for item in tl.range(team, items + LAG * teams, teams, num_stages=STAGES):
        done = item - LAG * teams
        ahead = item + teams if CLUSTER else item
        x = tiles.loaded(input, read_x, input_strides, ahead, totals, begin, D, GROUPS, MASKED)
        dy = tiles.loaded(grad_out, read_dy, grad_out_strides, ahead, totals, begin, D, GROUPS, MASKED)
        mu, rs = _statistics(mean, rstd, ahead, totals, GROUPS, CLUSTER)
        if weight is not None:
            scale = _weights(weight, ahead, totals, within, D, GROUPS, CLUSTER)
        if CLUSTER:
            x, next_x = next_x, x
            dy, next_dy = next_dy, dy
            mu, next_mean = next_mean, mu
            rs, next_rstd = next_rstd, rs
            if weight is not None:
                scale, next_scale = next_scale, scale
        mu = wide(mu)
        rs = wide(rs)
        if weight is not None:
            scale = wide(scale)
        sample, groups, known = tiles.groups_of(item, items, group, group_blocks, GROUPS)
        channel = (item % group_blocks) * GROUPS * D + channel_in_group
        channels, known_channels = _channels(item, totals, within, D, GROUPS)
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
                if CLUSTER:
                    tell(sum_g, sum_gx, told, part, turns, 1, PARTS)
                elif SLOTS:
                    if PHASE == WHOLE:
                        wait_for_launch_before()
                    statistic = int64(sample) * group + groups
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
            if CLUSTER:
                sum_g, sum_gx = sums_of_all(wait_for_all(told, turns, 1, PARTS), PARTS)
                turns += 1
            elif SLOTS:
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
