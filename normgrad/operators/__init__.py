"""The nine operators: what each one's parameters are and which rules they follow."""

from normgrad.operators.batch_norm import (
    batch_norm_elemt,
    batch_norm_elemt_backward,
    batch_norm_gather_stats_with_counts,
    batch_norm_reduce_backward,
    batch_norm_stats,
)
from normgrad.operators.group_norm import group_norm, group_norm_backward
from normgrad.operators.layer_norm import layer_norm, layer_norm_backward
from normgrad.operators.operator import Operator

#: Every operator by name.
OPERATORS: dict[str, Operator] = {
    op.signature.name: op
    for op in (
        layer_norm_backward,
        group_norm_backward,
        batch_norm_elemt_backward,
        layer_norm,
        group_norm,
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_reduce_backward,
    )
}

__all__ = [
    "OPERATORS",
    "Operator",
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
