"""`batch_norm_gather_stats_with_counts`: the statistics of a whole batch from those of its ranks, on one thread."""

from collections import namedtuple

import numpy as np

from normgrad.cpu import limits
from normgrad.cpu.compile.jit import device, kernel
from normgrad.cpu.descriptors import GatherStats
from normgrad.cpu.intrinsics.memory import load, stack_space, store
from normgrad.cpu.intrinsics.vectors import fma, splat_f64, vload, vstore, widen
from normgrad.cpu.kernels.common.lanes import load_element, store_element, to_lanes
from normgrad.cpu.tags import F32, F64

#: The statistics of a rank, as `descriptors.Vector`.
_Row = namedtuple("_Row", "address stride dtype")

_means, _invstds = stack_space(limits.CHANNEL_BLOCK * 4), stack_space(limits.CHANNEL_BLOCK * 4)


@device
def _updated(vector, c, momentum, new):
    """Return a running statistic after its update."""
    if vector.address == 0:
        return 0.0
    return (1.0 - momentum) * load_element(vector, c) + momentum * new


@device
def _load(tensor, rank, first, last, channels, target):
    """Store a rank's statistics of channels [first, last) as float32, with zeros beyond the last channel."""
    row = _Row(tensor.address + rank * tensor.rank_stride, tensor.channel_stride, tensor.dtype)
    to_lanes(F32, False, row, 0.0, target - 4 * first, first, last, channels)


@device
def _moments(desc, first, last, n):
    """Store the mean of channels [first, last) over all ranks, and the sum of squares about it.

    Empty ranks add nothing. Every rank's row is read along its channels. Rows that are a power of two apart share the
    sets of the cache: reading all of them at one channel would evict them before the next.
    """
    means, invstds, zero, one, eps = _means(), _invstds(), splat_f64(0.0), splat_f64(1.0), splat_f64(desc.eps)
    totals, squares = desc.results + 8 * first, desc.results + 8 * (desc.padded_channels + first)
    for c in range(0, last - first, 16):
        vstore(F64, totals, c, zero)
        vstore(F64, squares, c, zero)
    for rank in range(desc.ranks):
        count = load_element(desc.counts, rank)
        if count != 0.0:
            _load(desc.mean, rank, first, last, desc.channels, means)
            for c in range(0, last - first, 16):
                total = fma(widen(vload(F32, means, c)), splat_f64(count), vload(F64, totals, c))
                vstore(F64, totals, c, total)
    for c in range(0, last - first, 16):
        vstore(F64, totals, c, vload(F64, totals, c) / splat_f64(n))
    for rank in range(desc.ranks):
        count = load_element(desc.counts, rank)
        if count != 0.0:
            _load(desc.mean, rank, first, last, desc.channels, means)
            _load(desc.invstd, rank, first, last, desc.channels, invstds)
            for c in range(0, last - first, 16):
                invstd, distance = widen(vload(F32, invstds, c)), widen(vload(F32, means, c)) - vload(F64, totals, c)
                square = fma(distance, distance, one / (invstd * invstd) - eps)
                vstore(F64, squares, c, fma(square, splat_f64(count), vload(F64, squares, c)))


@kernel
def batch_norm_gather_stats_with_counts(desc: GatherStats):
    """Compute all results, then write them: outputs may alias inputs."""
    channels, pitch, results, momentum = desc.channels, desc.padded_channels, desc.results, desc.momentum
    n = 0.0
    for rank in range(desc.ranks):
        n += load_element(desc.counts, rank)
    for first in range(0, pitch, limits.CHANNEL_BLOCK):
        _moments(desc, first, min(first + limits.CHANNEL_BLOCK, pitch), n)
    for c in range(channels):
        mean, squares = load(F64, results, c), load(F64, results, pitch + c)
        store(F64, results, pitch + c, 1.0 / np.sqrt(squares / n + desc.eps))
        store(F64, results, 2 * pitch + c, _updated(desc.running_mean, c, momentum, mean))
        store(F64, results, 3 * pitch + c, _updated(desc.running_var, c, momentum, squares / (n - 1.0)))
    for c in range(channels):
        store_element(desc.mean_all, c, load(F64, results, c))
        store_element(desc.invstd_all, c, load(F64, results, pitch + c))
        store_element(desc.running_mean, c, load(F64, results, 2 * pitch + c))
        store_element(desc.running_var, c, load(F64, results, 3 * pitch + c))
