"""GroupNorm's forward pass where the channels of a place lie side by side in memory, in rounds as the backward's."""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.common import (
    OUTPUTS,
    SINGLE,
    SUMS,
    WHOLE,
    away_from,
    collect_wide,
    divided,
    first_of_pair,
    float64,
    float64_of_bits,
    high,
    int64,
    precise,
    publish_wide,
    put,
    put_numbers,
    sum_pair,
    wait_for_launch_before,
    wide,
)
from normgrad.cuda.kernels.group_norm_blocks import (
    blocks_of,
    entries_of,
    item_at,
    last_to_arrive,
    of_channels,
    of_groups,
    put_totals,
    say_ready,
    section_groups,
    tile_at,
    tile_mask,
    tile_offsets,
    totals_of,
)


@triton.jit
def _count(
    entry,
    groups,
    HxW,
    D: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    OVER: tl.constexpr,
):
    """How many elements of each group an entry is about, as float64; none or fewer where there is no such entry."""
    block = groups * D // CHANNELS + entry % OVER
    channels = tl.minimum((groups + 1) * D, (block + 1) * CHANNELS) - tl.maximum(groups * D, block * CHANNELS)
    places = tl.minimum(HxW - int64(entry // OVER) * PLACES, PLACES)
    return places.to(tl.float64) * channels.to(tl.float64)


@triton.jit
def _first_number(
    x_at, groups, block, mask, channel_stride, D: tl.constexpr, CHANNELS: tl.constexpr, PAIRS: tl.constexpr
):
    """The first number of each group in an item in float32; 0 in place of NaN and Inf."""
    first = tl.maximum(groups * D - block * CHANNELS, 0)
    if PAIRS == SINGLE:
        number = wide(tl.load(x_at + first * channel_stride, mask=mask, other=0))
    else:
        pair = tl.load(x_at + first // 2 * channel_stride, mask=mask, other=0)
        number = first_of_pair(pair >> (first % 2 * 16), PAIRS)
    return tl.where(number - number == 0.0, number, 0.0)


@triton.jit
def _publish_statistics(
    totals,
    arrivals,
    moments,
    mean,
    rstd,
    sample,
    section,
    group,
    HxW,
    eps,
    mean_stride,
    rstd_stride,
    given,
    D: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    SECTION: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    OVER: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """The statistics of each group of a section, from the entries of its items."""
    groups, known = section_groups(section, group, D, CHANNELS, SECTION, PADDED)
    known = known & given
    blocks = blocks_of(groups, D, CHANNELS)[:, None]
    first = int64(sample) * group + groups
    total = tl.zeros((PADDED, ENTRIES), tl.float64)
    for begin in range(0, PARTS * OVER, ENTRIES):
        entry = (begin + tl.arange(0, ENTRIES))[None, :]
        there = known[:, None] & (entry < PARTS * OVER) & (entry % OVER < blocks)
        centres, squares = collect_wide(moments + (first[:, None] * (PARTS * OVER) + entry) * 2, there, False)
        count = _count(entry, groups[:, None], HxW, D, PLACES, CHANNELS, OVER)
        total += tl.where(there, centres * count, 0.0)
    whole = float64(D) * float64(HxW)
    centre = divided(tl.sum(total, axis=1), whole, 1.0 / whole)
    total = tl.zeros((PADDED, ENTRIES), tl.float64)
    for begin in range(0, PARTS * OVER, ENTRIES):
        entry = (begin + tl.arange(0, ENTRIES))[None, :]
        there = known[:, None] & (entry < PARTS * OVER) & (entry % OVER < blocks)
        centres, squares = collect_wide(moments + (first[:, None] * (PARTS * OVER) + entry) * 2, there, False)
        count = _count(entry, groups[:, None], HxW, D, PLACES, CHANNELS, OVER)
        apart = centres - centre[:, None]
        total += tl.where(there, squares + apart * apart * count, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(total, axis=1) / whole + eps)
    put_totals(totals, first, centre, inverse, known)
    say_ready(arrivals)
    put(mean + first * mean_stride, high(centre), known)
    put(rstd + first * rstd_stride, high(inverse), known)


@triton.jit
def group_norm_forward_channels(
    input,  # [N, C, HxW]
    weight,  # [C], or None
    bias,  # [C], or None
    output,  # [N, C, HxW]
    mean,  # [N, group]
    rstd,  # [N, group]
    moments,  # int64 [N, group, PARTS, OVER, 2]: mean and Σ(x − mean)² of a group in an item, in float64
    arrivals,  # int64 [N, sections], EMPTY
    totals,  # float64 [N, group, 2]: mean and reciprocal deviation
    samples,
    group,
    sections,
    HxW,
    eps_bits,  # float64
    input_sample,
    input_channel,
    input_place,
    output_sample,
    output_channel,
    output_place,
    mean_stride,
    rstd_stride,
    D: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    SECTION: tl.constexpr,
    SECTION_GROUPS: tl.constexpr,
    OVER: tl.constexpr,
    ENTRIES: tl.constexpr,
    LAG: tl.constexpr,
    HELD: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,  # places that threads share out; each sums up its own first
    PHASE: tl.constexpr,
):
    """The normalised items, and the statistics of their groups."""
    ALONE: tl.constexpr = PARTS * SECTION == 1
    PRECISION: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float32 else tl.float32
    PER_WORD: tl.constexpr = 1 if PAIRS == SINGLE else 2
    WORDS: tl.constexpr = CHANNELS // PER_WORD
    within = tl.arange(0, CHANNELS)
    read = tile_offsets(input_channel, input_place, PLACES, WORDS, WIDE)
    written = tile_offsets(output_channel, output_place, PLACES, WORDS, WIDE)
    per_group = 1.0 / (float64(D) * float64(HxW))
    eps = float64_of_bits(eps_bits)
    C = group * D
    program, programs = tl.program_id(0), tl.num_programs(0)
    items = samples * sections * (PARTS * SECTION)
    if WIDE:
        items = int64(samples) * sections * (PARTS * SECTION)
        program, programs = int64(program), int64(programs)
    if HELD:
        x_before = tl.zeros((PLACES, WORDS), input.dtype.element_ty)
    if not ALONE and PHASE == WHOLE:
        wait_for_launch_before()
    for item in tl.range(program, items + LAG * programs, programs, num_stages=STAGES):
        given = item < items
        sample, section, part, block = item_at(item, sections, PARTS, SECTION)
        channels = block * CHANNELS + within
        groups = block * CHANNELS // D + tl.arange(0, GROUPS)
        if PHASE != OUTPUTS:
            mask = tile_mask(given, part, block, HxW, C // PER_WORD, PLACES, WORDS, MASKED)
            x_at = tile_at(input, sample, part, block, input_sample, input_channel, input_place, PLACES, WORDS)
            x = tl.load(x_at + read, mask=mask, other=0)
            # About the group's first number here: a constant group has no variance at all.
            entry, there = entries_of(block, part, sample, group, D, CHANNELS, GROUPS, PARTS, OVER)
            there = there & given
            about = _first_number(x_at, channels // D, block, (channels < C) & given, input_channel, D, CHANNELS, PAIRS)
            origin = _first_number(x_at, groups, block, there, input_channel, D, CHANNELS, PAIRS)
            about = about.to(PRECISION)
            away = precise(x, PAIRS) - about[None, :]
            if MASKED:
                away = tl.where(tile_mask(given, part, block, HxW, C, PLACES, CHANNELS, MASKED), away, 0.0)
            own_away = tl.reshape(away, (PLACES // ROWS, ROWS, CHANNELS))
            sum_away, sum_squares = sum_pair(own_away, own_away * own_away, 0)
            sum_away, sum_squares = sum_pair(sum_away.to(tl.float64), sum_squares.to(tl.float64), 0)
            sum_away, sum_squares = of_groups(sum_away, sum_squares, block, D, CHANNELS, GROUPS)
            overlap = block - groups * D // CHANNELS
            count = _count(part * OVER + overlap, groups, HxW, D, PLACES, CHANNELS, OVER)
            drift = sum_away / count
            centre = origin.to(tl.float64) + drift
            squares = sum_squares - drift * sum_away
            squares = tl.where(squares < 0.0, 0.0, squares)
            if not ALONE:
                publish_wide(centre, squares, moments + entry * 2, there)
                place = arrivals + int64(sample) * sections + section
                if last_to_arrive(place, given, PARTS * SECTION):
                    _publish_statistics(
                        totals,
                        place,
                        moments,
                        mean,
                        rstd,
                        sample,
                        section,
                        group,
                        HxW,
                        eps,
                        mean_stride,
                        rstd_stride,
                        given,
                        D,
                        PLACES,
                        CHANNELS,
                        SECTION,
                        SECTION_GROUPS,
                        PARTS,
                        OVER,
                        ENTRIES,
                    )
        if PHASE != SUMS:
            if ALONE:
                statistic = int64(sample) * group + groups
                inverse = 1.0 / tl.sqrt(squares * per_group + eps)
                put(mean + statistic * mean_stride, high(centre), there)
                put(rstd + statistic * rstd_stride, high(inverse), there)
                centre = of_channels(centre, block, D, CHANNELS, GROUPS)
                inverse = of_channels(inverse, block, D, CHANNELS, GROUPS)
                known = (channels < C) & given
            else:
                done = item - LAG * programs
                given = (done >= 0) & (done < items)
                sample, section, part, block = item_at(done, sections, PARTS, SECTION)
                mask = tile_mask(given, part, block, HxW, C // PER_WORD, PLACES, WORDS, MASKED)
                if HELD:
                    x, x_before = x_before, x
                else:
                    x_at = tile_at(input, sample, part, block, input_sample, input_channel, input_place, PLACES, WORDS)
                    x = tl.load(x_at + read, mask=mask, other=0, eviction_policy="evict_first")
                channels = block * CHANNELS + within
                known = (channels < C) & given
                statistic = int64(sample) * group + channels // D
                place = arrivals + int64(sample) * sections + section
                centre, inverse = totals_of(totals, statistic, known, place, given, PHASE == WHOLE)
            result = away_from(precise(x, PAIRS), centre[None, :]) * inverse.to(PRECISION)[None, :]
            if weight is not None:
                result *= wide(tl.load(weight + channels, mask=known, other=0.0))[None, :]
            if bias is not None:
                result += wide(tl.load(bias + channels, mask=known, other=0.0))[None, :]
            target = tile_at(output, sample, part, block, output_sample, output_channel, output_place, PLACES, WORDS)
            put_numbers(target + written, result, mask, (PLACES, WORDS, 2), PAIRS)
