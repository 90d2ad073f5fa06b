"""LayerNorm and GroupNorm between 16-bit activations and float32 results, as autocast asks for: the CUDA backend only.

The forward pass reads 16-bit data and writes float32; the backward pass reads float32 gradients beside 16-bit data and
writes 16-bit gradients. The contract has no such calls, and these operators are not public: ``normgrad.torch`` calls
them where it would otherwise have to convert the activations to float32 first.
"""

from __future__ import annotations

from normgrad.contract.dtypes import BFLOAT16, FLOAT16, FLOAT32
from normgrad.contract.rules import dtype_of, one_of
from normgrad.operators.group_norm import group_norm, group_norm_backward
from normgrad.operators.layer_norm import layer_norm, layer_norm_backward

_FLOAT32 = one_of(FLOAT32)
_16_BITS = one_of(BFLOAT16, FLOAT16)


MIXED = {
    "layer_norm": layer_norm.with_dtypes(input=_16_BITS, output=_FLOAT32),
    "layer_norm_backward": layer_norm_backward.with_dtypes(grad_out=_FLOAT32, input=_16_BITS),
    "group_norm": group_norm.with_dtypes(input=_16_BITS, output=_FLOAT32),
    "group_norm_backward": group_norm_backward.with_dtypes(
        grad_out=_FLOAT32, input=_16_BITS, grad_input=dtype_of("input")
    ),
}
