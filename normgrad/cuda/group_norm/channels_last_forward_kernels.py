"""GroupNorm's forward pass where the channels of a place lie side by side in memory, in launches as the backward's."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.common import (
    SINGLE,
    collect_wide,
    divided,
    first_of_pair,
    float64,
    float64_of_bits,
    high,
    int64,
    let_next_launch_begin,
    numbers,
    publish_wide,
    put,
    put_numbers,
    sum_pair,
    wait_for_launch_before,
    wide,
)
from normgrad.cuda.device.formulas import normalised, precise
from normgrad.cuda.group_norm.channels_last_addressing import (
    block_groups,
    channels_of,
    entries_of,
    entry_of,
    of_groups,
    presummed,
    tile_at,
    tile_mask,
    tile_offsets,
    work_at,
)


@triton.jit
def _number(x_at, groups, block, mask, channel_stride, D: tl.constexpr, CHANNELS: tl.constexpr, PAIRS: tl.constexpr):
    """The first number of each group at a place of a block, in float32."""
    first = tl.maximum(groups * D - block * CHANNELS, 0)
    if PAIRS == SINGLE:
        number = wide(tl.load(x_at + first * channel_stride, mask=mask, other=0))
    else:
        pair = tl.load(x_at + first // 2 * channel_stride, mask=mask, other=0)
        number = first_of_pair(pair >> (first % 2 * 16).to(tl.int32), PAIRS)
    return number


@triton.jit
def _usual_number(
    x_at,
    groups,
    block,
    mask,
    last,
    strides,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The middle one of three numbers of each group, those of the first places up to the last; 0 for NaN and Inf."""
    _, channel_stride, place_stride = strides
    a = _number(x_at, groups, block, mask, channel_stride, D, CHANNELS, PAIRS)
    x_at += tl.minimum(last, 1) * place_stride
    b = _number(x_at, groups, block, mask, channel_stride, D, CHANNELS, PAIRS)
    x_at += (tl.minimum(last, 2) - tl.minimum(last, 1)) * place_stride
    c = _number(x_at, groups, block, mask, channel_stride, D, CHANNELS, PAIRS)
    middle = tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))
    return tl.where(middle - middle == 0.0, middle, 0.0)


@triton.jit
def _count(groups, part, block, HxW, D: tl.constexpr, CHANNELS: tl.constexpr, PART: tl.constexpr):
    """How many elements of each group a part of a block has, as float64."""
    begin = block * CHANNELS
    channels = tl.minimum((groups + 1) * D, begin + CHANNELS) - tl.maximum(groups * D, begin)
    return tl.minimum(HxW - int64(part) * PART, PART).to(tl.float64) * channels.to(tl.float64)


@triton.jit
def group_norm_channel_moments(
    input,  # [N, C, HxW]
    moments,  # int64 [N, group, PARTS, OVER, 2]: Σx and Σ(x − mean)² of each entry, in float64
    group,
    blocks,
    HxW,
    input_strides,  # of sample, channel and place
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    OVER: tl.constexpr,
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The moments of a part of a block."""
    let_next_launch_begin()
    PER_WORD: tl.constexpr = 1 if PAIRS == SINGLE else 2
    WORDS: tl.constexpr = CHANNELS // PER_WORD
    C = channels_of(group, D, WIDE)
    sample, part, block = work_at(tl.program_id(0), blocks, PARTS, WIDE)
    channels = block * CHANNELS + tl.arange(0, CHANNELS)
    groups, there = block_groups(block, group, D, CHANNELS, GROUPS)
    begin = int64(part) * (PLACES * STEPS)
    x_at = tile_at(input, sample, begin, block * WORDS, input_strides)
    # About a number of the group: a constant one has no variance at all, and a number far from the rest spoils none.
    last = HxW - begin - 1
    about = _usual_number(x_at, channels // D, block, channels < C, last, input_strides, D, CHANNELS, PAIRS)
    origin = _usual_number(x_at, groups, block, there, last, input_strides, D, CHANNELS, PAIRS)
    about = about.to(tl.float64)[None, :]
    x_at = x_at + tile_offsets(input_strides, PLACES, WORDS, WIDE)
    all_away = tl.zeros((ROWS, CHANNELS), tl.float64)
    all_squares = tl.zeros((ROWS, CHANNELS), tl.float64)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        left = HxW - begin - step * PLACES
        mask = tile_mask(left, (C - block * CHANNELS) // PER_WORD, PLACES, WORDS, MASKED)
        x = tl.load(x_at + int64(step) * PLACES * input_strides[2], mask=mask, other=0)
        # In float64, since the output near the mean is only as precise as the mean is.
        away = numbers(x, PAIRS).to(tl.float64) - about
        if MASKED:
            away = tl.where(tile_mask(left, C - block * CHANNELS, PLACES, CHANNELS, MASKED), away, 0.0)
        sum_away, sum_squares = presummed(away, away * away, PLACES, ROWS, CHANNELS)
        all_away += sum_away
        all_squares += sum_squares
    sum_away, sum_squares = sum_pair(all_away, all_squares, 0)
    sum_away, sum_squares = of_groups(sum_away, sum_squares, block, D, CHANNELS, GROUPS)
    count = _count(groups, part, block, HxW, D, CHANNELS, PLACES * STEPS)
    squares = sum_squares - sum_away / count * sum_away
    squares = tl.where(squares < 0.0, 0.0, squares)
    entry = entry_of(sample, groups, part, block, group, D, CHANNELS, PARTS, OVER)
    publish_wide(origin.to(tl.float64) * count + sum_away, squares, moments + entry * 2, there)


@triton.jit
def _moments_of(
    moments,
    begin,
    sample,
    groups,
    known,
    group,
    HxW,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
    OVER: tl.constexpr,
    PART: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """The moments of ENTRIES of each group's entries, how many elements those have, and which of them there are."""
    entries, given = entries_of(begin, sample, groups, known, group, D, CHANNELS, PARTS, OVER, ENTRIES)
    sums, squares = collect_wide(moments + entries * 2, given, False)
    entry = (begin + tl.arange(0, ENTRIES))[None, :]
    block = groups[:, None] * D // CHANNELS + entry % OVER
    return sums, squares, _count(groups[:, None], entry // OVER, block, HxW, D, CHANNELS, PART), given


@triton.jit
def group_norm_channel_statistics(
    moments,  # int64 [N, group, PARTS, OVER, 2]
    totals,  # float64 [N, group, 2]: mean and reciprocal deviation
    mean,  # [N, group]
    rstd,  # [N, group]
    group,
    HxW,
    eps_bits,  # float64
    mean_stride,
    rstd_stride,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    OVER: tl.constexpr,
    PART: tl.constexpr,  # places of a part
    ENTRIES: tl.constexpr,  # of a group that are added up at a time
):
    """The statistics of a few groups of a sample."""
    wait_for_launch_before()
    let_next_launch_begin()
    shares = tl.cdiv(group, GROUPS)
    sample = tl.program_id(0) // shares
    groups = int64(tl.program_id(0) % shares) * GROUPS + tl.arange(0, GROUPS)
    known = groups < group
    whole = float64(D) * float64(HxW)
    total = tl.zeros((GROUPS, ENTRIES), tl.float64)
    for begin in range(0, PARTS * OVER, ENTRIES):
        sums, _, _, _ = _moments_of(
            moments, begin, sample, groups, known, group, HxW, D, CHANNELS, PARTS, OVER, PART, ENTRIES
        )
        total += sums
    centre = divided(tl.sum(total, axis=1), whole, 1.0 / whole)
    total = tl.zeros((GROUPS, ENTRIES), tl.float64)
    for begin in range(0, PARTS * OVER, ENTRIES):
        sums, squares, count, given = _moments_of(
            moments, begin, sample, groups, known, group, HxW, D, CHANNELS, PARTS, OVER, PART, ENTRIES
        )
        apart = sums - centre[:, None] * count
        total += tl.where(given, squares + apart * apart / count, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(total, axis=1) / whole + float64_of_bits(eps_bits))
    statistic = int64(sample) * group + groups
    put(mean + statistic * mean_stride, high(centre), known)
    put(rstd + statistic * rstd_stride, high(inverse), known)
    tl.store(totals + statistic * 2, centre, mask=known)
    tl.store(totals + statistic * 2 + 1, inverse, mask=known)


@triton.jit
def group_norm_channel_outputs(
    input,  # [N, C, HxW]
    weight,  # [C], or None
    bias,  # [C], or None
    output,  # [N, C, HxW]
    totals,  # float64 [N, group, 2]
    group,
    blocks,
    tiles,  # of a block's places
    HxW,
    input_strides,
    output_strides,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLACES: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The normalised tile."""
    PER_WORD: tl.constexpr = 1 if PAIRS == SINGLE else 2
    WORDS: tl.constexpr = CHANNELS // PER_WORD
    C = channels_of(group, D, WIDE)
    sample, tile, block = work_at(tl.num_programs(0) - 1 - tl.program_id(0), blocks, tiles, WIDE)
    place = int64(tile) * PLACES
    x_at = tile_at(input, sample, place, block * WORDS, input_strides)
    mask = tile_mask(HxW - place, (C - block * CHANNELS) // PER_WORD, PLACES, WORDS, MASKED)
    x = tl.load(x_at + tile_offsets(input_strides, PLACES, WORDS, WIDE), mask=mask, other=0)
    channels = block * CHANNELS + tl.arange(0, CHANNELS)
    known = channels < C
    statistic = int64(sample) * group + channels // D
    wait_for_launch_before()
    centre = tl.load(totals + statistic * 2, mask=known, other=0.0)[None, :]
    inverse = tl.load(totals + statistic * 2 + 1, mask=known, other=0.0)[None, :]
    factor = None
    shift = None
    if weight is not None:
        factor = wide(tl.load(weight + channels, mask=known, other=0.0))[None, :]
    if bias is not None:
        shift = wide(tl.load(bias + channels, mask=known, other=0.0))[None, :]
    result = normalised(precise(x, PAIRS), centre, inverse, factor, shift)
    target = tile_at(output, sample, place, block * WORDS, output_strides)
    written = tile_offsets(output_strides, PLACES, WORDS, WIDE)
    put_numbers(target + written, result, mask, (PLACES, WORDS, 2), PAIRS)
