"""The kernel of GroupNorm forward for contiguous (or strided) positions; ``contiguous_launches`` launches it."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.cluster_exchange import init_cta_exchange, received_from, send_to_ctas, wait_for_ctas
from normgrad.cuda.device.compiler_barriers import block_rematerialization
from normgrad.cuda.device.formulas import divide, merge_moments, normalize, remainder_term, split_mean
from normgrad.cuda.device.indexing import INTERPRETED, float64, float64_from_bits, int64
from normgrad.cuda.device.mailbox import APPLY, FUSED, REDUCE, part_slots, publish_float64, receive_float64
from normgrad.cuda.device.pack16 import store_elements, store_rounded, to_float32, unpack, unpack_acc_dtype
from normgrad.cuda.device.pdl import pdl_wait
from normgrad.cuda.group_norm.contiguous_addressing import (
    cta_position,
    element_mask,
    first_channel,
    in_words,
    item_groups,
    load_tile,
    offsets_in_tile,
    tile_start,
)

# Powers of two as the bits of a float32: 1, and the smallest and largest that have a normal reciprocal.
_ONE = tl.constexpr(0x3F800000)
_SMALLEST = tl.constexpr(0x00800000)
_LARGEST = tl.constexpr(0x7E800000)


@triton.jit
def _group_sums(values):
    """Sum [groups, channels, positions] by group; one group in one reduction, so that threads sum their own first."""
    if values.shape[0] == 1:
        result = tl.sum(tl.reshape(values, (1, values.shape[1] * values.shape[2])), axis=1)
    else:
        result = tl.sum(tl.sum(values, axis=2), axis=1)
    return result


@triton.jit
def _rsqrt_float64(value):
    """Return ``1 / √value`` of float64 to about 40 bits, in fewer instructions than a root and a division.

    The hardware's approximation, and one Newton step where that is finite.
    """
    if INTERPRETED:
        result = 1.0 / tl.sqrt(value)
    else:
        approximation = tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f64 $0, $1;", "=d,d", [value], tl.float64, is_pure=True, pack=1
        )
        error = tl.fma(-value * approximation, approximation, 1.0)
        result = tl.where(error == error, tl.fma(0.5 * approximation, error, approximation), approximation)
    return result


@triton.jit
def _power_of_two(rstd, mean):
    """Return the power of two below rstd and its reciprocal; 1 where its product with the mean overflows."""
    bits = tl.minimum(tl.maximum(rstd.to(tl.int32, bitcast=True) & 0x7F800000, _SMALLEST), _LARGEST)
    bits = tl.where(tl.abs(mean) * bits.to(tl.float32, bitcast=True) < float("inf"), bits, _ONE)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def normalize_groups(x, mean, rstd, w, b, SHARED: tl.constexpr):
    """Return ``(x − mean)·rstd·w + b`` of a tile; mean and rstd are [groups], w and b [groups, channels, 1] or None.

    SHARED groups have no deviations left from their sums, so x − mean is computed here. It is scaled by a power of two,
    and the rest of rstd is multiplied into the weight: two operations for each element, and neither factor leaves
    float32's range.
    """
    if x.dtype != tl.float64 and SHARED and w is not None:
        rounded_mean, remainder = split_mean(mean, tl.float32)
        power, reciprocal = _power_of_two(rstd.to(tl.float32), rounded_mean)
        term = remainder_term(remainder, rstd)[:, None, None] * w
        term = tl.where(tl.abs(term) < float("inf"), term, 0.0)
        if b is not None:
            term = term + b
        factor = (rstd * reciprocal).to(tl.float32)[:, None, None] * w
        result = (x * power[:, None, None] - (rounded_mean * power)[:, None, None]) * factor + term
    else:
        result = normalize(x, mean[:, None, None], rstd[:, None, None], w, b)
    return result


@triton.jit
def _part_count(part, HxW, TILE: tl.constexpr):
    """Return how many elements of a group a part holds, as float64."""
    position_left = HxW - (part % TILE.position_parts) * TILE.positions
    positions = tl.minimum(tl.maximum(position_left, 0), TILE.positions)
    channels = tl.minimum(tl.maximum(TILE.D - (part // TILE.position_parts) * TILE.channels, 0), TILE.channels)
    return positions.to(tl.float64) * channels.to(tl.float64)


@triton.jit
def _moments_from_cluster(received, HxW, count, reciprocal_count, TILE: tl.constexpr):
    """Return a group's mean and its sum of squares about it, from what the CTAs of a cluster have sent.

    Chan's formula: to each part's squares about its own mean comes its count times the squared distance of the means.
    """
    PARTS: tl.constexpr = TILE.parts
    total, squares = received_from(0, received)
    for part in tl.static_range(1, PARTS):
        part_sum, part_squares = received_from(part, received)
        total += part_sum
        squares += part_squares
    group_mean = divide(total, count, reciprocal_count)
    for part in tl.static_range(PARTS):
        part_sum, _ = received_from(part, received)
        part_count = _part_count(int64(part), HxW, TILE)
        deviation = part_sum - group_mean * part_count
        squares += deviation * deviation * (1.0 / part_count)
    return group_mean, squares


@triton.jit
def group_norm_forward_contiguous(
    input,  # [N, C, HxW]
    weight,  # [C], or None
    bias,  # [C], or None
    output,  # [N, C, HxW]
    mean,  # [N, group]
    rstd,  # [N, group]
    slots,  # mailbox: int64 [N, group, parts, 2]; None without one
    N,
    group,
    group_blocks,  # work items of a sample
    HxW,
    eps_bits,  # of a float64
    cta_groups,
    input_strides,  # of sample and channel, in vectors, and of position
    output_strides,
    mean_stride,
    rstd_stride,
    TILE: tl.constexpr,  # tiles.GroupTileSpec
    STAGES: tl.constexpr,  # of the software pipeline through shared memory; 1 for none
    SEGMENTS: tl.constexpr,  # of a group's tile whose squares are added up first
    CLUSTER: tl.constexpr,  # the CTAs that share a group are a cluster; the next tile is prefetched into registers
    PHASE: tl.constexpr,  # of device.mailbox
):
    """Compute output = (x − mean)·rstd·weight + bias, and mean and rstd of all groups.

    CTA groups walk over the work items as in the backward kernel, and a tile stays in registers between its two passes:
    the sum, in float64, since an output near the mean is only as accurate as the mean is; then the squares about the
    mean. Where CTAs share a group, each takes the squares about the mean of its own part, and the moments of the parts
    are combined by Chan's formula; in a cluster through distributed shared memory, else through the mailbox and with
    the results one iteration later (LAG). Deterministic: moments are combined by part, not by arrival.
    """
    GROUPS: tl.constexpr = TILE.groups
    CHANNELS: tl.constexpr = TILE.channels
    WORDS: tl.constexpr = TILE.words
    MAILBOX: tl.constexpr = TILE.parts > 1 and not CLUSTER
    LAG: tl.constexpr = 1 if MAILBOX and PHASE == FUSED else 0
    # Sums of up to 512 terms are computed in float64: one float32 rounding would be a visible share of the error bound.
    FLOAT64: tl.constexpr = (
        input.dtype.element_ty == tl.float32 and TILE.parts == 1
    ) and CHANNELS * TILE.positions <= 512
    input_strides = in_words(input_strides, TILE)
    output_strides = in_words(output_strides, TILE)
    cta_group, part, _, word, channels_in_group, in_group, word_in_group = cta_position(HxW, TILE)
    channel_in_group = (part // TILE.position_parts) * CHANNELS
    x_tensor = (input, offsets_in_tile(input_strides, TILE), input_strides)
    output_offsets = offsets_in_tile(output_strides, TILE)
    count = float64(TILE.D) * float64(HxW)
    eps = float64_from_bits(eps_bits)
    reciprocal_count = 1.0 / count
    part_count = _part_count(int64(part), HxW, TILE)
    reciprocal_part_count = 1.0 / part_count
    part_counts = _part_count(int64(tl.arange(0, TILE.padded_parts)), HxW, TILE)[None, :]
    reciprocal_part_counts = 1.0 / part_counts
    items = N * group_blocks
    if TILE.offset64:
        items = int64(N) * group_blocks
        cta_group = int64(cta_group)
    work = (items, group, group_blocks)
    cta = (channel_in_group, word, word_in_group)
    if CLUSTER:
        exchange = init_cta_exchange()
        iteration = 0
        next_x = load_tile(x_tensor, cta_group, work, cta, TILE)
    if LAG:
        previous_x = tl.zeros((GROUPS, CHANNELS, WORDS), input.dtype.element_ty)
    for item in tl.range(cta_group, items + LAG * cta_groups, cta_groups, num_stages=STAGES):
        result_item = item - LAG * cta_groups
        sample, groups, group_inside = item_groups(item, work, TILE)
        channel = first_channel(item, work, channel_in_group, TILE)
        load_item = item + cta_groups if CLUSTER else item
        x = load_tile(x_tensor, load_item, work, cta, TILE)
        if CLUSTER:
            x, next_x = next_x, x
        if PHASE != APPLY:
            total = _group_sums(unpack(x, TILE.packing, FLOAT64).to(tl.float64))
            if GROUPS == 1:  # or Triton would convert the tile to the layout of the sum
                total = block_rematerialization(total, GROUPS)
            group_mean = divide(total, part_count, reciprocal_part_count)
            values = unpack(x, TILE.packing, FLOAT64)
            rounded_mean, remainder = split_mean(group_mean, values.dtype)
            deviation = values - rounded_mean[:, None, None]
            if TILE.masked:
                deviation = tl.where(in_group, deviation, 0.0)
            squares = deviation * deviation
            if SEGMENTS > 1:  # no thread adds up a long chain
                SEGMENTED: tl.constexpr = (GROUPS, SEGMENTS, CHANNELS * TILE.positions // SEGMENTS)
                squares = tl.sum(tl.reshape(squares, SEGMENTED), axis=1)[:, None, :]
            else:
                squares = squares.to(tl.float64)
            squares = _group_sums(squares).to(tl.float64) - remainder * remainder * part_count
            squares = tl.where(squares < 0.0, 0.0, squares)
            if CLUSTER:
                send_to_ctas(total, squares, exchange, part, iteration, 1, TILE.parts)
            elif MAILBOX:
                statistic = int64(sample) * group + groups
                if PHASE == FUSED:
                    pdl_wait()
                publish_float64(total, squares, slots + (statistic * TILE.parts + part) * 2, group_inside)
        if PHASE != REDUCE:
            if LAG:
                sample, groups, group_inside = item_groups(result_item, work, TILE)
                channel = first_channel(result_item, work, channel_in_group, TILE)
                x, previous_x = previous_x, x
            channels = groups[:, None] * TILE.D + channels_in_group[None, :]
            channel_inside = group_inside[:, None] & (channels_in_group < TILE.D)[None, :]
            if CLUSTER:
                received = wait_for_ctas(exchange, iteration, 1, TILE.parts)
                group_mean, squares = _moments_from_cluster(received, HxW, count, reciprocal_count, TILE)
                iteration += 1
            elif MAILBOX:
                all_slots, slot_mask = part_slots(slots, int64(sample) * group + groups, group_inside, TILE, 2)
                sums, all_squares = receive_float64(all_slots, slot_mask, PHASE == FUSED)
                group_mean, squares = merge_moments(
                    sums, all_squares, part_counts, reciprocal_part_counts, slot_mask, count, reciprocal_count
                )
                group_mean = block_rematerialization(group_mean, GROUPS)
                squares = block_rematerialization(squares, GROUPS)
            group_rstd = _rsqrt_float64(squares * reciprocal_count + eps)
            w = None
            b = None
            if weight is not None:
                w = to_float32(tl.load(weight + channels, mask=channel_inside, other=0.0))[:, :, None]
            if bias is not None:
                b = to_float32(tl.load(bias + channels, mask=channel_inside, other=0.0))[:, :, None]
            result = normalize_groups(unpack_acc_dtype(x, TILE.packing), group_mean, group_rstd, w, b, LAG or CLUSTER)
            start = tile_start(output, sample, channel, word, output_strides)
            mask = element_mask(group_inside, word_in_group, TILE)
            store_elements(start + output_offsets, result, mask, (GROUPS, CHANNELS, WORDS, 2), TILE.packing)
            statistic = int64(sample) * group + groups
            first_part = group_inside & (part == 0)
            store_rounded(mean + statistic * mean_stride, group_mean, first_part)
            store_rounded(rstd + statistic * rstd_stride, group_rstd, first_part)
