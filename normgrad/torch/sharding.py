"""DTensors: a norm runs on each rank's shard where that is the same as on the whole tensor.

Rows of a LayerNorm and samples of a GroupNorm are independent: the dimensions in front of the normalized ones may be
sharded in any way, as batch and sequence are under data and sequence parallelism. Each rank's gradients of weight and
bias are then partial sums, which DTensor adds up where they are needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from normgrad.torch.outputs import memory_format

#: A norm as a function of input, weight and bias.
_Norm = Callable[[Any, Any, Any], Tensor]


def is_dtensor(input: Any) -> bool:
    """Return whether an input is a DTensor, without importing what only their users need."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(input, tensors.DTensor)


def norm_of_shards(norm: _Norm, input: Any, independent_dims: int, weight: Any, bias: Any) -> Tensor | None:
    """Return the norm of a DTensor, computed shard by shard; None where PyTorch has to redistribute it first.

    Parameters
    ----------
    norm : callable
        The norm of a local tensor.
    input : DTensor
        The data.
    independent_dims : int
        How many leading dimensions may be sharded.
    weight, bias : DTensor or None
        The parameters, replicated on all ranks of the input's mesh.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, placements = input.device_mesh, input.placements
    if not all(one.is_replicate() or (one.is_shard() and one.dim < independent_dims) for one in placements):
        return None
    for parameter in (weight, bias):
        if parameter is None:
            continue
        if not isinstance(parameter, DTensor) or parameter.device_mesh != mesh:
            return None
        if not all(one.is_replicate() for one in parameter.placements):
            return None
    sums = [Replicate() if one.is_replicate() else Partial() for one in placements]
    parameters = [None if one is None else one.to_local(grad_placements=sums) for one in (weight, bias)]
    output = norm(input.to_local(grad_placements=placements), *parameters)
    stride = torch.empty(input.shape, device="meta").to(memory_format=memory_format(output)).stride()
    found: Tensor = DTensor.from_local(output, mesh, placements, run_check=False, shape=input.shape, stride=stride)
    return found
