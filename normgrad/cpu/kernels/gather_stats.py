"""`batch_norm_gather_stats_with_counts`: the statistics of a whole batch from those of its ranks, on one thread."""

import numpy as np

from normgrad.cpu.compile.jit import device, inline, kernel
from normgrad.cpu.descriptors import GatherStats
from normgrad.cpu.intrinsics.memory import load_f64, store_f64
from normgrad.cpu.intrinsics.vectors import fma, splat_f64, vload, vload_f64, vstore_f64, widen
from normgrad.cpu.kernels.common.lanes import load_element, store_element
from normgrad.cpu.kernels.copy import load_by_code
from normgrad.cpu.limits import CHANNEL_BLOCK
from normgrad.cpu.tags import CODE_F32, F32


@device
def _of_rank(tensor, rank, c):
    index = rank * tensor.rank_stride + c * tensor.channel_stride
    return np.float64(load_by_code(tensor.dtype, tensor.address, index))


@device
def _updated(vector, c, momentum, new):
    """Return a running statistic after its update."""
    if vector.address == 0:
        return 0.0
    return (1.0 - momentum) * load_element(vector, c) + momentum * new


@device
def _moments(desc, c, n, eps):
    """Return the mean of a channel over all ranks, and the sum of squares about it. Empty ranks add nothing."""
    total, squares = 0.0, 0.0
    for rank in range(desc.ranks):
        count = load_element(desc.counts, rank)
        if count != 0.0:
            total += _of_rank(desc.mean, rank, c) * count
    mean = total / n
    for rank in range(desc.ranks):
        count = load_element(desc.counts, rank)
        if count != 0.0:
            invstd, distance = _of_rank(desc.invstd, rank, c), _of_rank(desc.mean, rank, c) - mean
            squares += (1.0 / (invstd * invstd) - eps + distance * distance) * count
    return mean, squares


@inline
def _lanes(tensor, rank, c):
    return widen(vload(F32, tensor.address, rank * tensor.rank_stride + c))


@device
def _moments_of_block(desc, first, last, n, eps):
    """Store the same of contiguous channels, 16 at a time.

    Every rank's row is read along its channels. Rows that are a power of two apart share the sets of the cache: reading
    all of them at one channel would evict them before the next.
    """
    zero, one, means, squares = splat_f64(0.0), splat_f64(1.0), desc.results, desc.results + 8 * desc.channels
    for c in range(first, last, 16):
        vstore_f64(means, c, zero)
        vstore_f64(squares, c, zero)
    for rank in range(desc.ranks):
        count = load_element(desc.counts, rank)
        if count != 0.0:
            for c in range(first, last, 16):
                total = fma(_lanes(desc.mean, rank, c), splat_f64(count), vload_f64(means, c))
                vstore_f64(means, c, total)
    for c in range(first, last, 16):
        vstore_f64(means, c, vload_f64(means, c) / splat_f64(n))
    for rank in range(desc.ranks):
        count = load_element(desc.counts, rank)
        if count != 0.0:
            for c in range(first, last, 16):
                invstd, distance = _lanes(desc.invstd, rank, c), _lanes(desc.mean, rank, c) - vload_f64(means, c)
                variance = one / (invstd * invstd) - splat_f64(eps)
                total = fma(fma(distance, distance, variance), splat_f64(count), vload_f64(squares, c))
                vstore_f64(squares, c, total)


@device
def _is_contiguous(tensor):
    return tensor.channel_stride == 1 and tensor.dtype == CODE_F32


@kernel
def batch_norm_gather_stats_with_counts(desc: GatherStats):
    """Compute all results, then write them: outputs may alias inputs."""
    channels, results, momentum, eps = desc.channels, desc.results, desc.momentum, desc.eps
    n = 0.0
    for rank in range(desc.ranks):
        n += load_element(desc.counts, rank)
    whole = channels & ~15 if _is_contiguous(desc.mean) and _is_contiguous(desc.invstd) else 0
    for first in range(0, whole, CHANNEL_BLOCK):
        _moments_of_block(desc, first, min(first + CHANNEL_BLOCK, whole), n, eps)
    for c in range(whole, channels):
        mean, squares = _moments(desc, c, n, eps)
        store_f64(results, c, mean)
        store_f64(results, channels + c, squares)
    for c in range(channels):
        mean, squares = load_f64(results, c), load_f64(results, channels + c)
        store_f64(results, channels + c, 1.0 / np.sqrt(squares / n + eps))
        store_f64(results, 2 * channels + c, _updated(desc.running_mean, c, momentum, mean))
        store_f64(results, 3 * channels + c, _updated(desc.running_var, c, momentum, squares / (n - 1.0)))
    for c in range(channels):
        store_element(desc.mean_all, c, load_f64(results, c))
        store_element(desc.invstd_all, c, load_f64(results, channels + c))
        store_element(desc.running_mean, c, load_f64(results, 2 * channels + c))
        store_element(desc.running_var, c, load_f64(results, 3 * channels + c))
