"""Near zero: where float32 products are rounded as subnormals, and how results come out of float64 there."""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.common import BFLOAT16_PAIRS, high, put, put_numbers

# Gradients whose means, and products whose sums, are below this may have been rounded as subnormals.
NEAR_ZERO = tl.constexpr(2.0**-90)
# Means below which numbers may be so close to them that the difference, or what it is normalised to, is a subnormal.
NEAR_MEAN = tl.constexpr(2.0**-60)
# What, added to a float64 below the smallest normal bfloat16 and taken off again, leaves a bfloat16.
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_TO_BFLOAT16 = tl.constexpr(1.5 * 2.0**-81)


@triton.jit
def any_of(flags):
    """Whether one of a few flags is set."""
    return tl.max(flags.to(tl.int32), axis=0) != 0


@triton.jit
def is_above_zero_below(value, limit):
    """Whether a size is not 0 but less than a limit."""
    return (value > 0.0) & (value < limit)


@triton.jit
def narrowed(value, BFLOAT16: tl.constexpr):
    """A float64 as float32, and where that is to become a subnormal bfloat16, as that: it is rounded once."""
    if BFLOAT16:
        value = tl.where(tl.abs(value) < _SMALLEST_NORMAL, (value + _TO_BFLOAT16) - _TO_BFLOAT16, value)
    return value.to(tl.float32)


@triton.jit
def put_float64(pointers, value, mask):
    """Store float64 values in the target's dtype."""
    if pointers.dtype.element_ty == tl.float64:
        tl.store(pointers, value, mask=mask)
    else:
        put(pointers, narrowed(value, pointers.dtype.element_ty == tl.bfloat16), mask)


@triton.jit
def put_results(pointers, values, mask, SHAPE: tl.constexpr, KIND: tl.constexpr):
    """As ``put_numbers``, of float64 too."""
    if values.dtype == tl.float64:
        values = narrowed(values, KIND == BFLOAT16_PAIRS or pointers.dtype.element_ty == tl.bfloat16)
    put_numbers(pointers, values, mask, SHAPE, KIND)


@triton.jit
def mean_size(centre, inverse):
    """Of rows what is small where numbers may be so near their mean that float32 rounds the distance as a subnormal."""
    return tl.abs(high(centre)) * tl.minimum(high(inverse), 1.0)


@triton.jit
def marked(marks, rows, turn):
    """Marks of rows, a bit for each turn of a loop, with those of this turn; after 32 turns the first bit's is next."""
    return tl.where(rows, marks | turn, marks)


@triton.jit
def next_turn(turn):
    """The bit of the next turn."""
    return (turn << 1) | (turn >> 31)


@triton.jit
def are_zeros(data):
    """Rows of a tile of loaded data that have nothing but zeros; looked at as it came, single or in pairs."""
    if data.dtype == tl.int32:
        size = data & 0x7FFF7FFF
    elif data.dtype == tl.float32:
        size = data.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        size = data.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    return tl.max(size, axis=1) == 0
