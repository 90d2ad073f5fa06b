"""GroupNorm where the channels of a place lie side by side in memory; items of work as in ``group_norm_blocks``.

A program makes the sums of an item. The last to be done with an item of a section makes the sums of its groups of all
of theirs, in a fixed order. Meanwhile the programs go on to their next items, and LAG rounds later each returns to the
first, reads it again, from the L2 cache where LAG rounds fit in it, and writes its results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.common import (
    OUTPUTS,
    SINGLE,
    SUMS,
    WHOLE,
    collect,
    float64,
    int64,
    precise,
    publish,
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
def _publish_means(
    totals,
    arrivals,
    sums,
    sample,
    section,
    group,
    per_group,
    given,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    SECTION: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    OVER: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """The means over each group of a section, from the entries of its items."""
    groups, known = section_groups(section, group, D, CHANNELS, SECTION, PADDED)
    known = known & given
    blocks = blocks_of(groups, D, CHANNELS)[:, None]
    first = int64(sample) * group + groups
    all_g = tl.zeros((PADDED, ENTRIES), tl.float64)
    all_gx = tl.zeros((PADDED, ENTRIES), tl.float64)
    for begin in range(0, PARTS * OVER, ENTRIES):
        entry = (begin + tl.arange(0, ENTRIES))[None, :]
        there = known[:, None] & (entry < PARTS * OVER) & (entry % OVER < blocks)
        more_g, more_gx = collect(sums + first[:, None] * (PARTS * OVER) + entry, there, False)
        all_g += more_g
        all_gx += more_gx
    sum_g, sum_gx = sum_pair(all_g, all_gx, 1)
    put_totals(totals, first, sum_g * per_group, sum_gx * per_group, known)
    say_ready(arrivals)


@triton.jit
def group_norm_backward_channels(
    grad_out,  # [N, C, HxW]
    input,  # [N, C, HxW]
    mean,  # [N, group]
    rstd,  # [N, group]
    weight,  # [C], or None
    grad_input,  # [N, C, HxW], or None
    partial,  # float32 [wanted, N·PARTS, C]: the weight sums of each item
    sums,  # int64 [N, group, PARTS, OVER]: two float32 each, the sums of a group's channels in an item
    arrivals,  # int64 [N, sections], EMPTY
    totals,  # float64 [N, group, 2]: the means over a group
    samples,
    group,
    sections,
    HxW,
    grad_out_sample,
    grad_out_channel,
    grad_out_place,
    input_sample,
    input_channel,
    input_place,
    grad_input_sample,
    grad_input_channel,
    grad_input_place,
    D: tl.constexpr,  # channels of a group
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,  # that may have channels in a block
    PARTS: tl.constexpr,  # items of a block
    SECTION: tl.constexpr,  # blocks of a section
    SECTION_GROUPS: tl.constexpr,
    OVER: tl.constexpr,  # blocks that may have channels of a group
    ENTRIES: tl.constexpr,  # of `sums` that are added up at a time
    LAG: tl.constexpr,  # rounds from an item's sums to its results
    HELD: tl.constexpr,  # in registers for that one round
    MASKED: tl.constexpr,  # the tiles are more than the places or channels
    WIDE: tl.constexpr,  # offsets in a tile, or the number of items, need 64 bits
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,  # how 16-bit data comes; pairs are what the strides of pairs count
    WANT_INPUT: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    PHASE: tl.constexpr,
):
    """The gradients of items."""
    ALONE: tl.constexpr = PARTS * SECTION == 1
    PRECISION: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float32 else tl.float32
    PER_WORD: tl.constexpr = 1 if PAIRS == SINGLE else 2
    WORDS: tl.constexpr = CHANNELS // PER_WORD
    within = tl.arange(0, CHANNELS)
    read_x = tile_offsets(input_channel, input_place, PLACES, WORDS, WIDE)
    read_dy = tile_offsets(grad_out_channel, grad_out_place, PLACES, WORDS, WIDE)
    written = tile_offsets(grad_input_channel, grad_input_place, PLACES, WORDS, WIDE)
    per_group = 1.0 / (float64(D) * float64(HxW))
    C = group * D
    program, programs = tl.program_id(0), tl.num_programs(0)
    items = samples * sections * (PARTS * SECTION)
    if WIDE:
        items = int64(samples) * sections * (PARTS * SECTION)
        program, programs = int64(program), int64(programs)
    if HELD:
        x_before = tl.zeros((PLACES, WORDS), input.dtype.element_ty)
        dy_before = tl.zeros((PLACES, WORDS), grad_out.dtype.element_ty)
    if WANT_INPUT and not ALONE and PHASE == WHOLE:
        wait_for_launch_before()
    for item in tl.range(program, items + LAG * programs, programs, num_stages=STAGES):
        given = item < items
        sample, section, part, block = item_at(item, sections, PARTS, SECTION)
        channels = block * CHANNELS + within
        if PHASE != OUTPUTS:
            mask = tile_mask(given, part, block, HxW, C // PER_WORD, PLACES, WORDS, MASKED)
            x_at = tile_at(input, sample, part, block, input_sample, input_channel, input_place, PLACES, WORDS)
            dy_at = tile_at(
                grad_out, sample, part, block, grad_out_sample, grad_out_channel, grad_out_place, PLACES, WORDS
            )
            x = tl.load(x_at + read_x, mask=mask, other=0)
            dy = tl.load(dy_at + read_dy, mask=mask, other=0)
            known = (channels < C) & given
            statistic = int64(sample) * group + channels // D
            mu = wide(tl.load(mean + statistic, mask=known, other=0.0))
            rs = wide(tl.load(rstd + statistic, mask=known, other=0.0))
            g = precise(dy, PAIRS)
            x_hat = (precise(x, PAIRS) - mu[None, :]) * rs[None, :]
            if MASKED:  # 0·Inf must not reach the sums
                x_hat = tl.where(tile_mask(given, part, block, HxW, C, PLACES, CHANNELS, MASKED), x_hat, 0.0)
            sum_g, sum_gx = sum_pair(g, g * x_hat, 0)
            line = partial + (int64(sample) * PARTS + part) * C + channels
            if WANT_WEIGHT:
                tl.store(line, sum_gx.to(tl.float32), mask=known)
                line += int64(samples) * PARTS * C
            if WANT_BIAS:
                tl.store(line, sum_g.to(tl.float32), mask=known)
            if WANT_INPUT:
                if weight is not None:
                    scale = wide(tl.load(weight + channels, mask=known, other=0.0))
                    sum_g *= scale
                    sum_gx *= scale
                sum_g, sum_gx = of_groups(sum_g, sum_gx, block, D, CHANNELS, GROUPS)
                if not ALONE:
                    entry, there = entries_of(block, part, sample, group, D, CHANNELS, GROUPS, PARTS, OVER)
                    publish(sum_g, sum_gx, sums + entry, there & given)
                    place = arrivals + int64(sample) * sections + section
                    if last_to_arrive(place, given, PARTS * SECTION):
                        _publish_means(
                            totals,
                            place,
                            sums,
                            sample,
                            section,
                            group,
                            per_group,
                            given,
                            D,
                            CHANNELS,
                            SECTION,
                            SECTION_GROUPS,
                            PARTS,
                            OVER,
                            ENTRIES,
                        )
        if WANT_INPUT and PHASE != SUMS:
            if ALONE:
                mean_g = of_channels(sum_g.to(tl.float64) * per_group, block, D, CHANNELS, GROUPS)
                mean_gx = of_channels(sum_gx.to(tl.float64) * per_group, block, D, CHANNELS, GROUPS)
            else:
                done = item - LAG * programs
                given = (done >= 0) & (done < items)
                sample, section, part, block = item_at(done, sections, PARTS, SECTION)
                mask = tile_mask(given, part, block, HxW, C // PER_WORD, PLACES, WORDS, MASKED)
                if HELD:
                    x, x_before = x_before, x
                    dy, dy_before = dy_before, dy
                else:
                    x_at = tile_at(input, sample, part, block, input_sample, input_channel, input_place, PLACES, WORDS)
                    dy_at = tile_at(
                        grad_out, sample, part, block, grad_out_sample, grad_out_channel, grad_out_place, PLACES, WORDS
                    )
                    x = tl.load(x_at + read_x, mask=mask, other=0, eviction_policy="evict_first")
                    dy = tl.load(dy_at + read_dy, mask=mask, other=0, eviction_policy="evict_first")
                channels = block * CHANNELS + within
                known = (channels < C) & given
                statistic = int64(sample) * group + channels // D
                mu = wide(tl.load(mean + statistic, mask=known, other=0.0))
                rs = wide(tl.load(rstd + statistic, mask=known, other=0.0))
                if weight is not None:
                    scale = wide(tl.load(weight + channels, mask=known, other=0.0))
                place = arrivals + int64(sample) * sections + section
                mean_g, mean_gx = totals_of(totals, statistic, known, place, given, PHASE == WHOLE)
            mean_g = mean_g.to(PRECISION)[None, :]
            slope = (rs * mean_gx.to(PRECISION))[None, :]
            g = precise(dy, PAIRS)
            if weight is not None:
                g *= scale[None, :]
            result = rs[None, :] * (g - mean_g - (precise(x, PAIRS) - mu[None, :]) * slope)
            target = tile_at(
                grad_input,
                sample,
                part,
                block,
                grad_input_sample,
                grad_input_channel,
                grad_input_place,
                PLACES,
                WORDS,
            )
            put_numbers(target + written, result, mask, (PLACES, WORDS, 2), PAIRS)
