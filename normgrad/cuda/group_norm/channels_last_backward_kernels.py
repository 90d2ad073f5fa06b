"""The two kernels of GroupNorm backward for contiguous channels; ``channels_last_launches`` launches them.

A group's channels are interleaved with those of other groups, so a CTA that held a whole group would read scattered
memory. Instead one launch reduces blocks of contiguous channels, whatever groups they belong to, and a second one adds
up the sums of each group and computes grad_input. The second launch reads the data again, in reverse order: what was
read last is still in the L2 cache.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.formulas import input_gradient
from normgrad.cuda.device.indexing import float64, int64
from normgrad.cuda.device.mailbox import publish_sums, receive_sums
from normgrad.cuda.device.pack16 import store_elements, to_float32, unpack, unpack_acc_dtype
from normgrad.cuda.device.pdl import pdl_launch_dependents, pdl_wait
from normgrad.cuda.device.sums import compensated_add, compensated_total, sum_pair
from normgrad.cuda.group_norm.channels_last_addressing import (
    block_groups,
    channel_count,
    cta_work,
    element_mask,
    entries_of_groups,
    entry_of_block,
    expand_to_channels,
    load_channels,
    offsets_in_tile,
    sum_by_group,
    sum_within_threads,
    tile_start,
)


@triton.jit
def group_norm_backward_channels_last_reduce(
    grad_out,  # [N, C, HxW]
    input,  # [N, C, HxW]
    mean,  # [N, group]
    rstd,  # [N, group]
    weight,  # [C], or None
    partial,  # float32, or float64 for FLOAT64, [outputs, N·parts, C]: Σ dy·x̂ and Σ dy of each part
    sums,  # Σ dy·weight and Σ dy·weight·x̂ of each entry: int64 [N, group, parts, blocks_per_group], both in float32;
    # or [N, group, parts, blocks_per_group, 2] in float64 for FLOAT64
    N,
    group,
    blocks,  # of channels
    HxW,
    grad_out_strides,  # of sample, channel and position
    input_strides,
    TILE: tl.constexpr,  # tiles.ChannelsLastTileSpec
    ENTRIES: tl.constexpr,  # tiles.EntrySpec
    GROUPS: tl.constexpr,  # that may have channels in a block
    ROWS: tl.constexpr,  # positions of a tile that different threads hold
    STEPS: tl.constexpr,  # tiles of a part
    STAGES: tl.constexpr,  # of the software pipeline through shared memory; 1 for none
    FLOAT64: tl.constexpr,  # sums are computed in float64
    WANT_INPUT: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
):
    """Reduce one part of the positions of one block of channels a program.

    Every thread keeps float32 sums of its own with a compensation term, or float64 ones; a tree adds up the threads of
    a channel at the end. The channels' sums go to ``partial`` for the weight gradients; times the weight and summed by
    group they go to ``sums``. No two programs write the same element, so the result is deterministic.
    """
    pdl_launch_dependents()
    CHANNELS: tl.constexpr = TILE.channels
    PER_WORD: tl.constexpr = CHANNELS // TILE.words
    ACC_DTYPE: tl.constexpr = tl.float64 if FLOAT64 else tl.float32
    C = channel_count(group, TILE)
    sample, part, block = cta_work(tl.program_id(0), blocks, ENTRIES.parts, TILE)
    channels = block * CHANNELS + tl.arange(0, CHANNELS)
    channel_inside = channels < C
    statistic = int64(sample) * group + channels // TILE.D
    channel_mean = load_channels(mean, statistic, channel_inside)
    channel_rstd = load_channels(rstd, statistic, channel_inside)
    begin = int64(part) * (TILE.positions * STEPS)
    x_pointers = tile_start(input, sample, begin, block * TILE.words, input_strides)
    x_pointers = x_pointers + offsets_in_tile(input_strides, TILE)
    dy_pointers = tile_start(grad_out, sample, begin, block * TILE.words, grad_out_strides)
    dy_pointers = dy_pointers + offsets_in_tile(grad_out_strides, TILE)
    total_g = tl.zeros((ROWS, CHANNELS), ACC_DTYPE)
    total_gx = tl.zeros((ROWS, CHANNELS), ACC_DTYPE)
    compensation_g = tl.zeros((ROWS, CHANNELS), tl.float32)
    compensation_gx = tl.zeros((ROWS, CHANNELS), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        left = HxW - begin - step * TILE.positions
        mask = element_mask(left, (C - block * CHANNELS) // PER_WORD, TILE.words, TILE)
        x = tl.load(x_pointers + int64(step) * TILE.positions * input_strides[2], mask=mask, other=0)
        dy = tl.load(dy_pointers + int64(step) * TILE.positions * grad_out_strides[2], mask=mask, other=0)
        g = unpack(dy, TILE.packing, FLOAT64)
        x_hat = (unpack(x, TILE.packing, FLOAT64) - channel_mean) * channel_rstd
        if TILE.masked:  # 0·Inf must not reach the sums
            x_hat = tl.where(element_mask(left, C - block * CHANNELS, CHANNELS, TILE), x_hat, 0.0)
        sum_g, sum_gx = sum_within_threads(g, g * x_hat, ROWS, TILE)
        total_g, compensation_g = compensated_add(total_g, compensation_g, sum_g)
        total_gx, compensation_gx = compensated_add(total_gx, compensation_gx, sum_gx)
    total_g = compensated_total(total_g, compensation_g)
    sum_g, sum_gx = sum_pair(total_g, compensated_total(total_gx, compensation_gx), 0)
    target = partial + (int64(sample) * ENTRIES.parts + part) * C + channels
    if WANT_WEIGHT:
        tl.store(target, sum_gx, mask=channel_inside)
        target += int64(N) * ENTRIES.parts * C
    if WANT_BIAS:
        tl.store(target, sum_g, mask=channel_inside)
    if WANT_INPUT:
        if weight is not None:
            w = to_float32(tl.load(weight + channels, mask=channel_inside, other=0.0))
            sum_g = sum_g.to(tl.float64) * w
            sum_gx = sum_gx.to(tl.float64) * w
        sum_g, sum_gx = sum_by_group(sum_g, sum_gx, block, GROUPS, TILE)
        groups, group_inside = block_groups(block, group, GROUPS, TILE)
        entry = entry_of_block(sample, groups, part, block, group, ENTRIES)
        publish_sums(sum_g, sum_gx, sums, entry, group_inside, FLOAT64)


@triton.jit
def group_norm_backward_channels_last_apply(
    grad_out,  # [N, C, HxW]
    input,  # [N, C, HxW]
    mean,  # [N, group]
    rstd,  # [N, group]
    weight,  # [C], or None
    grad_input,  # [N, C, HxW]
    sums,  # of the reduce kernel
    group,
    blocks,  # of channels
    tiles,  # of a sample's positions
    HxW,
    grad_out_strides,  # of sample, channel and position
    input_strides,
    grad_input_strides,
    TILE: tl.constexpr,  # tiles.ChannelsLastTileSpec
    ENTRIES: tl.constexpr,  # tiles.EntrySpec
    GROUPS: tl.constexpr,  # that may have channels in a block
    ENTRIES_AT_ONCE: tl.constexpr,  # of a group that are added up at a time
    FLOAT64: tl.constexpr,  # ``sums`` are float64
):
    """Compute grad_input of one tile a program: rstd·(g − mean(g) − x̂·mean(g·x̂)), the means over a group.

    The tile is loaded before the program waits for the reduce kernel. It then adds up the entries of its block's
    groups, in their order and in float64, and expands the means to the channels.
    """
    pdl_launch_dependents()
    WORDS: tl.constexpr = TILE.words
    POSITIONS: tl.constexpr = TILE.positions
    PER_WORD: tl.constexpr = TILE.channels // WORDS
    GROUP_ENTRIES: tl.constexpr = ENTRIES.parts * ENTRIES.blocks_per_group
    C = channel_count(group, TILE)
    sample, tile, block = cta_work(tl.num_programs(0) - 1 - tl.program_id(0), blocks, tiles, TILE)
    position = int64(tile) * POSITIONS
    x_start = tile_start(input, sample, position, block * WORDS, input_strides)
    dy_start = tile_start(grad_out, sample, position, block * WORDS, grad_out_strides)
    mask = element_mask(HxW - position, (C - block * TILE.channels) // PER_WORD, WORDS, TILE)
    x = tl.load(x_start + offsets_in_tile(input_strides, TILE), mask=mask, other=0)
    dy = tl.load(dy_start + offsets_in_tile(grad_out_strides, TILE), mask=mask, other=0)
    channels = block * TILE.channels + tl.arange(0, TILE.channels)
    channel_inside = channels < C
    statistic = int64(sample) * group + channels // TILE.D
    channel_mean = load_channels(mean, statistic, channel_inside)
    channel_rstd = load_channels(rstd, statistic, channel_inside)
    w = None
    if weight is not None:
        w = load_channels(weight, channels, channel_inside)
    pdl_wait()
    groups, group_inside = block_groups(block, group, GROUPS, TILE)
    total_g = tl.zeros((GROUPS, ENTRIES_AT_ONCE), tl.float64)
    total_gx = tl.zeros((GROUPS, ENTRIES_AT_ONCE), tl.float64)
    for begin in range(0, GROUP_ENTRIES, ENTRIES_AT_ONCE):
        entries, entry_mask = entries_of_groups(begin, sample, groups, group_inside, group, ENTRIES_AT_ONCE, ENTRIES)
        more_g, more_gx = receive_sums(sums + entries * (2 if FLOAT64 else 1), entry_mask, False, FLOAT64)
        total_g += more_g
        total_gx += more_gx
    reciprocal_count = 1.0 / (float64(TILE.D) * float64(HxW))
    sum_g, sum_gx = sum_pair(total_g, total_gx, 1)
    mean_g = expand_to_channels(sum_g * reciprocal_count, block, GROUPS, TILE)[None, :]
    mean_gx = expand_to_channels(sum_gx * reciprocal_count, block, GROUPS, TILE)[None, :]
    dy_values, x_values = unpack_acc_dtype(dy, TILE.packing), unpack_acc_dtype(x, TILE.packing)
    result = input_gradient(dy_values, x_values, channel_mean, channel_rstd, w, mean_g, mean_gx)
    start = tile_start(grad_input, sample, position, block * WORDS, grad_input_strides)
    store_elements(start + offsets_in_tile(grad_input_strides, TILE), result, mask, (POSITIONS, WORDS, 2), TILE.packing)
