"""LayerNorm and GroupNorm with data of two dtypes, as autocast asks for: the CUDA backend only.

The forward pass may read 16-bit data and write float32, or the other way round; the backward pass reads gradients of
the output's dtype beside the data, and writes gradients of the data's dtype. The contract has no such calls, and these
operators are not public: ``normgrad.torch`` calls them where it would otherwise have to convert the activations first.
"""

from __future__ import annotations

from normgrad.contract.rules import dtype_of, floats
from normgrad.operators.group_norm import group_norm, group_norm_backward
from normgrad.operators.layer_norm import layer_norm, layer_norm_backward

#: By the name of the operator.
MIXED = {
    "layer_norm": layer_norm.with_dtypes(output=floats),
    "layer_norm_backward": layer_norm_backward.with_dtypes(input=floats),
    "group_norm": group_norm.with_dtypes(output=floats),
    "group_norm_backward": group_norm_backward.with_dtypes(input=floats, grad_input=dtype_of("input")),
}
