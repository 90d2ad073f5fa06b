"""The kernel of GroupNorm backward for contiguous (or strided) positions; ``contiguous_launches`` launches it."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.cluster_exchange import init_cta_exchange, send_to_ctas, sum_received, wait_for_ctas
from normgrad.cuda.device.compiler_barriers import block_rematerialization, opaque_zero
from normgrad.cuda.device.formulas import input_gradient
from normgrad.cuda.device.indexing import float64, int64
from normgrad.cuda.device.mailbox import APPLY, FUSED, REDUCE, part_slots, publish, receive
from normgrad.cuda.device.pack16 import store_elements, to_float32, unpack, unpack_acc_dtype
from normgrad.cuda.device.pdl import pdl_launch_dependents, pdl_wait
from normgrad.cuda.device.sums import sum_pair
from normgrad.cuda.group_norm.contiguous_addressing import (
    cta_position,
    element_mask,
    expand_channels,
    expand_groups,
    first_channel,
    in_words,
    item_groups,
    load_tile,
    offsets_in_tile,
    tile_start,
)


@triton.jit
def _load_statistics(mean, rstd, item, work, TILE: tl.constexpr, AHEAD: tl.constexpr):
    """Load mean and rstd of a work item's groups, [groups]; AHEAD: they are needed an iteration later."""
    sample, groups, group_inside = item_groups(item, work, TILE)
    statistic = int64(sample) * work[1] + groups
    if AHEAD:  # ptxas would load warp-uniform addresses into uniform registers, and stall the warp an iteration early
        statistic += opaque_zero()
    group_mean = tl.load(mean + statistic, mask=group_inside, other=0.0)
    return group_mean, tl.load(rstd + statistic, mask=group_inside, other=0.0)


@triton.jit
def _item_channels(item, work, channels_in_group, TILE: tl.constexpr):
    """Return the channel indices [groups, channels] of a work item's tile, and which of them there are."""
    _, groups, group_inside = item_groups(item, work, TILE)
    channels = groups[:, None] * TILE.D + channels_in_group[None, :]
    return channels, group_inside[:, None] & (channels_in_group < TILE.D)[None, :]


@triton.jit
def _load_weight(weight, item, work, channels_in_group, TILE: tl.constexpr, AHEAD: tl.constexpr):
    """Load the weights of a work item's channels, [groups, channels]; AHEAD: they are needed an iteration later."""
    channels, inside = _item_channels(item, work, channels_in_group, TILE)
    if AHEAD:  # as above; times 16, so that the loads are still vectorized
        channels += 16 * opaque_zero()
    return tl.load(weight + channels, mask=inside, other=0.0)


@triton.jit
def group_norm_backward_contiguous(
    grad_out,  # [N, C, HxW]
    input,  # [N, C, HxW]
    mean,  # [N, group]
    rstd,  # [N, group]
    weight,  # [C], or None
    grad_input,  # [N, C, HxW], or None
    partial,  # float32, or float64 for FLOAT64, [outputs, N·position parts, C]: sums of each tile's positions
    slots,  # mailbox: int64 [N, group, parts]; None without one
    N,
    group,
    group_blocks,  # work items of a sample
    HxW,
    cta_groups,
    grad_out_strides,  # of sample and channel, in vectors, and of position
    input_strides,
    grad_input_strides,
    TILE: tl.constexpr,  # tiles.GroupTileSpec
    STAGES: tl.constexpr,  # of the software pipeline through shared memory; 1 for none
    SEGMENTS: tl.constexpr,  # of a tile's positions; a thread adds up its elements of each first
    ADJACENT: tl.constexpr,  # contiguous elements that a thread adds up before others, so that no chain is long
    FLOAT64: tl.constexpr,  # sums are computed in float64
    CLUSTER: tl.constexpr,  # the CTAs that share a group are a cluster; the next tile is prefetched into registers
    SAME_STRIDES: tl.constexpr,  # all tensors have the same strides of channel and position
    WANT_INPUT: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    PHASE: tl.constexpr,  # of device.mailbox
):
    """Compute grad_input of all groups, and the partial sums of grad_weight and grad_bias.

    With g = dy·weight and x̂ = (x − mean)·rstd: grad_input = rstd·(g − mean(g) − x̂·mean(g·x̂)), the means over a group;
    grad_weight = Σ dy·x̂ and grad_bias = Σ dy over samples and positions.

    CTA group i takes the work items i, i + cta_groups, … It holds the groups of a work item in registers between its
    CTAs, so that the data is read once. Σ dy and Σ dy·x̂ of a channel over a tile's positions serve twice: written to
    ``partial`` they are added up over the tiles and samples by ``sum_partials``; times the weight and summed over the
    channels they give the group's sums.

    Where CTAs share a group they exchange these sums in float64: in a cluster through distributed shared memory, else
    (as float32) through the mailbox; then results are computed one iteration later (LAG), when the next tile is being
    reduced. Deterministic: the order of every sum follows from the tile alone; exchanged sums are added up by part.
    """
    pdl_launch_dependents()
    GROUPS: tl.constexpr = TILE.groups
    CHANNELS: tl.constexpr = TILE.channels
    POSITIONS: tl.constexpr = TILE.positions
    WORDS: tl.constexpr = TILE.words
    MAILBOX: tl.constexpr = TILE.parts > 1 and not CLUSTER
    LAG: tl.constexpr = 1 if (WANT_INPUT and MAILBOX) and PHASE == FUSED else 0
    FOLDED: tl.constexpr = (GROUPS, CHANNELS, SEGMENTS, POSITIONS // (SEGMENTS * ADJACENT), ADJACENT)
    input_strides = in_words(input_strides, TILE)
    grad_out_strides = in_words(grad_out_strides, TILE)
    grad_input_strides = in_words(grad_input_strides, TILE)
    cta_group, part, position_part, word, channels_in_group, in_group, word_in_group = cta_position(HxW, TILE)
    channel_in_group = (part // TILE.position_parts) * CHANNELS
    x_offsets = offsets_in_tile(input_strides, TILE)
    dy_offsets, output_offsets = x_offsets, x_offsets
    if not SAME_STRIDES:
        dy_offsets = offsets_in_tile(grad_out_strides, TILE)
        output_offsets = offsets_in_tile(grad_input_strides, TILE)
    reciprocal_count = 1.0 / (float64(TILE.D) * float64(HxW))
    items = N * group_blocks
    if TILE.offset64:
        items = int64(N) * group_blocks
        cta_group = int64(cta_group)
    work = (items, group, group_blocks)
    cta = (channel_in_group, word, word_in_group)
    x_tensor = (input, x_offsets, input_strides)
    dy_tensor = (grad_out, dy_offsets, grad_out_strides)
    if CLUSTER:
        exchange = init_cta_exchange()
        iteration = 0
        next_x = load_tile(x_tensor, cta_group, work, cta, TILE)
        next_dy = load_tile(dy_tensor, cta_group, work, cta, TILE)
        next_mean, next_rstd = _load_statistics(mean, rstd, cta_group, work, TILE, True)
        if weight is not None:
            next_w = _load_weight(weight, cta_group, work, channels_in_group, TILE, True)
    if LAG:
        previous_x = tl.zeros((GROUPS, CHANNELS, WORDS), input.dtype.element_ty)
        previous_dy = tl.zeros((GROUPS, CHANNELS, WORDS), grad_out.dtype.element_ty)
        previous_mean = tl.zeros((GROUPS,), tl.float32)
        previous_rstd = tl.zeros((GROUPS,), tl.float32)
        if weight is not None:
            previous_w = tl.zeros((GROUPS, CHANNELS), tl.float32)
    for item in tl.range(cta_group, items + LAG * cta_groups, cta_groups, num_stages=STAGES):
        result_item = item - LAG * cta_groups
        load_item = item + cta_groups if CLUSTER else item
        x = load_tile(x_tensor, load_item, work, cta, TILE)
        dy = load_tile(dy_tensor, load_item, work, cta, TILE)
        group_mean, group_rstd = _load_statistics(mean, rstd, load_item, work, TILE, CLUSTER)
        if weight is not None:
            w = _load_weight(weight, load_item, work, channels_in_group, TILE, CLUSTER)
        if CLUSTER:
            x, next_x = next_x, x
            dy, next_dy = next_dy, dy
            group_mean, next_mean = next_mean, group_mean
            group_rstd, next_rstd = next_rstd, group_rstd
            if weight is not None:
                w, next_w = next_w, w
        group_mean = to_float32(group_mean)
        group_rstd = to_float32(group_rstd)
        if weight is not None:
            w = to_float32(w)
        sample, groups, group_inside = item_groups(item, work, TILE)
        channel = first_channel(item, work, channel_in_group, TILE)
        channels, channel_inside = _item_channels(item, work, channels_in_group, TILE)
        if PHASE != APPLY:
            g = tl.reshape(unpack(dy, TILE.packing, FLOAT64), FOLDED)
            x_hat = tl.reshape(unpack(x, TILE.packing, FLOAT64), FOLDED)
            x_hat = (x_hat - expand_groups(group_mean)) * expand_groups(group_rstd)
            if TILE.masked:
                x_hat = tl.where(tl.reshape(in_group, FOLDED), x_hat, 0.0)  # 0·Inf must not reach the sums
            sum_g, sum_gx = sum_pair(g, g * x_hat, 4)
            sum_g, sum_gx = sum_pair(sum_g, sum_gx, 2)
            sum_g, sum_gx = sum_pair(sum_g, sum_gx, 2)
            target = partial + (int64(sample) * TILE.position_parts + position_part) * (group * TILE.D) + channels
            if WANT_WEIGHT:
                tl.store(target, sum_gx, mask=channel_inside)
                target += int64(N) * TILE.position_parts * (group * TILE.D)
            if WANT_BIAS:
                tl.store(target, sum_g, mask=channel_inside)
            if WANT_INPUT:
                if weight is not None:
                    sum_g = sum_g.to(tl.float64) * w
                    sum_gx = sum_gx.to(tl.float64) * w
                sum_g, sum_gx = sum_pair(sum_g, sum_gx, 1)
                if CLUSTER:
                    send_to_ctas(sum_g, sum_gx, exchange, part, iteration, 1, TILE.parts)
                elif MAILBOX:
                    if PHASE == FUSED:
                        pdl_wait()
                    statistic = int64(sample) * group + groups
                    publish(sum_g, sum_gx, slots + statistic * TILE.parts + part, group_inside)
        if WANT_INPUT and PHASE != REDUCE:
            if LAG:
                sample, groups, group_inside = item_groups(result_item, work, TILE)
                channel = first_channel(result_item, work, channel_in_group, TILE)
                x, previous_x = previous_x, x
                dy, previous_dy = previous_dy, dy
                group_mean, previous_mean = previous_mean, group_mean
                group_rstd, previous_rstd = previous_rstd, group_rstd
                if weight is not None:
                    w, previous_w = previous_w, w
            if CLUSTER:
                sum_g, sum_gx = sum_received(wait_for_ctas(exchange, iteration, 1, TILE.parts), TILE.parts)
                iteration += 1
            elif MAILBOX:
                all_slots, slot_mask = part_slots(slots, int64(sample) * group + groups, group_inside, TILE, 1)
                all_g, all_gx = receive(all_slots, slot_mask, PHASE == FUSED)
                sum_g = block_rematerialization(tl.sum(all_g, axis=1), GROUPS)
                sum_gx = block_rematerialization(tl.sum(all_gx, axis=1), GROUPS)
            mean_g = expand_groups(sum_g.to(tl.float64) * reciprocal_count)
            mean_gx = expand_groups(sum_gx.to(tl.float64) * reciprocal_count)
            channel_w = None
            if weight is not None:
                channel_w = expand_channels(w)
            dy_values = tl.reshape(unpack_acc_dtype(dy, TILE.packing), FOLDED)
            x_values = tl.reshape(unpack_acc_dtype(x, TILE.packing), FOLDED)
            x_mean, x_rstd = expand_groups(group_mean), expand_groups(group_rstd)
            result = input_gradient(dy_values, x_values, x_mean, x_rstd, channel_w, mean_g, mean_gx)
            result = tl.reshape(result, (GROUPS, CHANNELS, POSITIONS))
            start = tile_start(grad_input, sample, channel, word, grad_input_strides)
            mask = element_mask(group_inside, word_in_group, TILE)
            store_elements(start + output_offsets, result, mask, (GROUPS, CHANNELS, WORDS, 2), TILE.packing)
