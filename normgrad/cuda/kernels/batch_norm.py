"""The steps of synchronised BatchNorm, for any strides of sample, channel and place.

A tile is [SAMPLES, PLACES, CHANNELS], shaped so that what lies side by side in memory is read side by side. Programs
are numbered with the channels' tiles fastest, then places, then samples.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.common import float64, float64_of_bits, indices, int64, put, sum_pair, wide


@triton.jit
def _offsets(samples, places, channels, sample_stride, channel_stride, place_stride):
    return (
        samples[:, None, None] * sample_stride
        + places[None, :, None] * place_stride
        + channels[None, None, :] * channel_stride
    )


@triton.jit
def _load_vector(pointer, channels, C):
    return wide(tl.load(pointer + channels, mask=channels < C, other=0.0))[None, None, :]


@triton.jit
def _place_in_grid(C, P, PLACES: tl.constexpr, CHANNELS: tl.constexpr):
    """The blocks of samples, places and channels of this program."""
    program = tl.program_id(0)
    channel_blocks = tl.cdiv(C, CHANNELS)
    place_blocks = tl.cdiv(P, PLACES)
    row = program // channel_blocks
    return row // place_blocks, row % place_blocks, program % channel_blocks


@triton.jit
def _total(counter, count, BLOCK: tl.constexpr):
    """The sum of the counter, as float32."""
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(counter + place, mask=place < count, other=0).to(tl.float64)
    return tl.sum(total).to(tl.float32)


@triton.jit
def batch_norm_elemt_backward(
    grad_out,  # [N, C, P]
    input,  # [N, C, P]
    mean,  # [C]
    invstd,  # [C]
    weight,  # [C], or None
    sum_dy,  # [C]
    sum_dy_xmu,  # [C]
    counter,  # [ranks]
    grad_input,  # [N, C, P]
    N,
    C,
    P,
    ranks,
    grad_out_sample,
    grad_out_channel,
    grad_out_place,
    input_sample,
    input_channel,
    input_place,
    grad_input_sample,
    grad_input_channel,
    grad_input_place,
    SAMPLES: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """The gradient of a tile."""
    sample_block, place_block, channel_block = _place_in_grid(C, P, PLACES, CHANNELS)
    samples = indices(sample_block, SAMPLES)
    places = indices(place_block, PLACES)
    channels = indices(channel_block, CHANNELS)
    mask = (samples < N)[:, None, None] & (places < P)[None, :, None] & (channels < C)[None, None, :]
    dy = tl.load(
        grad_out + _offsets(samples, places, channels, grad_out_sample, grad_out_channel, grad_out_place), mask=mask
    )
    x = tl.load(input + _offsets(samples, places, channels, input_sample, input_channel, input_place), mask=mask)
    n = _total(counter, ranks, RANKS)
    inverse = _load_vector(invstd, channels, C)
    mean_dy = tl.div_rn(_load_vector(sum_dy, channels, C), n)
    slope = inverse * inverse * tl.div_rn(_load_vector(sum_dy_xmu, channels, C), n)
    scale = inverse
    if weight is not None:
        scale = inverse * _load_vector(weight, channels, C)
    xmu = wide(x) - _load_vector(mean, channels, C)
    result = (wide(dy) - mean_dy - xmu * slope) * scale
    target = grad_input + _offsets(samples, places, channels, grad_input_sample, grad_input_channel, grad_input_place)
    put(target, result, mask)


@triton.jit
def batch_norm_elemt(
    input,  # [N, C, P]
    weight,  # [C], or None
    bias,  # [C], or None
    mean,  # [C]
    invstd,  # [C]
    output,  # [N, C, P]
    N,
    C,
    P,
    input_sample,
    input_channel,
    input_place,
    output_sample,
    output_channel,
    output_place,
    SAMPLES: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The normalised tile."""
    sample_block, place_block, channel_block = _place_in_grid(C, P, PLACES, CHANNELS)
    samples = indices(sample_block, SAMPLES)
    places = indices(place_block, PLACES)
    channels = indices(channel_block, CHANNELS)
    mask = (samples < N)[:, None, None] & (places < P)[None, :, None] & (channels < C)[None, None, :]
    x = tl.load(input + _offsets(samples, places, channels, input_sample, input_channel, input_place), mask=mask)
    result = (wide(x) - _load_vector(mean, channels, C)) * _load_vector(invstd, channels, C)
    if weight is not None:
        result = result * _load_vector(weight, channels, C)
    if bias is not None:
        result = result + _load_vector(bias, channels, C)
    target = output + _offsets(samples, places, channels, output_sample, output_channel, output_place)
    put(target, result, mask)


@triton.jit
def batch_norm_tile_sums(
    grad_out,  # [N, C, P]
    input,  # [N, C, P]
    mean,  # [C]
    partial,  # float32 [2, tiles of a channel, C]
    N,
    C,
    P,
    grad_out_sample,
    grad_out_channel,
    grad_out_place,
    input_sample,
    input_channel,
    input_place,
    SAMPLES: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Σ grad_out and Σ grad_out·(input − mean) of a tile."""
    sample_block, place_block, channel_block = _place_in_grid(C, P, PLACES, CHANNELS)
    samples = indices(sample_block, SAMPLES)
    places = indices(place_block, PLACES)
    channels = indices(channel_block, CHANNELS)
    mask = (samples < N)[:, None, None] & (places < P)[None, :, None] & (channels < C)[None, None, :]
    dy = tl.load(
        grad_out + _offsets(samples, places, channels, grad_out_sample, grad_out_channel, grad_out_place),
        mask=mask,
        other=0.0,
    )
    dy = wide(dy)
    x = tl.load(
        input + _offsets(samples, places, channels, input_sample, input_channel, input_place), mask=mask, other=0.0
    )
    xmu = tl.where(mask, wide(x) - _load_vector(mean, channels, C), 0.0)
    first, second = sum_pair(dy, dy * xmu, 1)
    sum_dy, sum_dy_xmu = sum_pair(first, second, 0)
    tile = int64(sample_block) * tl.cdiv(P, PLACES) + place_block
    tiles = int64(tl.cdiv(N, SAMPLES)) * tl.cdiv(P, PLACES)
    tl.store(partial + tile * C + channels, sum_dy, mask=channels < C)
    tl.store(partial + (tiles + tile) * C + channels, sum_dy_xmu, mask=channels < C)


@triton.jit
def batch_norm_finish_sums(
    partial,  # float32 [2, tiles, C]
    invstd,  # [C]
    sum_dy,  # [C], or None
    sum_dy_xmu,  # [C], or None
    grad_weight,  # [C], or None
    grad_bias,  # [C], or None
    tiles,
    C,
    sum_dy_stride,
    sum_dy_xmu_stride,
    grad_weight_stride,
    grad_bias_stride,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The sums over the tiles of a block of channels, and the gradients made of them."""
    channels = indices(tl.program_id(0), CHANNELS)
    inside = channels < C
    first = tl.zeros((ROWS, CHANNELS), tl.float64)
    second = tl.zeros((ROWS, CHANNELS), tl.float64)
    further = partial + int64(tiles) * C
    for start in range(0, tiles, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < tiles)[:, None] & inside[None, :]
        offsets = rows.to(tl.int64)[:, None] * C + channels[None, :]
        first += tl.load(partial + offsets, mask=mask, other=0.0).to(tl.float64)
        second += tl.load(further + offsets, mask=mask, other=0.0).to(tl.float64)
    dy, dy_xmu = tl.sum(first, axis=0), tl.sum(second, axis=0)
    if sum_dy is not None:
        put(sum_dy + channels * sum_dy_stride, dy.to(tl.float32), inside)
    if sum_dy_xmu is not None:
        put(sum_dy_xmu + channels * sum_dy_xmu_stride, dy_xmu.to(tl.float32), inside)
    if grad_weight is not None:
        inverse = wide(tl.load(invstd + channels, mask=inside, other=0.0)).to(tl.float64)
        put(grad_weight + channels * grad_weight_stride, (dy_xmu * inverse).to(tl.float32), inside)
    if grad_bias is not None:
        put(grad_bias + channels * grad_bias_stride, dy.to(tl.float32), inside)


@triton.jit
def _tile_sizes(tiles, N, P, SAMPLES: tl.constexpr, PLACES: tl.constexpr):
    """How many elements of a channel the tiles of these numbers have, as float64."""
    place_blocks = tl.cdiv(P, PLACES)
    samples = tl.minimum(tl.maximum(N - (tiles // place_blocks) * SAMPLES, 0), SAMPLES)
    places = tl.minimum(P - (tiles % place_blocks) * PLACES, PLACES)
    return samples.to(tl.float64) * places.to(tl.float64)


@triton.jit
def batch_norm_tile_moments(
    input,  # [N, C, P]
    moments,  # float64 [2, tiles of a channel, C]: mean, Σ(x − mean)²
    N,
    C,
    P,
    input_sample,
    input_channel,
    input_place,
    SAMPLES: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The mean of a tile's channels, and the squares about it."""
    sample_block, place_block, channel_block = _place_in_grid(C, P, PLACES, CHANNELS)
    samples = indices(sample_block, SAMPLES)
    places = indices(place_block, PLACES)
    channels = indices(channel_block, CHANNELS)
    mask = (samples < N)[:, None, None] & (places < P)[None, :, None] & (channels < C)[None, None, :]
    x = tl.load(
        input + _offsets(samples, places, channels, input_sample, input_channel, input_place), mask=mask, other=0.0
    )
    x = wide(x)
    tile = int64(sample_block) * tl.cdiv(P, PLACES) + place_block
    tiles = int64(tl.cdiv(N, SAMPLES)) * tl.cdiv(P, PLACES)
    count = _tile_sizes(tile, N, P, SAMPLES, PLACES)
    # About a first mean, whose rounding the second sums correct: a constant channel has no variance at all.
    about = (tl.sum(tl.sum(x, axis=1), axis=0).to(tl.float64) / count).to(tl.float32)
    away = tl.where(mask, x - about[None, None, :], 0.0)
    first, second = sum_pair(away, away * away, 1)
    sum_away, sum_squares = sum_pair(first, second, 0)
    drift = sum_away.to(tl.float64) / count
    squares = sum_squares.to(tl.float64) - drift * sum_away.to(tl.float64)
    squares = tl.where(squares < 0.0, 0.0, squares)
    tl.store(moments + tile * C + channels, about.to(tl.float64) + drift, mask=channels < C)
    tl.store(moments + (tiles + tile) * C + channels, squares, mask=channels < C)


@triton.jit
def batch_norm_finish_moments(
    moments,  # float64 [2, tiles, C]
    mean,  # [C]
    invstd,  # [C]
    tiles,
    N,
    C,
    P,
    eps_bits,  # float64
    mean_stride,
    invstd_stride,
    SAMPLES: tl.constexpr,  # of a tile
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The mean and reciprocal deviation of a block of channels from the moments of their tiles."""
    channels = indices(tl.program_id(0), CHANNELS)
    inside = channels < C
    further = moments + int64(tiles) * C
    total = tl.zeros((ROWS, CHANNELS), tl.float64)
    n = float64(N) * float64(P)
    for start in range(0, tiles, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < tiles)[:, None] & inside[None, :]
        sizes = _tile_sizes(rows, N, P, SAMPLES, PLACES)[:, None]
        total += sizes * tl.load(moments + rows[:, None] * C + channels[None, :], mask=mask, other=0.0)
    centre = tl.sum(total, axis=0) / n
    squares = tl.zeros((ROWS, CHANNELS), tl.float64)
    for start in range(0, tiles, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < tiles)[:, None] & inside[None, :]
        sizes = _tile_sizes(rows, N, P, SAMPLES, PLACES)[:, None]
        offsets = rows[:, None] * C + channels[None, :]
        apart = tl.load(moments + offsets, mask=mask, other=0.0) - centre[None, :]
        added = tl.load(further + offsets, mask=mask, other=0.0) + sizes * apart * apart
        squares += tl.where(mask, added, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / n + float64_of_bits(eps_bits))
    put(mean + channels * mean_stride, centre.to(tl.float32), inside)
    put(invstd + channels * invstd_stride, inverse.to(tl.float32), inside)


@triton.jit
def batch_norm_gather(
    mean,  # [ranks, C]
    invstd,  # [ranks, C]
    running_mean,  # [C], or None
    running_var,  # [C], or None
    counts,  # [ranks]
    mean_all,  # [C]
    invstd_all,  # [C]
    ranks,
    C,
    momentum_bits,  # float64
    eps_bits,  # float64
    running_mean_stride,
    running_var_stride,
    mean_all_stride,
    invstd_all_stride,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The statistics of a block of channels from those of the ranks, in float64."""
    channels = indices(tl.program_id(0), CHANNELS)
    inside = channels < C
    eps = float64_of_bits(eps_bits)
    momentum = float64_of_bits(momentum_bits)
    total = tl.zeros((ROWS, CHANNELS), tl.float64)
    counted = tl.zeros((ROWS,), tl.float64)
    for start in range(0, ranks, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < ranks)[:, None] & inside[None, :]
        count = tl.load(counts + rows, mask=rows < ranks, other=0).to(tl.float64)
        counted += count
        means = wide(tl.load(mean + rows[:, None] * C + channels[None, :], mask=mask, other=0.0)).to(tl.float64)
        total += tl.where(count[:, None] == 0.0, 0.0, means * count[:, None])
    n = tl.sum(counted)
    centre = tl.sum(total, axis=0) / n
    squares = tl.zeros((ROWS, CHANNELS), tl.float64)
    for start in range(0, ranks, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < ranks)[:, None] & inside[None, :]
        count = tl.load(counts + rows, mask=rows < ranks, other=0).to(tl.float64)
        offsets = rows[:, None] * C + channels[None, :]
        apart = wide(tl.load(mean + offsets, mask=mask, other=0.0)).to(tl.float64) - centre[None, :]
        inverse = wide(tl.load(invstd + offsets, mask=mask, other=1.0)).to(tl.float64)
        added = (1.0 / (inverse * inverse) - eps + apart * apart) * count[:, None]
        squares += tl.where(count[:, None] == 0.0, 0.0, added)
    summed = tl.sum(squares, axis=0)
    if running_mean is not None:
        place = running_mean + channels * running_mean_stride
        moved = (1.0 - momentum) * wide(tl.load(place, mask=inside, other=0.0)).to(tl.float64) + momentum * centre
        put(place, moved.to(tl.float32), inside)
    if running_var is not None:
        place = running_var + channels * running_var_stride
        moved = (1.0 - momentum) * wide(tl.load(place, mask=inside, other=0.0)).to(tl.float64) + momentum * (
            summed / (n - 1.0)
        )
        put(place, moved.to(tl.float32), inside)
    put(mean_all + channels * mean_all_stride, centre.to(tl.float32), inside)
    put(invstd_all + channels * invstd_all_stride, (1.0 / tl.sqrt(summed / n + eps)).to(tl.float32), inside)
