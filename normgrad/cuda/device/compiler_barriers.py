"""Workarounds for optimizations of Triton and ptxas that cost more than they save.

None of these functions changes a value; kernels are correct without them, and slower.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.indexing import INTERPRETED


@triton.jit
def opaque_copy(value):
    """Return 16-bit values unchanged, as an optimization barrier: their conversion is recomputed at each use.

    Otherwise LLVM keeps the float32 values of a tile from its first use to its last, in twice the registers.
    """
    if INTERPRETED or value.dtype == tl.float32:
        result = value
    else:
        result = tl.inline_asm_elementwise("mov.b16 $0, $1;", "=h,h", [value], value.dtype, is_pure=False, pack=1)
    return result


_OPAQUE_ZERO = tl.constexpr(
    """{
    .reg .b32 lane, mask;
    mov.u32 lane, %laneid;
    mov.u32 mask, %lanemask_eq;
    shr.u32 mask, mask, lane;
    sub.s32 $0, mask, 1;
    }"""
)


@triton.jit
def opaque_zero():
    """Return a 0 that ptxas cannot prove to be the same in all lanes of a warp.

    Added to an address, it stops ptxas from loading the value into a uniform register: such a load is waited for at
    once, an iteration before a prefetched value is needed.
    """
    if INTERPRETED:
        result = 0
    else:
        result = tl.inline_asm_elementwise(_OPAQUE_ZERO, "=r", [], tl.int32, is_pure=True, pack=1)
    return result


@triton.jit
def block_rematerialization(values):
    """Return values [n] unchanged, each by way of a scalar, so that their layout stops here.

    Triton propagates the layout in which a tile needs these values backwards to where they are loaded, to save one
    exchange between threads. Every thread would then load all mailbox slots, or hold the whole tile, by itself.
    """
    index = tl.arange(0, values.shape[0])
    result = tl.zeros(values.shape, values.dtype)
    for item in tl.static_range(values.shape[0]):
        result = tl.where(index == item, tl.sum(tl.where(index == item, values, 0.0)), result)
    return result
