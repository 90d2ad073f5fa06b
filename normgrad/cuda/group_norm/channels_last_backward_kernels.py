"""GroupNorm's backward pass where the channels of a place lie side by side; blocks as in ``group_norm_blocks``.

One launch makes the sums of every part of a block. The next reads the data again, last first, since what was read last
is still in the L2 cache, and makes the sums of the groups of those of their parts.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.common import (
    SINGLE,
    add_with_rest,
    collect,
    collect_wide,
    float64,
    int64,
    let_next_launch_begin,
    publish,
    publish_wide,
    put_numbers,
    rounded_sum,
    sum_pair,
    wait_for_launch_before,
    wide,
)
from normgrad.cuda.device.formulas import gradient, precise, wider
from normgrad.cuda.group_norm.channels_last_addressing import (
    block_groups,
    channels_of,
    entries_of,
    entry_of,
    of_channels,
    of_groups,
    presummed,
    tile_at,
    tile_mask,
    tile_offsets,
    work_at,
)


@triton.jit
def group_norm_channel_sums(
    grad_out,  # [N, C, HxW]
    input,  # [N, C, HxW]
    mean,  # [N, group]
    rstd,  # [N, group]
    weight,  # [C], or None
    partial,  # float32 or, of EXACT sums, float64 [wanted, N·PARTS, C]: the weight sums of each part
    sums,  # int64 [N, group, PARTS, OVER]: Σ grad_out·weight and Σ grad_out·weight·x̂ of each entry, in float32; or of
    # EXACT sums [N, group, PARTS, OVER, 2], in float64
    samples,
    group,
    blocks,
    HxW,
    grad_out_strides,  # of sample, channel and place
    input_strides,
    D: tl.constexpr,  # channels of a group
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,  # that may have channels in a block
    PARTS: tl.constexpr,
    OVER: tl.constexpr,
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,  # tiles of a part
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,  # the tiles are more than the places or channels
    WIDE: tl.constexpr,  # offsets in a tile need 64 bits
    PAIRS: tl.constexpr,  # how 16-bit data comes; pairs are what the strides of pairs count
    EXACT: tl.constexpr,  # the sums are float64
    WANT_INPUT: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
):
    """The sums of a part of a block."""
    let_next_launch_begin()
    PRECISION: tl.constexpr = tl.float64 if EXACT else tl.float32
    PER_WORD: tl.constexpr = 1 if PAIRS == SINGLE else 2
    WORDS: tl.constexpr = CHANNELS // PER_WORD
    C = channels_of(group, D, WIDE)
    sample, part, block = work_at(tl.program_id(0), blocks, PARTS, WIDE)
    channels = block * CHANNELS + tl.arange(0, CHANNELS)
    known = channels < C
    statistic = int64(sample) * group + channels // D
    mu = wide(tl.load(mean + statistic, mask=known, other=0.0))[None, :]
    rs = wide(tl.load(rstd + statistic, mask=known, other=0.0))[None, :]
    begin = int64(part) * (PLACES * STEPS)
    x_at = tile_at(input, sample, begin, block * WORDS, input_strides)
    x_at = x_at + tile_offsets(input_strides, PLACES, WORDS, WIDE)
    dy_at = tile_at(grad_out, sample, begin, block * WORDS, grad_out_strides)
    dy_at = dy_at + tile_offsets(grad_out_strides, PLACES, WORDS, WIDE)
    all_g = tl.zeros((ROWS, CHANNELS), PRECISION)
    all_gx = tl.zeros((ROWS, CHANNELS), PRECISION)
    rest_g = tl.zeros((ROWS, CHANNELS), tl.float32)
    rest_gx = tl.zeros((ROWS, CHANNELS), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        left = HxW - begin - step * PLACES
        mask = tile_mask(left, (C - block * CHANNELS) // PER_WORD, PLACES, WORDS, MASKED)
        x = tl.load(x_at + int64(step) * PLACES * input_strides[2], mask=mask, other=0)
        dy = tl.load(dy_at + int64(step) * PLACES * grad_out_strides[2], mask=mask, other=0)
        g = wider(dy, PAIRS, EXACT)
        x_hat = (wider(x, PAIRS, EXACT) - mu) * rs
        if MASKED:  # 0·Inf must not reach the sums
            x_hat = tl.where(tile_mask(left, C - block * CHANNELS, PLACES, CHANNELS, MASKED), x_hat, 0.0)
        sum_g, sum_gx = presummed(g, g * x_hat, PLACES, ROWS, CHANNELS)
        all_g, rest_g = add_with_rest(all_g, rest_g, sum_g)
        all_gx, rest_gx = add_with_rest(all_gx, rest_gx, sum_gx)
    sum_g, sum_gx = sum_pair(rounded_sum(all_g, rest_g), rounded_sum(all_gx, rest_gx), 0)
    line = partial + (int64(sample) * PARTS + part) * C + channels
    if WANT_WEIGHT:
        tl.store(line, sum_gx, mask=known)
        line += int64(samples) * PARTS * C
    if WANT_BIAS:
        tl.store(line, sum_g, mask=known)
    if WANT_INPUT:
        if weight is not None:
            scale = wide(tl.load(weight + channels, mask=known, other=0.0))
            sum_g = sum_g.to(tl.float64) * scale
            sum_gx = sum_gx.to(tl.float64) * scale
        sum_g, sum_gx = of_groups(sum_g, sum_gx, block, D, CHANNELS, GROUPS)
        groups, there = block_groups(block, group, D, CHANNELS, GROUPS)
        entry = entry_of(sample, groups, part, block, group, D, CHANNELS, PARTS, OVER)
        if EXACT:
            publish_wide(sum_g, sum_gx, sums + entry * 2, there)
        else:
            publish(sum_g, sum_gx, sums + entry, there)


@triton.jit
def group_norm_channel_gradients(
    grad_out,  # [N, C, HxW]
    input,  # [N, C, HxW]
    mean,  # [N, group]
    rstd,  # [N, group]
    weight,  # [C], or None
    grad_input,  # [N, C, HxW]
    sums,  # int64 [N, group, PARTS, OVER], or of EXACT sums [N, group, PARTS, OVER, 2]
    group,
    blocks,
    tiles,  # of a block's places
    HxW,
    grad_out_strides,
    input_strides,
    grad_input_strides,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    OVER: tl.constexpr,
    PLACES: tl.constexpr,
    ENTRIES: tl.constexpr,  # of a group that are added up at a time
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """The gradients of a tile."""
    let_next_launch_begin()
    PER_WORD: tl.constexpr = 1 if PAIRS == SINGLE else 2
    WORDS: tl.constexpr = CHANNELS // PER_WORD
    C = channels_of(group, D, WIDE)
    sample, tile, block = work_at(tl.num_programs(0) - 1 - tl.program_id(0), blocks, tiles, WIDE)
    place = int64(tile) * PLACES
    x_at = tile_at(input, sample, place, block * WORDS, input_strides)
    dy_at = tile_at(grad_out, sample, place, block * WORDS, grad_out_strides)
    mask = tile_mask(HxW - place, (C - block * CHANNELS) // PER_WORD, PLACES, WORDS, MASKED)
    x = tl.load(x_at + tile_offsets(input_strides, PLACES, WORDS, WIDE), mask=mask, other=0)
    dy = tl.load(dy_at + tile_offsets(grad_out_strides, PLACES, WORDS, WIDE), mask=mask, other=0)
    channels = block * CHANNELS + tl.arange(0, CHANNELS)
    known = channels < C
    statistic = int64(sample) * group + channels // D
    mu = wide(tl.load(mean + statistic, mask=known, other=0.0))[None, :]
    rs = wide(tl.load(rstd + statistic, mask=known, other=0.0))[None, :]
    scale = None
    if weight is not None:
        scale = wide(tl.load(weight + channels, mask=known, other=0.0))[None, :]
    wait_for_launch_before()
    groups, there = block_groups(block, group, D, CHANNELS, GROUPS)
    all_g = tl.zeros((GROUPS, ENTRIES), tl.float64)
    all_gx = tl.zeros((GROUPS, ENTRIES), tl.float64)
    for begin in range(0, PARTS * OVER, ENTRIES):
        entries, given = entries_of(begin, sample, groups, there, group, D, CHANNELS, PARTS, OVER, ENTRIES)
        if EXACT:
            more_g, more_gx = collect_wide(sums + entries * 2, given, False)
        else:
            more_g, more_gx = collect(sums + entries, given, False)
        all_g += more_g
        all_gx += more_gx
    per_group = 1.0 / (float64(D) * float64(HxW))
    sum_g, sum_gx = sum_pair(all_g, all_gx, 1)
    mean_g = of_channels(sum_g * per_group, block, D, CHANNELS, GROUPS)[None, :]
    mean_gx = of_channels(sum_gx * per_group, block, D, CHANNELS, GROUPS)[None, :]
    result = gradient(precise(dy, PAIRS), precise(x, PAIRS), mu, rs, scale, mean_g, mean_gx)
    target = tile_at(grad_input, sample, place, block * WORDS, grad_input_strides)
    written = tile_offsets(grad_input_strides, PLACES, WORDS, WIDE)
    put_numbers(target + written, result, mask, (PLACES, WORDS, 2), PAIRS)
