"""The statistics of a whole batch from those of its ranks: a kernel for one thread."""

import numpy as np

from normgrad.cpu.compile.jit import device, in_place, kernel
from normgrad.cpu.fields.gather_stats import (
    CHANNELS,
    COUNTS,
    EPS,
    INVSTD,
    INVSTD_ALL,
    MEAN,
    MEAN_ALL,
    MOMENTUM,
    RANKS,
    RESULTS,
    RUNNING_MEAN,
    RUNNING_VAR,
)
from normgrad.cpu.intrinsics.memory import load_f64, load_i32, start_of, store_f64
from normgrad.cpu.intrinsics.vectors import fma, splat_f64, vload, vstore_f64, widen
from normgrad.cpu.kernels.copy import load_coded, store_exact
from normgrad.cpu.tags import F32


@device
def _count(desc, rank):
    if desc[COUNTS + 2] == 3:
        return np.float64(load_i32(desc[COUNTS], rank * desc[COUNTS + 1]))
    return np.float64(load_coded(desc[COUNTS + 2], desc[COUNTS], rank * desc[COUNTS + 1]))


@device
def _of_rank(desc, tensor, rank, c):
    index = rank * desc[tensor + 1] + c * desc[tensor + 2]
    return np.float64(load_coded(desc[tensor + 3], desc[tensor], index))


@device
def _moved(desc, vector, c, momentum, new):
    if desc[vector] == 0:
        return 0.0
    old = np.float64(load_coded(desc[vector + 2], desc[vector], c * desc[vector + 1]))
    return (1.0 - momentum) * old + momentum * new


@device
def _moments(desc, c, n, eps):
    """The mean of a channel over all ranks, and the sum of squares about it. A rank without elements adds nothing."""
    total, squares = 0.0, 0.0
    for rank in range(desc[RANKS]):
        count = _count(desc, rank)
        if count != 0.0:
            total += _of_rank(desc, MEAN, rank, c) * count
    mean = total / n
    for rank in range(desc[RANKS]):
        count = _count(desc, rank)
        if count != 0.0:
            invstd, distance = _of_rank(desc, INVSTD, rank, c), _of_rank(desc, MEAN, rank, c) - mean
            squares += (1.0 / (invstd * invstd) - eps + distance * distance) * count
    return mean, squares


@in_place
def _lanes(desc, tensor, rank, c):
    return widen(vload(F32, desc[tensor], rank * desc[tensor + 1] + c))


@device
def _moments_of_lanes(desc, c, n, eps, results):
    """The same of 16 channels that are neighbours, to the results."""
    total, squares, one = splat_f64(0.0), splat_f64(0.0), splat_f64(1.0)
    for rank in range(desc[RANKS]):
        count = _count(desc, rank)
        if count != 0.0:
            total = fma(_lanes(desc, MEAN, rank, c), splat_f64(count), total)
    mean = total / splat_f64(n)
    for rank in range(desc[RANKS]):
        count = _count(desc, rank)
        if count != 0.0:
            invstd, distance = _lanes(desc, INVSTD, rank, c), _lanes(desc, MEAN, rank, c) - mean
            variance = one / (invstd * invstd) - splat_f64(eps)
            squares = fma(fma(distance, distance, variance), splat_f64(count), squares)
    vstore_f64(results, c, mean)
    vstore_f64(results, desc[CHANNELS] + c, squares)


@device
def _are_neighbours(desc, tensor):
    return desc[tensor + 2] == 1 and desc[tensor + 3] == 0


@kernel
def batch_norm_gather_stats_with_counts(desc):
    """All results first, then all writing: outputs may lie on inputs."""
    p, channels, results = start_of(desc), desc[CHANNELS], desc[RESULTS]
    momentum, eps = load_f64(p, MOMENTUM), load_f64(p, EPS)
    n = 0.0
    for rank in range(desc[RANKS]):
        n += _count(desc, rank)
    whole = channels & ~15 if _are_neighbours(desc, MEAN) and _are_neighbours(desc, INVSTD) else 0
    for c in range(0, whole, 16):
        _moments_of_lanes(desc, c, n, eps, results)
    for c in range(whole, channels):
        mean, squares = _moments(desc, c, n, eps)
        store_f64(results, c, mean)
        store_f64(results, channels + c, squares)
    for c in range(channels):
        mean, squares = load_f64(results, c), load_f64(results, channels + c)
        store_f64(results, channels + c, 1.0 / np.sqrt(squares / n + eps))
        store_f64(results, 2 * channels + c, _moved(desc, RUNNING_MEAN, c, momentum, mean))
        store_f64(results, 3 * channels + c, _moved(desc, RUNNING_VAR, c, momentum, squares / (n - 1.0)))
    for number, vector in enumerate((MEAN_ALL, INVSTD_ALL, RUNNING_MEAN, RUNNING_VAR)):
        if desc[vector] != 0:
            for c in range(channels):
                value = load_f64(results, number * channels + c)
                store_exact(desc[vector + 2], desc[vector], c * desc[vector + 1], value)
