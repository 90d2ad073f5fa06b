"""The sums over a channel that synchronised BatchNorm is made of; tiles as in ``batch_norm_tiles``.

A program has a part of the rows of a block of channels. Every thread keeps float64 sums of its own, so that none waits
for another before the end; of a few numbers at a time, whose sum is float32 where those have 16 bits. Where there are
several parts, the programs of a block of channels are a cluster whose first takes them together, or another launch does
so. Where a tile goes over several channels (see ``batch_norm_tiles``) the numbers of each are added up at the end. A
channel may then be in several blocks: a part has an entry for each of them.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.batch_norm.addressing import (
    channels_left,
    channels_of,
    load_vector,
    place_blocks_of,
    rows_from,
    tile_at,
    tile_mask,
)
from normgrad.cuda.device.clusters import open_slots_of_first, sums_of_all, tell_first, wait_for_all
from normgrad.cuda.device.common import (
    indices,
    int64,
    let_next_launch_begin,
    put,
    sum_pair,
    wait_for_launch_before,
    wide,
)


@triton.jit
def work_of(rows_of_part, N, C, P, PLACES: tl.constexpr, STRETCH: tl.constexpr, WHOLE, WIDE: tl.constexpr, CLUSTER):
    """A program's block of channels, its part of how many, the blocks of places, its first row and the one after it."""
    channel_blocks = tl.cdiv(C, STRETCH)
    place_blocks = place_blocks_of(P, PLACES, WHOLE)
    if CLUSTER:
        block = tl.program_id(0) // CLUSTER
        part = tl.program_id(0) % CLUSTER
    else:
        block = tl.program_id(0) % channel_blocks
        part = tl.program_id(0) // channel_blocks
    begin, end = rows_of(part, rows_of_part, N, place_blocks, WIDE)
    parts = tl.num_programs(0) // channel_blocks
    return block, part, parts, place_blocks, begin, end


@triton.jit
def rows_of(part, rows_of_part, N, place_blocks, WIDE: tl.constexpr):
    """The first row of a part and the one after it."""
    begin = part * rows_of_part
    end = N * place_blocks
    if WIDE:
        begin = int64(part) * rows_of_part
        end = int64(N) * place_blocks
    return begin, tl.minimum(begin + rows_of_part, end)


@triton.jit
def _halved(values, AXIS: tl.constexpr, NEAR: tl.constexpr):
    """A tile's numbers added up two and two along an axis: neighbours, or those half of it apart."""
    ROWS: tl.constexpr = values.shape[0]
    PLACES: tl.constexpr = values.shape[1]
    CHANNELS: tl.constexpr = values.shape[2]
    if AXIS == 0:
        result = tl.sum(tl.reshape(values, (2, ROWS // 2, PLACES, CHANNELS)), axis=0)
    elif NEAR:
        result = tl.sum(tl.reshape(values, (ROWS, PLACES // 2, 2, CHANNELS)), axis=2)
    else:
        result = tl.sum(tl.reshape(values, (ROWS, 2, PLACES // 2, CHANNELS)), axis=1)
    return result


@triton.jit
def _folded(values, FOLDS: tl.constexpr):
    """A tile's numbers added up by a few, two and two so that roundings are few, and as float64."""
    ROWS: tl.constexpr = FOLDS[0]
    PLACES: tl.constexpr = FOLDS[1]
    NEIGHBOURS: tl.constexpr = FOLDS[2]
    for _ in tl.static_range(NEIGHBOURS):
        values = _halved(values, 1, True)
    for _ in tl.static_range(PLACES):
        values = _halved(values, 1, False)
    for _ in tl.static_range(ROWS):
        values = _halved(values, 0, False)
    return values.to(tl.float64)


@triton.jit
def _data(pointer, rows, mask, place_blocks, block, strides, PLACES, CHANNELS, STRETCH, MASKED, WIDE, VECTOR):
    """A tile of data."""
    at = tile_at(pointer, rows, place_blocks, block, strides, PLACES, CHANNELS, STRETCH, WIDE, VECTOR)
    if MASKED[0] or MASKED[1]:
        values = tl.load(at, mask=mask, other=0.0)
    else:
        values = tl.load(at)
    return values


@triton.jit
def _tiles(row, end, data, ROWS: tl.constexpr, PLACES, CHANNELS, STRETCH, MASKED, WIDE: tl.constexpr, VECTOR):
    """The tiles of grad_out and input from a row on, and which elements there are; of the input alone without it."""
    grad_out, input, place_blocks, block, C, P, grad_out_strides, input_strides = data
    rows = rows_from(row, ROWS, WIDE)
    mask = tile_mask(rows, end, place_blocks, block, C, P, PLACES, CHANNELS, STRETCH, MASKED, VECTOR)
    x = _data(input, rows, mask, place_blocks, block, input_strides, PLACES, CHANNELS, STRETCH, MASKED, WIDE, VECTOR)
    dy = x
    if grad_out is not None:
        strides = grad_out_strides
        dy = _data(grad_out, rows, mask, place_blocks, block, strides, PLACES, CHANNELS, STRETCH, MASKED, WIDE, VECTOR)
    return dy, x, mask


@triton.jit
def _add(first, second, dy, x, mask, centre, ONE: tl.constexpr, MASKED: tl.constexpr, FOLDS: tl.constexpr):
    """The sums, with those of one more tile; channels that are not there have any."""
    away = wide(x).to(centre.dtype) - centre
    if MASKED[0]:
        away = tl.where(mask, away, 0.0)  # no 0·Inf in the sums
    by = away
    if not ONE:
        by = wide(dy).to(centre.dtype)
    first += _folded(by, FOLDS)
    second += _folded(by * away, FOLDS)
    return first, second


@triton.jit
def _median(a, b, c):
    return tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))


@triton.jit
def centre_of(given):
    """What the numbers of each channel are summed up about: the one that is given, or the middle one of three.

    0 where the middle one is not finite.
    """
    if len(given) == 1:
        centre = given[0]
    else:
        middle = _median(given[0], given[1], given[2])
        centre = tl.where(middle - middle == 0.0, middle, 0.0)
    return centre


@triton.jit
def sums_of_rows(
    begin,
    end,
    given,  # as for ``centre_of``
    data,  # grad_out or None, input, blocks of places, the block of channels, C, P, the strides of both
    WIDER: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    STRETCH: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
    FOLDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Σ grad_out and Σ grad_out·(input − centre) for a block of channels, the products in WIDER.

    Without a grad_out, Σ(input − centre) and Σ(input − centre)². What the centre is made of has to come from memory,
    and from other threads: it is waited for in the first turn, when the tiles of the next ones are on their way.
    With 0 STAGES there is but one tile, and MASKED where rows are not.
    """
    SUMS: tl.constexpr = (ROWS >> FOLDS[0], PLACES >> (FOLDS[1] + FOLDS[2]), CHANNELS)
    ONE: tl.constexpr = data[0] is None
    first = tl.zeros(SUMS, tl.float64)
    second = tl.zeros(SUMS, tl.float64)
    about = tl.zeros((1, 1, CHANNELS), WIDER)
    if STAGES == 0:
        dy, x, mask = _tiles(begin, end, data, ROWS, PLACES, CHANNELS, STRETCH, MASKED, WIDE, VECTOR)
        about = centre_of(given).to(WIDER)[None, None, :]
        first, second = _add(first, second, dy, x, mask, about, ONE, MASKED, FOLDS)
    else:
        whole = (end - begin) // ROWS
        for turn in tl.range(0, whole, num_stages=STAGES):
            dy, x, mask = _tiles(begin + turn * ROWS, end, data, ROWS, PLACES, CHANNELS, STRETCH, MASKED, WIDE, VECTOR)
            if turn == 0:
                about = centre_of(given).to(WIDER)[None, None, :]
            first, second = _add(first, second, dy, x, mask, about, ONE, MASKED, FOLDS)
        if ROWS > 1:  # noqa: SIM102 - Triton looks at both sides of an "and"
            if begin + whole * ROWS < end:
                LAST: tl.constexpr = (True, MASKED[1])
                row = begin + whole * ROWS
                dy, x, mask = _tiles(row, end, data, ROWS, PLACES, CHANNELS, STRETCH, LAST, WIDE, VECTOR)
                about = centre_of(given).to(WIDER)[None, None, :]
                first, second = _add(first, second, dy, x, mask, about, ONE, LAST, FOLDS)
    first, second = sum_pair(first, second, 1)
    return sum_pair(first, second, 0)


@triton.jit
def runs_of(block, run, C, over, CHANNELS: tl.constexpr, STRETCH: tl.constexpr, RUNS: tl.constexpr):
    """The channels of a block, as many as there are in all for one that is not there; and of each in the block:

    where its first number is, how many it has, which of the channel's blocks it is, and if the last, how many of
    ``over`` there are not.
    """
    if RUNS[1] == 1:
        channels = indices(block, CHANNELS)
        begin = tl.arange(0, CHANNELS)
        length = tl.full((CHANNELS,), 1, tl.int32)
        entry, spare = 0, 0
    else:
        first = block * STRETCH
        channels = first // run + tl.arange(0, RUNS[0])
        to_end = (channels + 1) * run - first
        begin = tl.maximum(to_end - run, 0)
        length = tl.maximum(tl.minimum(to_end, channels_left(block, C, STRETCH, 1)) - begin, 0)
        entry = block - channels * run // STRETCH
        spare = tl.where(to_end <= STRETCH, over - 1 - entry, 0)
        channels = tl.where(length > 0, channels, C // run).to(tl.int64)
    return channels, begin, length, entry, spare


@triton.jit
def by_channel(values, begin, length, RUNS: tl.constexpr):
    """A block's numbers as [channels, numbers of each], and 0 where a channel has no more."""
    place = tl.arange(0, RUNS[1])[None, :]
    there = place < length[:, None]
    at = tl.reshape(tl.where(there, begin[:, None] + place, 0), (RUNS[0] * RUNS[1],))
    return tl.where(there, tl.reshape(tl.gather(values, at, 0), (RUNS[0], RUNS[1])), 0.0)


@triton.jit
def put_part(lines, values, channels, C, part, parts, entry, spare, over):
    """Store numbers of a part of a block of channels, [parts, over, C] each; 0 for blocks that there are not."""
    inside = channels < C
    at = lines + (int64(part) * over + entry) * C + channels
    for item in tl.static_range(len(values)):
        place = at + item * int64(parts) * over * C
        tl.store(place, values[item], mask=inside)
        if over > 1:
            for further in range(1, tl.max(spare, axis=0) + 1):
                tl.store(place + int64(further) * C, tl.zeros_like(values[item]), mask=inside & (further <= spare))


@triton.jit
def _scales(invstd, channels, C, grad_weight):
    """What the sums of products become the weight's gradient with; asked for before the sums are there."""
    if grad_weight is not None:
        scales = wide(tl.load(invstd + channels, mask=channels < C, other=0.0)).to(tl.float64)
    else:
        scales = 0.0
    return scales


@triton.jit
def _put_gradients(dy, dy_xmu, scales, channels, C, sum_dy, sum_dy_xmu, grad_weight, grad_bias, strides):
    """Store a block of channels' sums, and the gradients made of them, where they are wanted."""
    inside = channels < C
    if sum_dy is not None:
        put(sum_dy + channels * strides[0], dy.to(tl.float32), inside)
    if sum_dy_xmu is not None:
        put(sum_dy_xmu + channels * strides[1], dy_xmu.to(tl.float32), inside)
    if grad_weight is not None:
        put(grad_weight + channels * strides[2], (dy_xmu * scales).to(tl.float32), inside)
    if grad_bias is not None:
        put(grad_bias + channels * strides[3], dy.to(tl.float32), inside)


@triton.jit
def batch_norm_part_sums(
    grad_out,  # [N, C, P]
    input,  # [N, C, P]
    mean,  # [C]
    partial,  # float64 [2, parts, over, C], or None where a program or a cluster has a channel
    invstd,  # [C]; this and the outputs are None where there is a partial
    sum_dy,  # [C], or None
    sum_dy_xmu,  # [C], or None
    grad_weight,  # [C], or None
    grad_bias,  # [C], or None
    output_strides,
    N,
    C,
    P,
    rows_of_part,
    run,
    over,
    grad_out_strides,  # of sample, channel and place
    input_strides,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    STRETCH: tl.constexpr,
    ALONE: tl.constexpr,  # there is one sample
    WHOLE: tl.constexpr,
    RUNS: tl.constexpr,  # of how many channels, and of how many numbers of each, a block is at the most
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
    FOLDS: tl.constexpr,  # how often a tile is added up two and two: rows, places far apart, and neighbours
    STAGES: tl.constexpr,  # 0 where a program has one tile
    CLUSTER: tl.constexpr,  # how many programs have a block of channels; 0 where another launch takes them together
):
    """Σ grad_out and Σ grad_out·(input − mean) over a part of the rows, for a block of channels."""
    let_next_launch_begin()
    if CLUSTER > 1:
        told = open_slots_of_first(RUNS[0], CLUSTER)
    block, part, parts, several, begin, end = work_of(rows_of_part, N, C, P, PLACES, STRETCH, WHOLE, WIDE, CLUSTER)
    if ALONE:
        place_blocks: tl.constexpr = None
    else:
        place_blocks = several
    WIDER: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float32 else tl.float32
    centre = load_vector(mean, channels_of(block, run, CHANNELS, STRETCH), C // run)
    given = (tl.reshape(centre, (CHANNELS,)),)
    channels, from_, length, entry, spare = runs_of(block, run, C, over, CHANNELS, STRETCH, RUNS)
    scales = _scales(invstd, channels, C // run, grad_weight)
    data = (grad_out, input, place_blocks, block, C, P, grad_out_strides, input_strides)
    first, second = sums_of_rows(
        begin, end, given, data, WIDER, ROWS, PLACES, CHANNELS, STRETCH, MASKED, WIDE, VECTOR, FOLDS, STAGES
    )
    if RUNS[1] > 1:
        first, second = sum_pair(by_channel(first, from_, length, RUNS), by_channel(second, from_, length, RUNS), 1)
    outputs = (sum_dy, sum_dy_xmu, grad_weight, grad_bias)
    if CLUSTER > 1:
        tell_first(first, second, told, part, RUNS[0], CLUSTER)
        if part == 0:
            dy, dy_xmu = sums_of_all(wait_for_all(told, 0, RUNS[0], CLUSTER), CLUSTER)
            _put_gradients(dy, dy_xmu, scales, channels, C // run, *outputs, output_strides)
    elif partial is None:
        _put_gradients(first, second, scales, channels, C // run, *outputs, output_strides)
    else:
        put_part(partial, (first, second), channels, C // run, part, parts, entry, spare, over)


@triton.jit
def batch_norm_finish_sums(
    partial,  # float64 [2, parts, C]
    invstd,  # [C]
    sum_dy,  # [C], or None
    sum_dy_xmu,  # [C], or None
    grad_weight,  # [C], or None
    grad_bias,  # [C], or None
    output_strides,
    parts,
    C,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ONCE: tl.constexpr,  # there are no more parts than ROWS
):
    """The sums over the parts of a block of channels, and the gradients made of them."""
    channels = indices(tl.program_id(0), CHANNELS)
    inside = channels < C
    scales = _scales(invstd, channels, C, grad_weight)  # which the launch before has not written
    wait_for_launch_before()
    further = partial + int64(parts) * C
    offsets = tl.arange(0, ROWS).to(tl.int64)[:, None] * C + channels[None, :]
    mask = (tl.arange(0, ROWS) < parts)[:, None] & inside[None, :]
    first = tl.load(partial + offsets, mask=mask, other=0.0)
    second = tl.load(further + offsets, mask=mask, other=0.0)
    if not ONCE:
        for start in range(ROWS, parts, ROWS):
            rows = start + tl.arange(0, ROWS)
            mask = (rows < parts)[:, None] & inside[None, :]
            offsets = rows.to(tl.int64)[:, None] * C + channels[None, :]
            first += tl.load(partial + offsets, mask=mask, other=0.0)
            second += tl.load(further + offsets, mask=mask, other=0.0)
    outputs = (sum_dy, sum_dy_xmu, grad_weight, grad_bias)
    dy, dy_xmu = tl.sum(first, axis=0), tl.sum(second, axis=0)
    _put_gradients(dy, dy_xmu, scales, channels, C, *outputs, output_strides)
