"""GroupNorm's forward pass, by teams as the backward's."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.clusters import open_slots, tell, told_by, wait_for_all
from normgrad.cuda.device.common import (
    INTERPRETED,
    OUTPUTS,
    SINGLE,
    SUMS,
    WHOLE,
    collect_wide,
    divided,
    float64,
    float64_of_bits,
    high,
    int64,
    publish_wide,
    put,
    put_numbers,
    settled,
    wait_for_launch_before,
    wide,
)
from normgrad.cuda.device.formulas import left_out_of, near_and_rest, normalised, precise, wider
from normgrad.cuda.group_norm import contiguous_addressing as tiles

# Powers of two as the bits of float32: 1, and the range of those that have a reciprocal there.
_ONE = tl.constexpr(0x3F800000)
_SMALLEST = tl.constexpr(0x00800000)
_LARGEST = tl.constexpr(0x7E800000)


@triton.jit
def _sum_of_groups(values):
    """The sums of each group's values: of one group in one step, in which threads sum up what they have before."""
    if values.shape[0] == 1:
        result = tl.sum(tl.reshape(values, (1, values.shape[1] * values.shape[2])), axis=1)
    else:
        result = tl.sum(tl.sum(values, axis=2), axis=1)
    return result


@triton.jit
def _inverse_root(value):
    """``1 / √value`` of float64, to some 40 bits: in fewer instructions than a root and a division."""
    if INTERPRETED:
        result = 1.0 / tl.sqrt(value)
    else:
        near = tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f64 $0, $1;", "=d,d", [value], tl.float64, is_pure=True, pack=1
        )
        wrong_by = tl.fma(-value * near, near, 1.0)
        result = tl.where(wrong_by == wrong_by, tl.fma(0.5 * near, wrong_by, near), near)
    return result


@triton.jit
def _power_of_two(inverse, near):
    """The power of two below a reciprocal deviation, and its reciprocal; 1 where its product with near overflows."""
    bits = tl.minimum(tl.maximum(inverse.to(tl.int32, bitcast=True) & 0x7F800000, _SMALLEST), _LARGEST)
    bits = tl.where(tl.abs(near) * bits.to(tl.float32, bitcast=True) < float("inf"), bits, _ONE)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def _normalised(x, centre, inverse, factor, shift, SHARED: tl.constexpr):
    """``(x − centre)·inverse·factor + shift`` of a tile's groups.

    Of SHARED groups the distances are not at hand from the sums. They are made times a power of two, and the rest of
    the reciprocal deviation comes in with the weight, as one factor: neither is out of float32's range.
    """
    if x.dtype != tl.float64 and SHARED and factor is not None:
        near, rest = near_and_rest(centre, tl.float32)
        power, reciprocal = _power_of_two(high(inverse), near)
        term = left_out_of(rest, inverse)[:, None, None] * factor
        term = tl.where(tl.abs(term) < float("inf"), term, 0.0)
        if shift is not None:
            term = term + shift
        scale = high(inverse * reciprocal)[:, None, None] * factor
        result = (x * power[:, None, None] - (near * power)[:, None, None]) * scale + term
    else:
        result = normalised(x, centre[:, None, None], inverse[:, None, None], factor, shift)
    return result


@triton.jit
def group_norm_forward(
    input,  # [N, C, HxW]
    weight,  # [C], or None
    bias,  # [C], or None
    output,  # [N, C, HxW]
    mean,  # [N, group]
    rstd,  # [N, group]
    slots,  # int64 [N, group, PARTS, 2]
    samples,
    group,
    group_blocks,
    HxW,
    eps_bits,  # float64
    teams,
    input_strides,  # of sample, channel and place
    output_strides,
    mean_stride,
    rstd_stride,
    D: tl.constexpr,
    PLACES: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLACE_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
    FOLD: tl.constexpr,  # stretches of a group's tile that are added up first
    CLUSTER: tl.constexpr,
    VECTOR: tl.constexpr,
    PAIRS: tl.constexpr,
    PHASE: tl.constexpr,
):
    """The normalised groups of a team and their statistics."""
    SLOTS: tl.constexpr = PARTS > 1 and not CLUSTER
    LAG: tl.constexpr = 1 if SLOTS and PHASE == WHOLE else 0
    # The roundings of few numbers are seen in their sums.
    EXACT: tl.constexpr = (input.dtype.element_ty == tl.float32 and PARTS == 1) and CHANNELS * PLACES <= 512
    WORDS: tl.constexpr = PLACES if PAIRS == SINGLE else PLACES // 2
    input_strides = tiles.strides_of(input_strides, VECTOR, WIDE)
    output_strides = tiles.strides_of(output_strides, VECTOR, WIDE)
    team, part, _, word, within, in_tile, word_in_tile = tiles.part_of_team(
        HxW, D, GROUPS, CHANNELS, PLACES, WORDS, PLACE_PARTS, PARTS, VECTOR
    )
    channel_in_group = (part // PLACE_PARTS) * CHANNELS
    read = tiles.tile_offsets(input_strides, D, GROUPS, CHANNELS, WORDS, WIDE)
    written = tiles.tile_offsets(output_strides, D, GROUPS, CHANNELS, WORDS, WIDE)
    whole = float64(D) * float64(HxW)
    eps = float64_of_bits(eps_bits)
    per_group = 1.0 / whole
    count = _held(int64(part), HxW, D, PLACES, CHANNELS, PLACE_PARTS)
    per_part = 1.0 / count
    counts = _held(int64(tl.arange(0, PADDED_PARTS)), HxW, D, PLACES, CHANNELS, PLACE_PARTS)[None, :]
    per_parts = 1.0 / counts
    items = samples * group_blocks
    if WIDE:
        items = int64(samples) * group_blocks
        team = int64(team)
    totals = (items, group, group_blocks)
    begin = (channel_in_group, word, word_in_tile)
    if CLUSTER:
        told = open_slots()
        turns = 0
        next_x = tiles.loaded(input, read, input_strides, team, totals, begin, D, GROUPS, MASKED)
    if LAG:
        x_before = tl.zeros((GROUPS, CHANNELS, WORDS), input.dtype.element_ty)
    for item in tl.range(team, items + LAG * teams, teams, num_stages=STAGES):
        done = item - LAG * teams
        sample, groups, known = tiles.groups_of(item, items, group, group_blocks, GROUPS)
        channel = (item % group_blocks) * GROUPS * D + channel_in_group
        ahead = item + teams if CLUSTER else item
        x = tiles.loaded(input, read, input_strides, ahead, totals, begin, D, GROUPS, MASKED)
        if CLUSTER:
            x, next_x = next_x, x
        if PHASE != OUTPUTS:
            # In float64, since the output near the mean is only as precise as the mean is.
            total = _sum_of_groups(wider(x, PAIRS, EXACT).to(tl.float64))
            if GROUPS == 1:  # or the compiler would move the tile to the threads that have the sum
                total = settled(total, GROUPS)
            centre = divided(total, count, per_part)
            values = wider(x, PAIRS, EXACT)
            near, rest = near_and_rest(centre, values.dtype)
            away = values - near[:, None, None]
            if MASKED:
                away = tl.where(in_tile, away, 0.0)
            squares = away * away
            if FOLD > 1:  # no thread adds up many numbers one by one
                squares = tl.sum(tl.reshape(squares, (GROUPS, FOLD, CHANNELS * PLACES // FOLD)), axis=1)[:, None, :]
            else:
                squares = squares.to(tl.float64)
            squares = _sum_of_groups(squares).to(tl.float64) - rest * rest * count
            squares = tl.where(squares < 0.0, 0.0, squares)
            if CLUSTER:
                tell(total, squares, told, part, turns, 1, PARTS)
            elif SLOTS:
                statistic = int64(sample) * group + groups
                if PHASE == WHOLE:
                    wait_for_launch_before()
                publish_wide(total, squares, slots + (statistic * PARTS + part) * 2, known)
        if PHASE != SUMS:
            if LAG:
                sample, groups, known = tiles.groups_of(done, items, group, group_blocks, GROUPS)
                channel = (done % group_blocks) * GROUPS * D + channel_in_group
                x, x_before = x_before, x
            channels = groups[:, None] * D + within[None, :]
            known_channels = known[:, None] & (within < D)[None, :]
            if CLUSTER:
                places = wait_for_all(told, turns, 1, PARTS)
                centre, squares = _of_cluster(places, HxW, whole, per_group, D, PLACES, CHANNELS, PLACE_PARTS, PARTS)
                turns += 1
            elif SLOTS:
                slot, given = tiles.slots_of(slots, sample, groups, known, group, PARTS, PADDED_PARTS, 2)
                sums, all_squares = collect_wide(slot, given, PHASE == WHOLE)
                centre = divided(tl.sum(sums, axis=1), whole, per_group)
                apart = sums - centre[:, None] * counts
                squares = tl.sum(tl.where(given, all_squares + apart * apart * per_parts, 0.0), axis=1)
                centre = settled(centre, GROUPS)
                squares = settled(squares, GROUPS)
            inverse = _inverse_root(squares * per_group + eps)
            factor = None
            shift = None
            if weight is not None:
                factor = wide(tl.load(weight + channels, mask=known_channels, other=0.0))[:, :, None]
            if bias is not None:
                shift = wide(tl.load(bias + channels, mask=known_channels, other=0.0))[:, :, None]
            result = _normalised(precise(x, PAIRS), centre, inverse, factor, shift, LAG or CLUSTER)
            target = tiles.tile_at(output, sample, channel, word, output_strides)
            mask = tiles.tile_mask(known, word_in_tile, MASKED)
            put_numbers(target + written, result, mask, (GROUPS, CHANNELS, WORDS, 2), PAIRS)
            statistic = int64(sample) * group + groups
            first = known & (part == 0)
            put(mean + statistic * mean_stride, high(centre), first)
            put(rstd + statistic * rstd_stride, high(inverse), first)


@triton.jit
def _of_cluster(
    told,
    HxW,
    whole,
    per_group,
    D: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLACE_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The mean of a group and the sum of its squares about it, from what the programs of a cluster have told."""
    total, squares = told_by(0, told)
    for part in tl.static_range(1, PARTS):
        one, more = told_by(part, told)
        total += one
        squares += more
    centre = divided(total, whole, per_group)
    for part in tl.static_range(PARTS):
        one, _ = told_by(part, told)
        count = _held(int64(part), HxW, D, PLACES, CHANNELS, PLACE_PARTS)
        apart = one - centre * count
        squares += apart * apart * (1.0 / count)
    return centre, squares


@triton.jit
def _held(part, HxW, D: tl.constexpr, PLACES: tl.constexpr, CHANNELS: tl.constexpr, PLACE_PARTS: tl.constexpr):
    """How many elements of a group a part has, as float64."""
    places = tl.minimum(tl.maximum(HxW - (part % PLACE_PARTS) * PLACES, 0), PLACES)
    channels = tl.minimum(tl.maximum(D - (part // PLACE_PARTS) * CHANNELS, 0), CHANNELS)
    return places.to(tl.float64) * channels.to(tl.float64)
