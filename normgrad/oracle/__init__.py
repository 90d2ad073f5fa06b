"""The definition of correct: every operator in float64 NumPy, straight from its formula.

The functions take the operators' arguments (anything that ``numpy.asarray`` takes) and return float64 arrays, None
for an output that is not wanted. They check nothing.
"""

from normgrad.oracle.batch_norm import (
    batch_norm_elemt,
    batch_norm_elemt_backward,
    batch_norm_gather_stats_with_counts,
    batch_norm_reduce_backward,
    batch_norm_stats,
)
from normgrad.oracle.group_norm import group_norm, group_norm_backward
from normgrad.oracle.layer_norm import layer_norm, layer_norm_backward

__all__ = [
    "batch_norm_elemt",
    "batch_norm_elemt_backward",
    "batch_norm_gather_stats_with_counts",
    "batch_norm_reduce_backward",
    "batch_norm_stats",
    "group_norm",
    "group_norm_backward",
    "layer_norm",
    "layer_norm_backward",
]
