"""The three kernels of GroupNorm forward for contiguous channels; ``channels_last_launches`` launches them.

As backward, one launch reduces blocks of channels (moments) and a last one reads the data again and computes the output
(apply). Between them a small one combines the moments of each group (statistics).
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.formulas import divide, normalize
from normgrad.cuda.device.indexing import float64, float64_from_bits, int64
from normgrad.cuda.device.mailbox import publish_float64, receive_float64
from normgrad.cuda.device.pack16 import (
    UNPACKED,
    store_elements,
    store_rounded,
    to_float32,
    unpack16_low,
    unpack_acc_dtype,
    unpack_float32,
)
from normgrad.cuda.device.pdl import pdl_launch_dependents, pdl_wait
from normgrad.cuda.device.sums import sum_pair
from normgrad.cuda.group_norm.channels_last_addressing import (
    block_groups,
    channel_count,
    cta_work,
    element_mask,
    entries_of_groups,
    entry_of_block,
    load_channels,
    offsets_in_tile,
    sum_by_group,
    sum_within_threads,
    tile_start,
)


@triton.jit
def _load_first_element(start, groups, block, mask, channel_stride, TILE: tl.constexpr):
    """Load the first element that each group has in a block at one position, as float32."""
    first = tl.maximum(groups * TILE.D - block * TILE.channels, 0)
    if TILE.packing == UNPACKED:
        element = to_float32(tl.load(start + first * channel_stride, mask=mask, other=0))
    else:
        word = tl.load(start + first // 2 * channel_stride, mask=mask, other=0)
        element = unpack16_low(word >> (first % 2 * 16).to(tl.int32), TILE.packing)
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
    median = tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))
    return tl.where(median - median == 0.0, median, 0.0)


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
    GROUPS: tl.constexpr,  # that may have channels in a block
    ROWS: tl.constexpr,  # positions of a tile that different threads hold
    STEPS: tl.constexpr,  # tiles of a part
    STAGES: tl.constexpr,  # of the software pipeline through shared memory; 1 for none
):
    """Compute the moments of one part of the positions of one block of channels a program.

    Shifted moments: Σ(x − shift) and Σ(x − shift)² in float64, about the median of three elements of the group. So a
    constant group has a variance of exactly 0, and an outlier does not become the shift. At the end they are converted
    to the sum and the squares about the part's own mean.
    """
    pdl_launch_dependents()
    CHANNELS: tl.constexpr = TILE.channels
    PER_WORD: tl.constexpr = CHANNELS // TILE.words
    PART_POSITIONS: tl.constexpr = TILE.positions * STEPS
    C = channel_count(group, TILE)
    sample, part, block = cta_work(tl.program_id(0), blocks, ENTRIES.parts, TILE)
    channels = block * CHANNELS + tl.arange(0, CHANNELS)
    groups, group_inside = block_groups(block, group, GROUPS, TILE)
    begin = int64(part) * PART_POSITIONS
    x_pointers = tile_start(input, sample, begin, block * TILE.words, input_strides)
    last = HxW - begin - 1
    shift = _shift_of_groups(x_pointers, channels // TILE.D, block, channels < C, last, input_strides, TILE)
    group_shift = _shift_of_groups(x_pointers, groups, block, group_inside, last, input_strides, TILE)
    shift = shift.to(tl.float64)[None, :]
    x_pointers = x_pointers + offsets_in_tile(input_strides, TILE)
    total = tl.zeros((ROWS, CHANNELS), tl.float64)
    total_squares = tl.zeros((ROWS, CHANNELS), tl.float64)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        left = HxW - begin - step * TILE.positions
        mask = element_mask(left, (C - block * CHANNELS) // PER_WORD, TILE.words, TILE)
        x = tl.load(x_pointers + int64(step) * TILE.positions * input_strides[2], mask=mask, other=0)
        # In float64, since an output near the mean is only as accurate as the mean is.
        shifted = unpack_float32(x, TILE.packing).to(tl.float64) - shift
        if TILE.masked:
            shifted = tl.where(element_mask(left, C - block * CHANNELS, CHANNELS, TILE), shifted, 0.0)
        sums, squares = sum_within_threads(shifted, shifted * shifted, ROWS, TILE)
        total += sums
        total_squares += squares
    sums, squares = sum_pair(total, total_squares, 0)
    sums, squares = sum_by_group(sums, squares, block, GROUPS, TILE)
    count = _entry_count(groups, part, block, HxW, PART_POSITIONS, ENTRIES)
    squares = squares - sums / count * sums
    squares = tl.where(squares < 0.0, 0.0, squares)
    entry = entry_of_block(sample, groups, part, block, group, ENTRIES)
    publish_float64(group_shift.to(tl.float64) * count + sums, squares, moments + entry * 2, group_inside)


@triton.jit
def _load_moments(moments, begin, work, HxW, COUNT: tl.constexpr, PART_POSITIONS: tl.constexpr, ENTRIES: tl.constexpr):
    """Load the moments of COUNT entries of each group from ``begin`` on, their element counts and their mask.

    ``work`` is (sample, groups, which of these there are, groups of a sample).
    """
    sample, groups, group_inside, group = work
    entries, entry_mask = entries_of_groups(begin, sample, groups, group_inside, group, COUNT, ENTRIES)
    sums, squares = receive_float64(moments + entries * 2, entry_mask, False)
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
    group_rstd = 1.0 / tl.sqrt(tl.sum(total, axis=1) / count + float64_from_bits(eps_bits))
    statistic = int64(sample) * group + groups
    store_rounded(mean + statistic * mean_stride, group_mean, group_inside)
    store_rounded(rstd + statistic * rstd_stride, group_rstd, group_inside)
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
    WORDS: tl.constexpr = TILE.words
    POSITIONS: tl.constexpr = TILE.positions
    PER_WORD: tl.constexpr = TILE.channels // WORDS
    C = channel_count(group, TILE)
    sample, tile, block = cta_work(tl.num_programs(0) - 1 - tl.program_id(0), blocks, tiles, TILE)
    position = int64(tile) * POSITIONS
    x_start = tile_start(input, sample, position, block * WORDS, input_strides)
    mask = element_mask(HxW - position, (C - block * TILE.channels) // PER_WORD, WORDS, TILE)
    x = tl.load(x_start + offsets_in_tile(input_strides, TILE), mask=mask, other=0)
    channels = block * TILE.channels + tl.arange(0, TILE.channels)
    channel_inside = channels < C
    statistic = int64(sample) * group + channels // TILE.D
    pdl_wait()
    channel_mean = tl.load(statistics + statistic * 2, mask=channel_inside, other=0.0)[None, :]
    channel_rstd = tl.load(statistics + statistic * 2 + 1, mask=channel_inside, other=0.0)[None, :]
    w = None
    b = None
    if weight is not None:
        w = load_channels(weight, channels, channel_inside)
    if bias is not None:
        b = load_channels(bias, channels, channel_inside)
    result = normalize(unpack_acc_dtype(x, TILE.packing), channel_mean, channel_rstd, w, b)
    start = tile_start(output, sample, position, block * WORDS, output_strides)
    store_elements(start + offsets_in_tile(output_strides, TILE), result, mask, (POSITIONS, WORDS, 2), TILE.packing)
