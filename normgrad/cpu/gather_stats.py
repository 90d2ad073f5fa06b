"""The statistics of a whole batch from those of its ranks: a kernel for one thread."""

import numpy as np

from normgrad.cpu.copies import load_coded, store_exact
from normgrad.cpu.gather_stats_fields import (
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
from normgrad.cpu.jit import device, kernel
from normgrad.cpu.memory import load_f64, load_i32, start_of, store_f64


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


@kernel
def batch_norm_gather_stats_with_counts(desc):
    """All results first, then all writing: outputs may lie on inputs. A rank without elements adds nothing."""
    p, ranks, channels, results = start_of(desc), desc[RANKS], desc[CHANNELS], desc[RESULTS]
    momentum, eps = load_f64(p, MOMENTUM), load_f64(p, EPS)
    n = 0.0
    for rank in range(ranks):
        n += _count(desc, rank)
    for c in range(channels):
        total, squares = 0.0, 0.0
        for rank in range(ranks):
            count = _count(desc, rank)
            if count != 0.0:
                total += _of_rank(desc, MEAN, rank, c) * count
        mean = total / n
        for rank in range(ranks):
            count = _count(desc, rank)
            if count != 0.0:
                invstd, distance = _of_rank(desc, INVSTD, rank, c), _of_rank(desc, MEAN, rank, c) - mean
                squares += (1.0 / (invstd * invstd) - eps + distance * distance) * count
        store_f64(results, c, mean)
        store_f64(results, channels + c, 1.0 / np.sqrt(squares / n + eps))
        store_f64(results, 2 * channels + c, _moved(desc, RUNNING_MEAN, c, momentum, mean))
        store_f64(results, 3 * channels + c, _moved(desc, RUNNING_VAR, c, momentum, squares / (n - 1.0)))
    for number, vector in enumerate((MEAN_ALL, INVSTD_ALL, RUNNING_MEAN, RUNNING_VAR)):
        if desc[vector] != 0:
            for c in range(channels):
                value = load_f64(results, number * channels + c)
                store_exact(desc[vector + 2], desc[vector], c * desc[vector + 1], value)
