"""The kernel of batch_norm_gather_stats_with_counts: the statistics of all ranks; ``launches`` launches it."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.indexing import block_indices, float64_from_bits
from normgrad.cuda.device.pack16 import store_rounded, to_float32


@triton.jit
def batch_norm_gather_stats(
    mean,  # [ranks, C]
    invstd,  # [ranks, C]
    running_mean,  # [C], or None
    running_var,  # [C], or None
    counts,  # [ranks]
    mean_all,  # [C]
    invstd_all,  # [C]
    ranks,
    C,
    momentum_bits,  # of a float64
    eps_bits,  # of a float64
    running_mean_stride,
    running_var_stride,
    mean_all_stride,
    invstd_all_stride,
    ROWS: tl.constexpr,  # ranks of a tile
    CHANNELS: tl.constexpr,  # of a tile
):
    """Combine the ranks' statistics of a block of channels a program, by Chan's formula in float64.

    First the means, weighted by their counts, give the mean of all; then, in a second pass over the ranks, to each
    rank's variance comes the squared distance of the means. A rank with a count of 0 adds nothing, whatever its
    statistics are. The running statistics are updated with momentum, the variance with Bessel's correction.
    """
    channels = block_indices(tl.program_id(0), CHANNELS)
    inside = channels < C
    eps = float64_from_bits(eps_bits)
    momentum = float64_from_bits(momentum_bits)
    weighted_means = tl.zeros((ROWS, CHANNELS), tl.float64)
    total_counts = tl.zeros((ROWS,), tl.float64)
    for start in range(0, ranks, ROWS):
        rank = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (rank < ranks)[:, None] & inside[None, :]
        count = tl.load(counts + rank, mask=rank < ranks, other=0).to(tl.float64)
        total_counts += count
        pointers = mean + rank[:, None] * C + channels[None, :]
        rank_mean = to_float32(tl.load(pointers, mask=mask, other=0.0)).to(tl.float64)
        weighted_means += tl.where(count[:, None] == 0.0, 0.0, rank_mean * count[:, None])
    n = tl.sum(total_counts)
    total_mean = tl.sum(weighted_means, axis=0) / n
    squares = tl.zeros((ROWS, CHANNELS), tl.float64)
    for start in range(0, ranks, ROWS):
        rank = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (rank < ranks)[:, None] & inside[None, :]
        count = tl.load(counts + rank, mask=rank < ranks, other=0).to(tl.float64)
        offsets = rank[:, None] * C + channels[None, :]
        deviation = to_float32(tl.load(mean + offsets, mask=mask, other=0.0)).to(tl.float64) - total_mean[None, :]
        rank_invstd = to_float32(tl.load(invstd + offsets, mask=mask, other=1.0)).to(tl.float64)
        rank_squares = (1.0 / (rank_invstd * rank_invstd) - eps + deviation * deviation) * count[:, None]
        squares += tl.where(count[:, None] == 0.0, 0.0, rank_squares)
    total_squares = tl.sum(squares, axis=0)
    if running_mean is not None:
        pointers = running_mean + channels * running_mean_stride
        decayed = (1.0 - momentum) * to_float32(tl.load(pointers, mask=inside, other=0.0)).to(tl.float64)
        store_rounded(pointers, (decayed + momentum * total_mean).to(tl.float32), inside)
    if running_var is not None:
        pointers = running_var + channels * running_var_stride
        decayed = (1.0 - momentum) * to_float32(tl.load(pointers, mask=inside, other=0.0)).to(tl.float64)
        store_rounded(pointers, (decayed + momentum * (total_squares / (n - 1.0))).to(tl.float32), inside)
    store_rounded(mean_all + channels * mean_all_stride, total_mean.to(tl.float32), inside)
    pointers = invstd_all + channels * invstd_all_stride
    store_rounded(pointers, (1.0 / tl.sqrt(total_squares / n + eps)).to(tl.float32), inside)
