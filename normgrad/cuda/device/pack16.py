"""Conversion of loaded data to float32 or float64 and of results to the output's dtype; pairs of 16-bit elements.

Triton keeps every 16-bit element in a 32-bit register of its own, and splits and joins the halves of loaded words more
often than it has to. Where strides and alignment allow it, the host passes 16-bit tensors as int32 words of two
elements each (*packed*), which are unpacked where they are used and packed just before they are stored.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.compiler_barriers import opaque_copy
from normgrad.cuda.device.indexing import INTERPRETED

#: PACKING of a kernel's tensors: one element a word, or int32 words of two elements, the first in the low half.
UNPACKED = tl.constexpr(0)
BF16X2 = tl.constexpr(1)
FP16X2 = tl.constexpr(2)

_UNPACK_BF16X2 = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
_UNPACK_FP16X2 = tl.constexpr(
    "{.reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high;}"
)
_PACK_BF16X2 = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_PACK_FP16X2 = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")


@triton.jit
def to_float32(value):
    """Convert loaded values to float32."""
    if INTERPRETED and value.dtype == tl.bfloat16:
        # The interpreter's own conversion is wrong for subnormals.
        result = (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        result = value.to(tl.float32)
    return result


@triton.jit
def unpack16(words, PACKING: tl.constexpr):
    """Convert int32 words [..., n] to their float32 elements [..., 2·n]; recomputed at each use, not kept."""
    if INTERPRETED:
        first, second = unpack16_low(words, PACKING), unpack16_low(words >> 16, PACKING)
    elif PACKING == BF16X2:
        first, second = tl.inline_asm_elementwise(
            _UNPACK_BF16X2, "=r,=r,r", [words], (tl.float32, tl.float32), is_pure=False, pack=1
        )
    else:
        first, second = tl.inline_asm_elementwise(
            _UNPACK_FP16X2, "=f,=f,r", [words], (tl.float32, tl.float32), is_pure=False, pack=1
        )
    return tl.interleave(first, second)


@triton.jit
def unpack16_low(words, PACKING: tl.constexpr):
    """Convert the first element of each int32 word to float32."""
    if PACKING == BF16X2:
        low = (words << 16).to(tl.float32, bitcast=True)
    else:
        low = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low


@triton.jit
def _round_to_bf16_bits(value):
    """Return the bits of the nearest bfloat16 in the high half of an int32; the low half is undefined."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(value == value, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)


@triton.jit
def pack16(values, PACKING: tl.constexpr):
    """Round float32 values [..., 2·n], of two or three dimensions, to nearest even, and pack them into int32 words."""
    if len(values.shape) == 2:
        pairs = tl.reshape(values, (values.shape[0], values.shape[1] // 2, 2))
    else:
        pairs = tl.reshape(values, (values.shape[0], values.shape[1], values.shape[2] // 2, 2))
    first, second = tl.split(pairs)
    if INTERPRETED:
        if PACKING == BF16X2:
            low = (_round_to_bf16_bits(first) >> 16) & 0xFFFF
            words = low | (_round_to_bf16_bits(second) & -65536)
        else:
            low = first.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            words = low | (second.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        CONVERT: tl.constexpr = _PACK_BF16X2 if PACKING == BF16X2 else _PACK_FP16X2
        words = tl.inline_asm_elementwise(CONVERT, "=r,f,f", [first, second], tl.int32, is_pure=True, pack=1)
    return words


@triton.jit
def unpack_float32(data, PACKING: tl.constexpr):
    """Convert loaded words to float32 elements; recomputed at each use, so that only the words stay in registers."""
    if PACKING == UNPACKED:
        result = to_float32(opaque_copy(data))
    else:
        result = unpack16(data, PACKING)
    return result


@triton.jit
def unpack_acc_dtype(data, PACKING: tl.constexpr):
    """Convert loaded words to the dtype that results are computed in: float64 for float32 data, float32 for 16 bits.

    Each result then has one rounding error of its own dtype. Recomputed at each use.
    """
    if data.dtype != tl.float32:
        result = unpack_float32(data, PACKING)
    elif INTERPRETED:
        result = data.to(tl.float64)
    else:
        result = tl.inline_asm_elementwise("cvt.f64.f32 $0, $1;", "=d,f", [data], tl.float64, is_pure=False, pack=1)
    return result


@triton.jit
def unpack(data, PACKING: tl.constexpr, FLOAT64: tl.constexpr):
    """Convert loaded words to float64 elements where FLOAT64 is set, otherwise to float32."""
    return unpack_acc_dtype(data, PACKING).to(tl.float64) if FLOAT64 else unpack_float32(data, PACKING)


@triton.jit
def store_rounded(pointers, value, mask):
    """Store float32 or float64 values, rounded to nearest even in the pointers' dtype; to 16 bits by way of float32."""
    dtype: tl.constexpr = pointers.dtype.element_ty
    if value.dtype == tl.float64 and dtype != tl.float64:
        value = value.to(tl.float32)
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter truncates where the GPU rounds, and its conversion is wrong for subnormals.
        tl.store(pointers, (_round_to_bf16_bits(value) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(pointers, value.to(dtype), mask=mask)


@triton.jit
def store_elements(pointers, values, mask, PACKING: tl.constexpr):
    """Store results as the data was loaded: one element a word, or packed."""
    if PACKING == UNPACKED:
        store_rounded(pointers, values, mask)
    else:
        tl.store(pointers, pack16(values.to(tl.float32), PACKING), mask=mask)
