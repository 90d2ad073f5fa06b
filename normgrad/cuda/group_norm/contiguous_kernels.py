"""The kernels of GroupNorm for any strides of sample, channel and position; ``launches`` launches them.

TILE is a ``tiles.GroupTileSpec``. A tile is [groups, channels, words]: several whole groups of a sample where they are
small, or the part of one group that a CTA of a CTA group holds. A *work item* is what a CTA group does at a time: the
tile's groups of a sample; a sample has ``group_blocks`` of them. A *word* is an element or a packed pair of 16-bit
elements; pointers, offsets and strides count words.

``work`` is (items, group, group_blocks): the number of work items, the groups of a sample, and blocks of these.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device import cluster_exchange, formulas, mailbox
from normgrad.cuda.device.compiler_barriers import block_rematerialization, opaque_zero
from normgrad.cuda.device.indexing import INTERPRETED, float64, float64_from_bits, int64
from normgrad.cuda.device.mailbox import APPLY, FUSED, REDUCE
from normgrad.cuda.device.pack16 import store_elements, store_rounded, to_float32, unpack, unpack_acc_dtype
from normgrad.cuda.device.pdl import pdl_launch_dependents, pdl_wait
from normgrad.cuda.device.sums import store_partials, sum_pair


@triton.jit
def in_words(strides, TILE: tl.constexpr):
    """Return (sample, channel, position) strides in words; the host passes the first two in vectors.

    The multiplication shows the compiler that vectors divide them.
    """
    sample, channel, position = strides
    if TILE.offset64:
        channel = int64(channel)
    return int64(sample) * TILE.vector, channel * TILE.vector, position


@triton.jit
def cta_position(HxW, TILE: tl.constexpr):
    """Return the CTA's group and part, what it holds of a group for ``load_tile``, its channels there, and a mask.

    The mask says which elements of a tile the groups have: all, but where the sizes do not divide.
    """
    PER_WORD: tl.constexpr = TILE.positions // TILE.words
    program = tl.program_id(0)
    part = program % TILE.parts
    position_part = part % TILE.position_parts
    channels = (part // TILE.position_parts) * TILE.channels + tl.arange(0, TILE.channels)
    position = int64(position_part) * TILE.positions
    in_group = _mask_in_group(position, channels, HxW, TILE.positions, TILE)
    word, word_in_group = position, in_group
    if PER_WORD > 1:
        word = int64(position_part) * TILE.words
        word_in_group = _mask_in_group(word, channels, HxW // PER_WORD, TILE.words, TILE)
    cta = ((part // TILE.position_parts) * TILE.channels, word, word_in_group)
    return program // TILE.parts, part, cta, channels, in_group


@triton.jit
def _mask_in_group(first, channels, size, LENGTH: tl.constexpr, TILE: tl.constexpr):
    """Return which of [groups, channels, LENGTH] are below D channels and ``size`` elements or words of a channel."""
    GROUPS: tl.constexpr = TILE.groups
    CHANNELS: tl.constexpr = TILE.channels
    VECTOR: tl.constexpr = TILE.vector
    left = tl.multiple_of(tl.minimum(size - first, LENGTH).to(tl.int32), VECTOR)
    inside = tl.arange(0, LENGTH) < left
    return tl.broadcast_to((channels < TILE.D)[None, :, None] & inside[None, None, :], (GROUPS, CHANNELS, LENGTH))


@triton.jit
def offsets_in_tile(strides, TILE: tl.constexpr):
    """Return the offsets [groups, channels, words] of a tile's words, in 64 bits only where they need them."""
    _, channel_stride, position_stride = strides
    words = tl.arange(0, TILE.words)
    channels = tl.arange(0, TILE.groups)[:, None] * TILE.D + tl.arange(0, TILE.channels)[None, :]
    if TILE.offset64:
        words = words.to(tl.int64)
        channels = channels.to(tl.int64)
    return channels[:, :, None] * channel_stride + words[None, None, :] * position_stride


@triton.jit
def item_groups(item, work, TILE: tl.constexpr):
    """Return the sample and the groups of a work item, and which of the groups there are."""
    items, group, group_blocks = work
    groups = (item % group_blocks) * TILE.groups + tl.arange(0, TILE.groups)
    return item // group_blocks, groups, (groups < group) & (item >= 0) & (item < items)


@triton.jit
def first_channel(item, work, cta, TILE: tl.constexpr):
    """Return the channel of the sample with which the CTA's tile of a work item begins."""
    return (item % work[2]) * TILE.groups * TILE.D + cta[0]


@triton.jit
def tile_pointers(tensor, sample, channel, group_inside, cta, TILE: tl.constexpr):
    """Return the addresses [groups, channels, words] of a tile from a channel on, and which of them there are.

    ``tensor`` is (pointer, offsets of ``offsets_in_tile``, strides in words), ``cta`` from ``cta_position``. The mask
    is [groups, 1, 1] where tiles divide the groups.
    """
    pointer, offsets, strides = tensor
    sample_stride, channel_stride, position_stride = strides
    _, word, word_in_group = cta
    start = pointer + int64(sample) * sample_stride + int64(channel) * channel_stride + int64(word) * position_stride
    mask = group_inside[:, None, None]
    if TILE.masked:
        mask = mask & word_in_group
    return start + offsets, mask


@triton.jit
def load_tile(tensor, item, work, cta, TILE: tl.constexpr):
    """Load the CTA's tile of a work item, [groups, channels, words]."""
    sample, _, group_inside = item_groups(item, work, TILE)
    channel = first_channel(item, work, cta, TILE)
    pointers, mask = tile_pointers(tensor, sample, channel, group_inside, cta, TILE)
    return tl.load(pointers, mask=mask, other=0)


# The backward kernel sums a tile folded to five dimensions: groups, channels, segments, positions, adjacent positions.
# Values beside it get their trailing dimensions one at a time: so Triton lays them out over the threads as it does the
# sums over the tile's last three dimensions, and needs no layout conversion.


@triton.jit
def expand_channels(values):
    """Expand values of channels [groups, channels] to five dimensions."""
    return values[:, :, None][:, :, None, :][:, :, :, :, None]


@triton.jit
def expand_groups(values):
    """Expand values of groups [groups] to five dimensions."""
    return expand_channels(values[:, None])


@triton.jit
def _item_channels(item, work, channels_in_group, TILE: tl.constexpr):
    """Return the channel indices [groups, channels] of a work item's tile, and which of them there are."""
    _, groups, group_inside = item_groups(item, work, TILE)
    channels = groups[:, None] * TILE.D + channels_in_group[None, :]
    return channels, group_inside[:, None] & (channels_in_group < TILE.D)[None, :]


@triton.jit
def _load_item(inputs, item, work, cta, channels_in_group, TILE: tl.constexpr, AHEAD: tl.constexpr):
    """Load a work item: x and dy as ``load_tile`` does, mean and rstd [groups], and the weights [groups, channels].

    ``inputs`` are (input and grad_out as for ``load_tile``, mean, rstd, weight); without a weight the weights are an
    empty tuple. AHEAD: they are needed an iteration later.
    """
    x_tensor, dy_tensor, mean, rstd, weight = inputs
    x = load_tile(x_tensor, item, work, cta, TILE)
    dy = load_tile(dy_tensor, item, work, cta, TILE)
    sample, groups, group_inside = item_groups(item, work, TILE)
    statistic = int64(sample) * work[1] + groups
    if AHEAD:  # ptxas would load warp-uniform addresses into uniform registers, and stall the warp an iteration early
        statistic += opaque_zero()
    group_mean = tl.load(mean + statistic, mask=group_inside, other=0.0)
    group_rstd = tl.load(rstd + statistic, mask=group_inside, other=0.0)
    w = ()
    if weight is not None:
        channels, channel_inside = _item_channels(item, work, channels_in_group, TILE)
        if AHEAD:  # as above; times 16, so that the loads are still vectorized
            channels += 16 * opaque_zero()
        w = tl.load(weight + channels, mask=channel_inside, other=0.0)
    return x, dy, group_mean, group_rstd, w


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
    SEGMENTS: tl.constexpr,  # of a tile's positions; a thread adds up its elements of each first
    ADJACENT: tl.constexpr,  # contiguous elements that a thread adds up before others, so that no chain is long
    FLOAT64: tl.constexpr,  # sums are computed in float64
    SAME_STRIDES: tl.constexpr,  # all tensors have the same strides of channel and position
    WANT: tl.constexpr,  # steps.WantedGradients
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
    MAILBOX: tl.constexpr = TILE.parts > 1 and not TILE.cluster
    LAG: tl.constexpr = 1 if (WANT.input and MAILBOX) and PHASE == FUSED else 0
    FOLDED: tl.constexpr = (GROUPS, CHANNELS, SEGMENTS, POSITIONS // (SEGMENTS * ADJACENT), ADJACENT)
    input_strides = in_words(input_strides, TILE)
    grad_out_strides = in_words(grad_out_strides, TILE)
    grad_input_strides = in_words(grad_input_strides, TILE)
    cta_group, part, cta, channels_in_group, in_group = cta_position(HxW, TILE)
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
    inputs = ((input, x_offsets, input_strides), (grad_out, dy_offsets, grad_out_strides), mean, rstd, weight)
    output_tensor = (grad_input, output_offsets, grad_input_strides)
    if TILE.cluster:
        exchange = cluster_exchange.init_cta_exchange()
        iteration = 0
        ahead = _load_item(inputs, cta_group, work, cta, channels_in_group, TILE, True)
    if LAG:
        zeros = tl.zeros((GROUPS,), tl.float32)
        previous_x = tl.zeros((GROUPS, CHANNELS, WORDS), input.dtype.element_ty)
        previous_dy = tl.zeros((GROUPS, CHANNELS, WORDS), grad_out.dtype.element_ty)
        previous_w = tl.zeros((GROUPS, CHANNELS), tl.float32) if weight is not None else ()
        previous = (previous_x, previous_dy, zeros, zeros, previous_w)
    for item in tl.range(cta_group, items + LAG * cta_groups, cta_groups, num_stages=TILE.stages):
        result_item = item - LAG * cta_groups
        load_item = item + cta_groups if TILE.cluster else item
        loaded = _load_item(inputs, load_item, work, cta, channels_in_group, TILE, TILE.cluster)
        if TILE.cluster:
            loaded, ahead = ahead, loaded
        x, dy, group_mean, group_rstd, w = loaded
        group_mean = to_float32(group_mean)
        group_rstd = to_float32(group_rstd)
        if weight is not None:
            w = to_float32(w)
        sample, groups, group_inside = item_groups(item, work, TILE)
        channel = first_channel(item, work, cta, TILE)
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
            row = int64(sample) * TILE.position_parts + part % TILE.position_parts
            target = partial + row * (group * TILE.D) + channels
            store_partials(target, int64(N) * TILE.position_parts, group * TILE.D, sum_gx, sum_g, channel_inside, WANT)
            if WANT.input:
                if weight is not None:
                    sum_g = sum_g.to(tl.float64) * w
                    sum_gx = sum_gx.to(tl.float64) * w
                sum_g, sum_gx = sum_pair(sum_g, sum_gx, 1)
                if TILE.cluster:
                    cluster_exchange.send_to_ctas(sum_g, sum_gx, exchange, part, iteration, 1, TILE.parts)
                elif MAILBOX:
                    if PHASE == FUSED:
                        pdl_wait()
                    statistic = int64(sample) * group + groups
                    mailbox.publish(sum_g, sum_gx, slots + statistic * TILE.parts + part, group_inside)
        if WANT.input and PHASE != REDUCE:
            if LAG:
                sample, groups, group_inside = item_groups(result_item, work, TILE)
                channel = first_channel(result_item, work, cta, TILE)
                current, previous = previous, (x, dy, group_mean, group_rstd, w)
                x, dy, group_mean, group_rstd, w = current
            if TILE.cluster:
                received = cluster_exchange.wait_for_ctas(exchange, iteration, 1, TILE.parts)
                sum_g, sum_gx = cluster_exchange.sum_received(received, TILE.parts)
                iteration += 1
            elif MAILBOX:
                statistic = int64(sample) * group + groups
                sum_g, sum_gx = mailbox.receive_totals(slots, statistic, group_inside, PHASE == FUSED, False, TILE)
            mean_g = expand_groups(sum_g.to(tl.float64) * reciprocal_count)
            mean_gx = expand_groups(sum_gx.to(tl.float64) * reciprocal_count)
            channel_w = expand_channels(w) if weight is not None else None
            dy_values = tl.reshape(unpack_acc_dtype(dy, TILE.packing), FOLDED)
            x_values = tl.reshape(unpack_acc_dtype(x, TILE.packing), FOLDED)
            x_mean, x_rstd = expand_groups(group_mean), expand_groups(group_rstd)
            result = formulas.input_gradient(dy_values, x_values, x_mean, x_rstd, channel_w, mean_g, mean_gx)
            result = tl.reshape(result, (GROUPS, CHANNELS, POSITIONS))
            pointers, mask = tile_pointers(output_tensor, sample, channel, group_inside, cta, TILE)
            store_elements(pointers, result, mask, TILE.packing)


# Powers of two as the bits of a float32: 1, the step from one to the next, and the largest with a normal reciprocal.
_ONE = tl.constexpr(0x3F800000)
_NEXT = tl.constexpr(0x00800000)
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
    """Return the power of two above rstd and its reciprocal; 1 where its product with the mean overflows.

    rstd times the reciprocal is at most 1, so that its product with the weight does not overflow.
    """
    bits = tl.minimum(rstd.to(tl.int32, bitcast=True) & 0x7F800000, _LARGEST - _NEXT) + _NEXT
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
        rounded_mean, remainder = formulas.split_mean(mean, tl.float32)
        power, reciprocal = _power_of_two(rstd.to(tl.float32), rounded_mean)
        term = formulas.remainder_term(remainder, rstd)[:, None, None] * w
        term = tl.where(tl.abs(term) < float("inf"), term, 0.0)
        if b is not None:
            term = term + b
        factor = (rstd * reciprocal).to(tl.float32)[:, None, None] * w
        result = (x * power[:, None, None] - (rounded_mean * power)[:, None, None]) * factor + term
    else:
        result = formulas.normalize(x, mean[:, None, None], rstd[:, None, None], w, b)
    return result


@triton.jit
def _load_parameter(pointer, channels, inside):
    """Load a parameter of a tile's channels, float32 [groups, channels, 1]."""
    return to_float32(tl.load(pointer + channels, mask=inside, other=0.0))[:, :, None]


@triton.jit
def _part_count(part, HxW, TILE: tl.constexpr):
    """Return how many elements of a group a part holds, as float64."""
    position_left = HxW - (part % TILE.position_parts) * TILE.positions
    positions = tl.minimum(tl.maximum(position_left, 0), TILE.positions)
    channels = tl.minimum(tl.maximum(TILE.D - (part // TILE.position_parts) * TILE.channels, 0), TILE.channels)
    return positions.to(tl.float64) * channels.to(tl.float64)


@triton.jit
def _moments_from_cluster(received, HxW, count, TILE: tl.constexpr):
    """Return a group's mean and its sum of squares about it, from what the CTAs of a cluster have sent.

    Chan's formula: to each part's squares about its own mean comes its count times the squared distance of the means.
    """
    PARTS: tl.constexpr = TILE.parts
    total, squares = cluster_exchange.received_from(0, received)
    for part in tl.static_range(1, PARTS):
        part_sum, part_squares = cluster_exchange.received_from(part, received)
        total += part_sum
        squares += part_squares
    group_mean = formulas.divide(total, count[0], count[1])
    for part in tl.static_range(PARTS):
        part_sum, _ = cluster_exchange.received_from(part, received)
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
    SEGMENTS: tl.constexpr,  # of a group's tile whose squares are added up first
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
    MAILBOX: tl.constexpr = TILE.parts > 1 and not TILE.cluster
    LAG: tl.constexpr = 1 if MAILBOX and PHASE == FUSED else 0
    # Sums of up to 512 terms are computed in float64: one float32 rounding would be a visible share of the error bound.
    FLOAT64: tl.constexpr = (
        input.dtype.element_ty == tl.float32 and TILE.parts == 1
    ) and CHANNELS * TILE.positions <= 512
    input_strides = in_words(input_strides, TILE)
    output_strides = in_words(output_strides, TILE)
    cta_group, part, cta, channels_in_group, in_group = cta_position(HxW, TILE)
    x_tensor = (input, offsets_in_tile(input_strides, TILE), input_strides)
    output_tensor = (output, offsets_in_tile(output_strides, TILE), output_strides)
    count = float64(TILE.D) * float64(HxW)
    eps = float64_from_bits(eps_bits)
    group_count = (count, 1.0 / count)
    part_count = _part_count(int64(part), HxW, TILE)
    reciprocal_part_count = 1.0 / part_count
    all_counts = _part_count(int64(tl.arange(0, TILE.padded_parts)), HxW, TILE)[None, :]
    part_counts = (all_counts, 1.0 / all_counts)
    items = N * group_blocks
    if TILE.offset64:
        items = int64(N) * group_blocks
        cta_group = int64(cta_group)
    work = (items, group, group_blocks)
    if TILE.cluster:
        exchange = cluster_exchange.init_cta_exchange()
        iteration = 0
        next_x = load_tile(x_tensor, cta_group, work, cta, TILE)
    if LAG:
        previous_x = tl.zeros((GROUPS, CHANNELS, WORDS), input.dtype.element_ty)
    for item in tl.range(cta_group, items + LAG * cta_groups, cta_groups, num_stages=TILE.stages):
        result_item = item - LAG * cta_groups
        sample, groups, group_inside = item_groups(item, work, TILE)
        channel = first_channel(item, work, cta, TILE)
        load_item = item + cta_groups if TILE.cluster else item
        x = load_tile(x_tensor, load_item, work, cta, TILE)
        if TILE.cluster:
            x, next_x = next_x, x
        if PHASE != APPLY:
            total = _group_sums(unpack(x, TILE.packing, FLOAT64).to(tl.float64))
            if GROUPS == 1:  # or Triton would convert the tile to the layout of the sum
                total = block_rematerialization(total)
            group_mean = formulas.divide(total, part_count, reciprocal_part_count)
            values = unpack(x, TILE.packing, FLOAT64)
            rounded_mean, remainder = formulas.split_mean(group_mean, values.dtype)
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
            if TILE.cluster:
                cluster_exchange.send_to_ctas(total, squares, exchange, part, iteration, 1, TILE.parts)
            elif MAILBOX:
                statistic = int64(sample) * group + groups
                if PHASE == FUSED:
                    pdl_wait()
                mailbox.publish_float64(total, squares, slots + (statistic * TILE.parts + part) * 2, group_inside)
        if PHASE != REDUCE:
            if LAG:
                sample, groups, group_inside = item_groups(result_item, work, TILE)
                channel = first_channel(result_item, work, cta, TILE)
                x, previous_x = previous_x, x
            channels = groups[:, None] * TILE.D + channels_in_group[None, :]
            channel_inside = group_inside[:, None] & (channels_in_group < TILE.D)[None, :]
            if TILE.cluster:
                received = cluster_exchange.wait_for_ctas(exchange, iteration, 1, TILE.parts)
                group_mean, squares = _moments_from_cluster(received, HxW, group_count, TILE)
                iteration += 1
            elif MAILBOX:
                statistic = int64(sample) * group + groups
                group_mean, squares = mailbox.receive_moments(
                    slots, statistic, group_inside, part_counts, group_count, PHASE == FUSED, TILE
                )
            group_rstd = _rsqrt_float64(formulas.nan_where_infinite(squares) * group_count[1] + eps)
            w = _load_parameter(weight, channels, channel_inside) if weight is not None else None
            b = _load_parameter(bias, channels, channel_inside) if bias is not None else None
            result = normalize_groups(
                unpack_acc_dtype(x, TILE.packing), group_mean, group_rstd, w, b, LAG or TILE.cluster
            )
            pointers, mask = tile_pointers(output_tensor, sample, channel, group_inside, cta, TILE)
            store_elements(pointers, result, mask, TILE.packing)
            statistic = int64(sample) * group + groups
            first_part = group_inside & (part == 0)
            store_rounded(mean + statistic * mean_stride, group_mean, first_part)
            store_rounded(rstd + statistic * rstd_stride, group_rstd, first_part)
