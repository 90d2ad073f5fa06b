"""The statistics of a channel, summed up as ``batch_norm_sums`` does it."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.batch_norm.addressing import first_place, offset_of
from normgrad.cuda.batch_norm.reduce_backward_kernels import (
    by_channel,
    centre_of,
    put_part,
    rows_of,
    runs_of,
    sums_of_rows,
    work_of,
)
from normgrad.cuda.device.clusters import open_slots_of_first, tell_first, told_by, wait_for_all
from normgrad.cuda.device.common import (
    divided,
    float64_of_bits,
    indices,
    int64,
    let_next_launch_begin,
    put,
    wait_for_launch_before,
    wide,
)


@triton.jit
def _about(pointer, row, place, place_blocks, P, channels, C, strides, PLACES: tl.constexpr):
    """The number at a place of a row, or its last, in each channel."""
    places = tl.minimum(first_place(row, place_blocks, PLACES) + place, P - 1)
    first = offset_of(row, places, place_blocks, strides)
    return wide(tl.load(pointer + first + channels * strides[1], mask=channels < C, other=0.0))


@triton.jit
def _places_of(begin, end, place_blocks, P, PLACES: tl.constexpr):
    """How many places rows have; the last of a sample may have fewer than the others."""
    if place_blocks is None:
        number = tl.minimum(int64(end) * PLACES, P) - int64(begin) * PLACES
    else:
        short = int64(end // place_blocks - begin // place_blocks) * (int64(place_blocks) * PLACES - P)
        number = int64(end - begin) * PLACES - short
    return number


@triton.jit
def _put_statistics(centre, variance, channels, C, mean, invstd, strides, eps_bits):
    """Store the mean and reciprocal deviation of a block of channels."""
    inverse = 1.0 / tl.sqrt(variance + float64_of_bits(eps_bits))
    put(mean + channels * strides[0], centre.to(tl.float32), channels < C)
    put(invstd + channels * strides[1], inverse.to(tl.float32), channels < C)


@triton.jit
def _of_cluster(places, length, cut, PLACES: tl.constexpr, WIDE: tl.constexpr, CLUSTER: tl.constexpr):
    """The mean and variance of channels of which each program has told its part's mean and sum of squares.

    ``length``: how many numbers of a channel lie side by side in a tile over several channels.
    """
    rows_of_part, N, several, place_blocks, P = cut
    counted = tl.zeros((), tl.float64)
    total = tl.zeros(places.shape, tl.float64)
    for part in tl.static_range(CLUSTER):
        number = _places_of(*rows_of(part, rows_of_part, N, several, WIDE), place_blocks, P, PLACES).to(tl.float64)
        part_mean, _ = told_by(part, places)
        counted += number
        total += number * part_mean
    centre = total / counted
    squares = tl.zeros(places.shape, tl.float64)
    for part in tl.static_range(CLUSTER):
        number = _places_of(*rows_of(part, rows_of_part, N, several, WIDE), place_blocks, P, PLACES).to(tl.float64)
        part_mean, spread = told_by(part, places)
        squares += spread + length * number * (part_mean - centre) * (part_mean - centre)
    return centre, squares / (length * counted)


@triton.jit
def batch_norm_part_moments(
    input,  # [N, C, P]
    moments,  # float64 [3, parts, over, C]: how many elements, their mean, Σ(x − mean)²; or None, as for sums
    mean,  # [C], or None where there are moments
    invstd,  # [C], or None
    output_strides,
    eps_bits,  # float64
    N,
    C,
    P,
    rows_of_part,
    run,
    over,
    strides,  # of sample, channel and place
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    STRETCH: tl.constexpr,
    ALONE: tl.constexpr,
    WHOLE: tl.constexpr,
    RUNS: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
    FOLDS: tl.constexpr,
    STAGES: tl.constexpr,
    CLUSTER: tl.constexpr,
):
    """The moments of a part of the rows, for a block of channels.

    Its sums are about the middle one of three of its numbers: so a constant channel has no variance at all, and a
    number that is far from the rest spoils none.
    """
    let_next_launch_begin()
    if CLUSTER > 1:
        told = open_slots_of_first(RUNS[0], CLUSTER)
    block, part, parts, several, begin, end = work_of(rows_of_part, N, C, P, PLACES, STRETCH, WHOLE, WIDE, CLUSTER)
    if ALONE:
        place_blocks: tl.constexpr = None
    else:
        place_blocks = several
    across = int64(block) * STRETCH + tl.arange(0, CHANNELS)
    given = (
        _about(input, begin, 0, place_blocks, P, across, C, strides, PLACES),
        _about(input, (begin + end) // 2, PLACES // 2, place_blocks, P, across, C, strides, PLACES),
        _about(input, end - 1, PLACES - 1, place_blocks, P, across, C, strides, PLACES),
    )
    # An odd number's square is 1 more than a multiple of 8: as float32, those of float16 were nearly all rounded down.
    WIDER: tl.constexpr = tl.float32 if input.dtype.element_ty == tl.bfloat16 else tl.float64
    data = (None, input, place_blocks, block, C, P, strides, strides)
    away, squares = sums_of_rows(
        begin, end, given, data, WIDER, ROWS, PLACES, CHANNELS, STRETCH, MASKED, WIDE, VECTOR, FOLDS, STAGES
    )
    number = _places_of(begin, end, place_blocks, P, PLACES).to(tl.float64)
    drift = divided(away, number, 1.0 / number)
    spread = squares - drift * away
    spread = tl.where(spread < 0.0, 0.0, spread)
    centre = centre_of(given) + drift
    channels, from_, length, entry, spare = runs_of(block, run, C, over, CHANNELS, STRETCH, RUNS)
    if RUNS[1] > 1:
        means = by_channel(centre, from_, length, RUNS)
        spreads = by_channel(spread, from_, length, RUNS)
        centre = tl.sum(means, axis=1) / length.to(tl.float64)
        apart = tl.where(tl.arange(0, RUNS[1])[None, :] < length[:, None], means - centre[:, None], 0.0)
        spread = tl.sum(spreads + number * apart * apart, axis=1)
    numbers = number * length.to(tl.float64)
    if CLUSTER > 1:
        tell_first(centre, spread, told, part, RUNS[0], CLUSTER)
        if part == 0:
            places = wait_for_all(told, 0, RUNS[0], CLUSTER)
            cut = (rows_of_part, N, several, place_blocks, P)
            whole, variance = _of_cluster(places, length.to(tl.float64), cut, PLACES, WIDE, CLUSTER)
            _put_statistics(whole, variance, channels, C // run, mean, invstd, output_strides, eps_bits)
    elif moments is None:
        _put_statistics(centre, spread / numbers, channels, C // run, mean, invstd, output_strides, eps_bits)
    else:
        put_part(moments, (numbers, centre, spread), channels, C // run, part, parts, entry, spare, over)


@triton.jit
def _moments_of(moments, start, parts, lines, channels, C, ROWS: tl.constexpr):
    """The moments of some parts of a block of channels, and which of them there are."""
    rows = start + tl.arange(0, ROWS).to(tl.int64)
    mask = (rows < parts)[:, None] & (channels < C)[None, :]
    place = moments + rows[:, None] * C + channels[None, :]
    number = tl.load(place, mask=mask, other=0.0)
    means = tl.load(place + lines, mask=mask, other=0.0)
    return number, means, tl.load(place + 2 * lines, mask=mask, other=0.0), mask


@triton.jit
def _squares_about(centre, number, means, spreads, mask):
    """The parts' sums of squares about the mean of them all."""
    apart = means - centre[None, :]
    return tl.where(mask, spreads + number * apart * apart, 0.0)


@triton.jit
def batch_norm_finish_moments(
    moments,  # float64 [3, parts, C]
    mean,  # [C]
    invstd,  # [C]
    output_strides,
    eps_bits,  # float64
    parts,
    C,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ONCE: tl.constexpr,  # there are no more parts than ROWS
):
    """The mean and reciprocal deviation of a block of channels from the moments of their parts."""
    wait_for_launch_before()
    channels = indices(tl.program_id(0), CHANNELS)
    lines = int64(parts) * C
    number, means, spreads, mask = _moments_of(moments, 0, parts, lines, channels, C, ROWS)
    counted = number
    total = number * means
    if not ONCE:
        for start in range(ROWS, parts, ROWS):
            more, means, _, _ = _moments_of(moments, start, parts, lines, channels, C, ROWS)
            counted += more
            total += more * means
    n = tl.sum(counted, axis=0)
    centre = tl.sum(total, axis=0) / n
    if not ONCE:
        number, means, spreads, mask = _moments_of(moments, 0, parts, lines, channels, C, ROWS)
    squares = _squares_about(centre, number, means, spreads, mask)
    if not ONCE:
        for start in range(ROWS, parts, ROWS):
            number, means, spreads, mask = _moments_of(moments, start, parts, lines, channels, C, ROWS)
            squares += _squares_about(centre, number, means, spreads, mask)
    variance = tl.sum(squares, axis=0) / n
    _put_statistics(centre, variance, channels, C, mean, invstd, output_strides, eps_bits)
