"""The kernels of GroupNorm for contiguous channels; ``launches`` launches them.

A group's channels are interleaved with those of other groups, so a CTA that held a whole group would read scattered
memory. Instead a first launch reduces blocks of contiguous channels, whatever groups they belong to, and a last one
computes the results from the sums of each group. It reads the data again, in reverse order: what was read last is still
in the L2 cache. Forward, a small launch between the two combines the moments of each group.

TILE is a ``tiles.ChannelsLastTileSpec``, ENTRIES a ``tiles.EntrySpec``. A block has TILE.channels channels: several
whole groups, a part of one, or an end of one and the beginning of the next. A tile is [positions, words] of a block; a
*word* is an element or a packed pair of 16-bit elements along the channels, and pointers, offsets and strides count
words. The positions of a sample are split into parts of several tiles.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device import mailbox, pack16
from normgrad.cuda.device.formulas import divide, input_gradient, nan_where_infinite, normalize
from normgrad.cuda.device.indexing import float64, float64_from_bits, int64, tile_offsets
from normgrad.cuda.device.pack16 import UNPACKED
from normgrad.cuda.device.pdl import pdl_launch_dependents, pdl_wait
from normgrad.cuda.device.sums import compensated_add, compensated_total, finite_median, store_partials, sum_pair


@triton.jit
def cta_work(program, blocks, parts, TILE: tl.constexpr):
    """Return the sample, the part of its positions and the block of channels of a program; the blocks go fastest."""
    block = program % blocks
    if TILE.offset64:
        block = int64(block)
    return program // (parts * blocks), program // blocks % parts, block


@triton.jit
def channel_count(group, TILE: tl.constexpr):
    """Return the number of channels."""
    C = group * TILE.D
    if TILE.offset64:
        C = int64(group) * TILE.D
    return C


@triton.jit
def offsets_in_tile(strides, TILE: tl.constexpr):
    """Return the offsets [positions, words] of a tile's words; strides are of sample, channel and position."""
    _, channel_stride, position_stride = strides
    return tile_offsets((position_stride, channel_stride), TILE.positions, TILE.words, TILE.offset64)


@triton.jit
def tile_start(pointer, sample, position, block, strides, TILE: tl.constexpr):
    """Return the address of a tile's first word."""
    sample_stride, channel_stride, position_stride = strides
    word = block * TILE.words
    return pointer + int64(sample) * sample_stride + int64(word) * channel_stride + int64(position) * position_stride


@triton.jit
def element_mask(positions_left, block, C, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Return which of [positions, SIZE] there are, where SIZE is TILE.channels or TILE.words."""
    POSITIONS: tl.constexpr = TILE.positions
    left = (C - block * TILE.channels) // (TILE.channels // SIZE)
    mask = tl.full((POSITIONS, SIZE), True, tl.int1)
    if TILE.masked:
        positions = tl.arange(0, POSITIONS) < tl.minimum(positions_left, POSITIONS).to(tl.int32)
        mask = positions[:, None] & (tl.arange(0, SIZE) < left)[None, :]
    return mask


@triton.jit
def load_channels(pointer, index, inside):
    """Load a parameter or a statistic of each channel of a block, float32 [1, channels]."""
    return pack16.to_float32(tl.load(pointer + index, mask=inside, other=0.0))[None, :]


@triton.jit
def sum_within_threads(first, second, TILE: tl.constexpr):
    """Sum two tiles [positions, channels] to [rows, channels] each; different threads hold different rows."""
    SHAPE: tl.constexpr = (TILE.positions // TILE.rows, TILE.rows, TILE.channels)
    return sum_pair(tl.reshape(first, SHAPE), tl.reshape(second, SHAPE), 0)


@triton.jit
def block_groups(block, group, TILE: tl.constexpr):
    """Return TILE.groups groups from a block's first channel on, and which of them have channels in the block."""
    begin = block * TILE.channels
    groups = begin // TILE.D + tl.arange(0, TILE.groups)
    return groups, (groups < group) & (groups * TILE.D < begin + TILE.channels)


@triton.jit
def sum_by_group(first, second, block, TILE: tl.constexpr):
    """Sum two values for each channel of a block, [channels], over the channels of each of its groups, [groups]."""
    D: tl.constexpr = TILE.D
    GROUPS: tl.constexpr = TILE.groups
    if TILE.channels % D == 0:
        first = tl.reshape(first, (GROUPS, D))
        second = tl.reshape(second, (GROUPS, D))
    else:
        begin = block * TILE.channels
        member = ((begin + tl.arange(0, TILE.channels)) // D)[None, :] == (begin // D + tl.arange(0, GROUPS))[:, None]
        first = tl.where(member, first[None, :], 0.0)
        second = tl.where(member, second[None, :], 0.0)
    return sum_pair(first, second, 1)


@triton.jit
def expand_to_channels(values, block, TILE: tl.constexpr):
    """Expand values of a block's groups, [groups], to its channels, [channels]."""
    begin = block * TILE.channels
    group_in_block = (begin + tl.arange(0, TILE.channels)) // TILE.D - begin // TILE.D
    return tl.gather(values, tl.minimum(group_in_block, TILE.groups - 1), 0)


@triton.jit
def entry_of_block(sample, groups, part, block, group, ENTRIES: tl.constexpr):
    """Return the indices of the entries of a block's groups for a part."""
    row = (int64(sample) * group + groups) * ENTRIES.parts + part
    return row * ENTRIES.blocks_per_group + block - groups * ENTRIES.D // ENTRIES.channels


@triton.jit
def entries_of_groups(begin, sample, groups, group_inside, group, COUNT: tl.constexpr, ENTRIES: tl.constexpr):
    """Return the indices [groups, COUNT] of the groups' entries from ``begin`` on, and which of them there are."""
    PER_GROUP: tl.constexpr = ENTRIES.parts * ENTRIES.blocks_per_group
    entry = (begin + tl.arange(0, COUNT))[None, :]
    blocks = (groups * ENTRIES.D + ENTRIES.D - 1) // ENTRIES.channels - groups * ENTRIES.D // ENTRIES.channels + 1
    inside = group_inside[:, None] & (entry < PER_GROUP) & (entry % ENTRIES.blocks_per_group < blocks[:, None])
    return (int64(sample) * group + groups)[:, None] * PER_GROUP + entry, inside


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
    FLOAT64: tl.constexpr,  # sums are computed in float64
    WANT: tl.constexpr,  # steps.WantedGradients
):
    """Reduce one part of the positions of one block of channels a program.

    Every thread keeps float32 sums of its own with a compensation term, or float64 ones; a tree adds up the threads of
    a channel at the end. The channels' sums go to ``partial`` for the weight gradients; times the weight and summed by
    group they go to ``sums``. No two programs write the same element, so the result is deterministic.
    """
    pdl_launch_dependents()
    CHANNELS: tl.constexpr = TILE.channels
    ROWS: tl.constexpr = TILE.rows
    ACC_DTYPE: tl.constexpr = tl.float64 if FLOAT64 else tl.float32
    C = channel_count(group, TILE)
    sample, part, block = cta_work(tl.program_id(0), blocks, ENTRIES.parts, TILE)
    channels = block * CHANNELS + tl.arange(0, CHANNELS)
    channel_inside = channels < C
    statistic = int64(sample) * group + channels // TILE.D
    channel_mean = load_channels(mean, statistic, channel_inside)
    channel_rstd = load_channels(rstd, statistic, channel_inside)
    begin = int64(part) * (TILE.positions * TILE.steps)
    x_pointers = tile_start(input, sample, begin, block, input_strides, TILE)
    x_pointers = x_pointers + offsets_in_tile(input_strides, TILE)
    dy_pointers = tile_start(grad_out, sample, begin, block, grad_out_strides, TILE)
    dy_pointers = dy_pointers + offsets_in_tile(grad_out_strides, TILE)
    total_g = tl.zeros((ROWS, CHANNELS), ACC_DTYPE)
    total_gx = tl.zeros((ROWS, CHANNELS), ACC_DTYPE)
    compensation_g = tl.zeros((ROWS, CHANNELS), tl.float32)
    compensation_gx = tl.zeros((ROWS, CHANNELS), tl.float32)
    for step in tl.range(0, TILE.steps, num_stages=TILE.stages):
        left = HxW - begin - step * TILE.positions
        mask = element_mask(left, block, C, TILE.words, TILE)
        x = tl.load(x_pointers + int64(step) * TILE.positions * input_strides[2], mask=mask, other=0)
        dy = tl.load(dy_pointers + int64(step) * TILE.positions * grad_out_strides[2], mask=mask, other=0)
        g = pack16.unpack(dy, TILE.packing, FLOAT64)
        x_hat = (pack16.unpack(x, TILE.packing, FLOAT64) - channel_mean) * channel_rstd
        if TILE.masked:  # 0·Inf must not reach the sums
            x_hat = tl.where(element_mask(left, block, C, CHANNELS, TILE), x_hat, 0.0)
        sum_g, sum_gx = sum_within_threads(g, g * x_hat, TILE)
        total_g, compensation_g = compensated_add(total_g, compensation_g, sum_g)
        total_gx, compensation_gx = compensated_add(total_gx, compensation_gx, sum_gx)
    total_g = compensated_total(total_g, compensation_g)
    sum_g, sum_gx = sum_pair(total_g, compensated_total(total_gx, compensation_gx), 0)
    target = partial + (int64(sample) * ENTRIES.parts + part) * C + channels
    store_partials(target, int64(N) * ENTRIES.parts, C, sum_gx, sum_g, channel_inside, WANT)
    if WANT.input:
        if weight is not None:
            w = pack16.to_float32(tl.load(weight + channels, mask=channel_inside, other=0.0))
            sum_g = sum_g.to(tl.float64) * w
            sum_gx = sum_gx.to(tl.float64) * w
        sum_g, sum_gx = sum_by_group(sum_g, sum_gx, block, TILE)
        groups, group_inside = block_groups(block, group, TILE)
        entry = entry_of_block(sample, groups, part, block, group, ENTRIES)
        mailbox.publish_sums(sum_g, sum_gx, sums, entry, group_inside, FLOAT64)


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
    ENTRIES_AT_ONCE: tl.constexpr,  # of a group that are added up at a time
    FLOAT64: tl.constexpr,  # ``sums`` are float64
):
    """Compute grad_input of one tile a program: rstd·(g − mean(g) − x̂·mean(g·x̂)), the means over a group.

    The tile is loaded before the program waits for the reduce kernel. It then adds up the entries of its block's
    groups, in their order and in float64, and expands the means to the channels.
    """
    pdl_launch_dependents()
    GROUPS: tl.constexpr = TILE.groups
    GROUP_ENTRIES: tl.constexpr = ENTRIES.parts * ENTRIES.blocks_per_group
    C = channel_count(group, TILE)
    sample, tile, block = cta_work(tl.num_programs(0) - 1 - tl.program_id(0), blocks, tiles, TILE)
    position = int64(tile) * TILE.positions
    x_start = tile_start(input, sample, position, block, input_strides, TILE)
    dy_start = tile_start(grad_out, sample, position, block, grad_out_strides, TILE)
    mask = element_mask(HxW - position, block, C, TILE.words, TILE)
    x = tl.load(x_start + offsets_in_tile(input_strides, TILE), mask=mask, other=0)
    dy = tl.load(dy_start + offsets_in_tile(grad_out_strides, TILE), mask=mask, other=0)
    channels = block * TILE.channels + tl.arange(0, TILE.channels)
    channel_inside = channels < C
    statistic = int64(sample) * group + channels // TILE.D
    channel_mean = load_channels(mean, statistic, channel_inside)
    channel_rstd = load_channels(rstd, statistic, channel_inside)
    w = load_channels(weight, channels, channel_inside) if weight is not None else None
    pdl_wait()
    groups, group_inside = block_groups(block, group, TILE)
    total_g = tl.zeros((GROUPS, ENTRIES_AT_ONCE), tl.float64)
    total_gx = tl.zeros((GROUPS, ENTRIES_AT_ONCE), tl.float64)
    for begin in range(0, GROUP_ENTRIES, ENTRIES_AT_ONCE):
        entries, entry_mask = entries_of_groups(begin, sample, groups, group_inside, group, ENTRIES_AT_ONCE, ENTRIES)
        more_g, more_gx = mailbox.receive_sums(sums + entries * (2 if FLOAT64 else 1), entry_mask, False, FLOAT64)
        total_g += more_g
        total_gx += more_gx
    reciprocal_count = 1.0 / (float64(TILE.D) * float64(HxW))
    sum_g, sum_gx = sum_pair(total_g, total_gx, 1)
    mean_g = expand_to_channels(sum_g * reciprocal_count, block, TILE)[None, :]
    mean_gx = expand_to_channels(sum_gx * reciprocal_count, block, TILE)[None, :]
    dy_values, x_values = pack16.unpack_acc_dtype(dy, TILE.packing), pack16.unpack_acc_dtype(x, TILE.packing)
    result = input_gradient(dy_values, x_values, channel_mean, channel_rstd, w, mean_g, mean_gx)
    start = tile_start(grad_input, sample, position, block, grad_input_strides, TILE)
    pack16.store_elements(start + offsets_in_tile(grad_input_strides, TILE), result, mask, TILE.packing)


@triton.jit
def _load_first_element(start, groups, block, mask, channel_stride, TILE: tl.constexpr):
    """Load the first element that each group has in a block at one position, as float32."""
    first = tl.maximum(groups * TILE.D - block * TILE.channels, 0)
    if TILE.packing == UNPACKED:
        element = pack16.to_float32(tl.load(start + first * channel_stride, mask=mask, other=0))
    else:
        word = tl.load(start + first // 2 * channel_stride, mask=mask, other=0)
        element = pack16.unpack16_low(word >> (first % 2 * 16).to(tl.int32), TILE.packing)
    return element


@triton.jit
def _shift_of_groups(start, groups, block, mask, last, strides, TILE: tl.constexpr):
    """Return the median of three elements of each group, from the first positions up to ``last``; 0 if not finite."""
    _, channel_stride, position_stride = strides
    a = _load_first_element(start, groups, block, mask, channel_stride, TILE)
    start += tl.minimum(last, 1) * position_stride
    b = _load_first_element(start, groups, block, mask, channel_stride, TILE)
    start += (tl.minimum(last, 2) - tl.minimum(last, 1)) * position_stride
    c = _load_first_element(start, groups, block, mask, channel_stride, TILE)
    return finite_median(a, b, c)


@triton.jit
def _entry_count(groups, part, block, HxW, PART_POSITIONS: tl.constexpr, ENTRIES: tl.constexpr):
    """Return how many elements each group's entry for a block and part sums up, as float64."""
    begin = block * ENTRIES.channels
    end = tl.minimum((groups + 1) * ENTRIES.D, begin + ENTRIES.channels)
    channels = end - tl.maximum(groups * ENTRIES.D, begin)
    positions = tl.minimum(HxW - int64(part) * PART_POSITIONS, PART_POSITIONS)
    return positions.to(tl.float64) * channels.to(tl.float64)


@triton.jit
def group_norm_forward_channels_last_moments(
    input,  # [N, C, HxW]
    moments,  # int64 [N, group, parts, blocks_per_group, 2]: Σx and Σ(x − mean)² of each entry, in float64
    group,
    blocks,  # of channels
    HxW,
    input_strides,  # of sample, channel and position
    TILE: tl.constexpr,  # tiles.ChannelsLastTileSpec
    ENTRIES: tl.constexpr,  # tiles.EntrySpec
):
    """Compute the moments of one part of the positions of one block of channels a program.

    Shifted moments: Σ(x − shift) and Σ(x − shift)² in float64, about the median of three elements of the group. So a
    constant group has a variance of exactly 0, and an outlier does not become the shift. At the end they are converted
    to the sum and the squares about the part's own mean.
    """
    pdl_launch_dependents()
    CHANNELS: tl.constexpr = TILE.channels
    ROWS: tl.constexpr = TILE.rows
    PART_POSITIONS: tl.constexpr = TILE.positions * TILE.steps
    C = channel_count(group, TILE)
    sample, part, block = cta_work(tl.program_id(0), blocks, ENTRIES.parts, TILE)
    channels = block * CHANNELS + tl.arange(0, CHANNELS)
    groups, group_inside = block_groups(block, group, TILE)
    begin = int64(part) * PART_POSITIONS
    x_pointers = tile_start(input, sample, begin, block, input_strides, TILE)
    last = HxW - begin - 1
    shift = _shift_of_groups(x_pointers, channels // TILE.D, block, channels < C, last, input_strides, TILE)
    group_shift = _shift_of_groups(x_pointers, groups, block, group_inside, last, input_strides, TILE)
    shift = shift.to(tl.float64)[None, :]
    x_pointers = x_pointers + offsets_in_tile(input_strides, TILE)
    total = tl.zeros((ROWS, CHANNELS), tl.float64)
    total_squares = tl.zeros((ROWS, CHANNELS), tl.float64)
    for step in tl.range(0, TILE.steps, num_stages=TILE.stages):
        left = HxW - begin - step * TILE.positions
        mask = element_mask(left, block, C, TILE.words, TILE)
        x = tl.load(x_pointers + int64(step) * TILE.positions * input_strides[2], mask=mask, other=0)
        # In float64, since an output near the mean is only as accurate as the mean is.
        shifted = pack16.unpack_float32(x, TILE.packing).to(tl.float64) - shift
        if TILE.masked:
            shifted = tl.where(element_mask(left, block, C, CHANNELS, TILE), shifted, 0.0)
        sums, squares = sum_within_threads(shifted, shifted * shifted, TILE)
        total += sums
        total_squares += squares
    sums, squares = sum_pair(total, total_squares, 0)
    sums, squares = sum_by_group(sums, squares, block, TILE)
    count = _entry_count(groups, part, block, HxW, PART_POSITIONS, ENTRIES)
    squares = squares - sums / count * sums
    squares = tl.where(squares < 0.0, 0.0, squares)
    entry = entry_of_block(sample, groups, part, block, group, ENTRIES)
    mailbox.publish_float64(group_shift.to(tl.float64) * count + sums, squares, moments + entry * 2, group_inside)


@triton.jit
def _load_moments(moments, begin, work, HxW, COUNT: tl.constexpr, PART_POSITIONS: tl.constexpr, ENTRIES: tl.constexpr):
    """Load the moments of COUNT entries of each group from ``begin`` on, their element counts and their mask.

    ``work`` is (sample, groups, which of these there are, groups of a sample).
    """
    sample, groups, group_inside, group = work
    entries, entry_mask = entries_of_groups(begin, sample, groups, group_inside, group, COUNT, ENTRIES)
    sums, squares = mailbox.receive_sums(moments + entries * 2, entry_mask, False, True)
    entry = (begin + tl.arange(0, COUNT))[None, :]
    block = groups[:, None] * ENTRIES.D // ENTRIES.channels + entry % ENTRIES.blocks_per_group
    count = _entry_count(groups[:, None], entry // ENTRIES.blocks_per_group, block, HxW, PART_POSITIONS, ENTRIES)
    return sums, squares, count, entry_mask


@triton.jit
def group_norm_forward_channels_last_statistics(
    moments,  # of the moments kernel
    statistics,  # float64 [N, group, 2]: mean and rstd, for the apply kernel
    mean,  # [N, group]
    rstd,  # [N, group]
    group,
    HxW,
    eps_bits,  # of a float64
    mean_stride,
    rstd_stride,
    ENTRIES: tl.constexpr,  # tiles.EntrySpec
    GROUPS: tl.constexpr,  # of a program
    PART_POSITIONS: tl.constexpr,  # of a part
    ENTRIES_AT_ONCE: tl.constexpr,  # of a group that are added up at a time
):
    """Combine the moments of GROUPS groups of a sample a program, by Chan's formula.

    First the entries' sums give the mean; then, in a second pass over the entries, to each entry's squares about its
    own mean comes its count times the squared distance of the means. Both in the order of the entries.
    """
    pdl_wait()
    pdl_launch_dependents()
    GROUP_ENTRIES: tl.constexpr = ENTRIES.parts * ENTRIES.blocks_per_group
    group_blocks = tl.cdiv(group, GROUPS)
    sample = tl.program_id(0) // group_blocks
    groups = int64(tl.program_id(0) % group_blocks) * GROUPS + tl.arange(0, GROUPS)
    group_inside = groups < group
    work = (sample, groups, group_inside, group)
    count = float64(ENTRIES.D) * float64(HxW)
    total = tl.zeros((GROUPS, ENTRIES_AT_ONCE), tl.float64)
    for begin in range(0, GROUP_ENTRIES, ENTRIES_AT_ONCE):
        sums, _, _, _ = _load_moments(moments, begin, work, HxW, ENTRIES_AT_ONCE, PART_POSITIONS, ENTRIES)
        total += sums
    group_mean = divide(tl.sum(total, axis=1), count, 1.0 / count)
    total = tl.zeros((GROUPS, ENTRIES_AT_ONCE), tl.float64)
    for begin in range(0, GROUP_ENTRIES, ENTRIES_AT_ONCE):
        sums, squares, entry_count, entry_mask = _load_moments(
            moments, begin, work, HxW, ENTRIES_AT_ONCE, PART_POSITIONS, ENTRIES
        )
        deviation = sums - group_mean[:, None] * entry_count
        total += tl.where(entry_mask, squares + deviation * deviation / entry_count, 0.0)
    variance = nan_where_infinite(tl.sum(total, axis=1)) / count
    group_rstd = 1.0 / tl.sqrt(variance + float64_from_bits(eps_bits))
    statistic = int64(sample) * group + groups
    pack16.store_rounded(mean + statistic * mean_stride, group_mean, group_inside)
    pack16.store_rounded(rstd + statistic * rstd_stride, group_rstd, group_inside)
    tl.store(statistics + statistic * 2, group_mean, mask=group_inside)
    tl.store(statistics + statistic * 2 + 1, group_rstd, mask=group_inside)


@triton.jit
def group_norm_forward_channels_last_apply(
    input,  # [N, C, HxW]
    weight,  # [C], or None
    bias,  # [C], or None
    output,  # [N, C, HxW]
    statistics,  # of the statistics kernel
    group,
    blocks,  # of channels
    tiles,  # of a sample's positions
    HxW,
    input_strides,  # of sample, channel and position
    output_strides,
    TILE: tl.constexpr,  # tiles.ChannelsLastTileSpec
):
    """Compute output = (x − mean)·rstd·weight + bias of one tile a program.

    The tile is loaded before the program waits for the statistics kernel.
    """
    C = channel_count(group, TILE)
    sample, tile, block = cta_work(tl.num_programs(0) - 1 - tl.program_id(0), blocks, tiles, TILE)
    position = int64(tile) * TILE.positions
    x_start = tile_start(input, sample, position, block, input_strides, TILE)
    mask = element_mask(HxW - position, block, C, TILE.words, TILE)
    x = tl.load(x_start + offsets_in_tile(input_strides, TILE), mask=mask, other=0)
    channels = block * TILE.channels + tl.arange(0, TILE.channels)
    channel_inside = channels < C
    statistic = int64(sample) * group + channels // TILE.D
    pdl_wait()
    channel_mean = tl.load(statistics + statistic * 2, mask=channel_inside, other=0.0)[None, :]
    channel_rstd = tl.load(statistics + statistic * 2 + 1, mask=channel_inside, other=0.0)[None, :]
    w = load_channels(weight, channels, channel_inside) if weight is not None else None
    b = load_channels(bias, channels, channel_inside) if bias is not None else None
    result = normalize(pack16.unpack_acc_dtype(x, TILE.packing), channel_mean, channel_rstd, w, b)
    start = tile_start(output, sample, position, block, output_strides, TILE)
    pack16.store_elements(start + offsets_in_tile(output_strides, TILE), result, mask, TILE.packing)
