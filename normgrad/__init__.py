"""LayerNorm, GroupNorm and synchronised BatchNorm, forward and backward, with a bound on the error."""

from normgrad.contract.plan import Plan
from normgrad.contract.products import Product, use_product
from normgrad.contract.status import ContractError
from normgrad.contract.stream import Stream
from normgrad.operators import (
    batch_norm_elemt,
    batch_norm_elemt_backward,
    batch_norm_gather_stats_with_counts,
    batch_norm_reduce_backward,
    batch_norm_stats,
    group_norm,
    group_norm_backward,
    layer_norm,
    layer_norm_backward,
)
from normgrad.threads import get_num_threads, set_num_threads

__version__ = "0.1.0"

__all__ = [
    "ContractError",
    "Plan",
    "Product",
    "Stream",
    "batch_norm_elemt",
    "batch_norm_elemt_backward",
    "batch_norm_gather_stats_with_counts",
    "batch_norm_reduce_backward",
    "batch_norm_stats",
    "get_num_threads",
    "group_norm",
    "group_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "set_num_threads",
    "use_product",
]
