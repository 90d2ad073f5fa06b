"""64-bit scalars, index ranges and tile offsets, and whether Triton's interpreter runs the kernels."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime import JITFunction


@triton.jit
def float64(value):
    """Return a size as a float64 scalar, also where Triton knows it at compile time."""
    return tl.zeros((), tl.float64) + value


@triton.jit
def int64(value):
    """Return an integer as an int64 scalar or tensor, also where Triton knows it at compile time."""
    return tl.zeros((), tl.int64) + value


#: Triton's interpreter runs the kernels on the host: it replaces ``triton.jit`` where ``TRITON_INTERPRET=1`` is set.
INTERPRETED = tl.constexpr(not isinstance(float64, JITFunction))


@triton.jit
def float64_from_bits(bits):
    """Return the float64 with these bits. Triton narrows float arguments to float32, so float64 ones come as int64."""
    return int64(bits).to(tl.float64, bitcast=True)


@triton.jit
def block_indices(block, SIZE: tl.constexpr):
    """Return the indices ``[block·SIZE, (block + 1)·SIZE)`` as int64."""
    return (tl.zeros((SIZE,), tl.int64) + block) * SIZE + tl.arange(0, SIZE)


@triton.jit
def tile_offsets(strides, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OFFSET64: tl.constexpr):
    """Return the offsets [ROWS, COLUMNS] of a tile's elements from its first, in 64 bits only where they need them."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    if OFFSET64:
        rows = rows.to(tl.int64)
        columns = columns.to(tl.int64)
    return rows[:, None] * strides[0] + columns[None, :] * strides[1]
