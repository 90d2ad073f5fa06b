"""Kernels around the others: slots marked as empty, strided tensors copied, partial sums summed up over their rows."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.common import EMPTY, indices, let_next_launch_begin, put, wait_for_launch_before


@triton.jit
def empty_slots(
    slots,  # int64 [count]
    count,
    BLOCK: tl.constexpr,
):
    """Mark slots as not yet written."""
    let_next_launch_begin()
    place = indices(tl.program_id(0), BLOCK)
    tl.store(slots + place, tl.full((BLOCK,), EMPTY, tl.int64), mask=place < count)


@triton.jit
def copy_strided(
    source,
    target,
    count,
    sizes,  # of both, the last dimension fastest
    source_strides,
    target_strides,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a strided tensor to one of other strides."""
    place = indices(tl.program_id(0), BLOCK)
    inside = place < count
    rest = place
    read = tl.zeros((BLOCK,), tl.int64)
    written = tl.zeros((BLOCK,), tl.int64)
    for step in tl.static_range(RANK):
        index = rest % sizes[RANK - 1 - step]
        rest = rest // sizes[RANK - 1 - step]
        read += index * source_strides[RANK - 1 - step]
        written += index * target_strides[RANK - 1 - step]
    tl.store(target + written, tl.load(source + read, mask=inside), mask=inside)


@triton.jit
def sums_over(partial, begin, end, columns, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns' sums over a stretch of rows in float64, in the order of the rows."""
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    for start in range(begin, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & (columns < N)[None, :]
        place = rows.to(tl.int64)[:, None] * N + columns[None, :]
        total += tl.load(partial + place, mask=mask, other=0.0).to(tl.float64)
    return tl.sum(total, axis=0)


@triton.jit
def put_sums(first, second, which, place, result, first_stride, second_stride, mask):
    """Store sums as the first or the second of two tensors, if there is that one."""
    if which == 0:
        if first is not None:
            put(first + place * first_stride, result, mask)
    else:
        if second is not None:
            put(second + place * second_stride, result, mask)


@triton.jit
def sum_columns(
    partial,  # float32 or float64 [which, K, N]
    first,  # [segments, N]
    second,  # [segments, N], or None
    K,
    N,
    segment,  # rows of `partial` per program
    first_stride,
    second_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum a stretch of rows in float64, in the order of the rows: a block of columns per program."""
    wait_for_launch_before()
    columns = indices(tl.program_id(0), COLUMNS)
    stretch = tl.program_id(1)
    which = tl.program_id(2)
    begin = stretch.to(tl.int64) * segment
    end = tl.minimum(begin + segment, K)
    result = sums_over(partial + which.to(tl.int64) * K * N, begin, end, columns, N, ROWS, COLUMNS)
    target = stretch.to(tl.int64) * N + columns
    put_sums(first, second, which, target, result, first_stride, second_stride, columns < N)
