"""Kernels around the operators' own: clear a mailbox, copy or transpose a tensor, add up partial sums (second stage).

``steps`` and ``cta_groups`` launch them.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.indexing import block_indices
from normgrad.cuda.device.mailbox import UNWRITTEN
from normgrad.cuda.device.pack16 import store_rounded
from normgrad.cuda.device.pdl import pdl_launch_dependents, pdl_wait


@triton.jit
def clear_mailbox(
    slots,  # int64 [count]
    count,
    BLOCK: tl.constexpr,
):
    """Mark all slots of a mailbox as not yet written."""
    pdl_launch_dependents()
    slot = block_indices(tl.program_id(0), BLOCK)
    tl.store(slots + slot, tl.full((BLOCK,), UNWRITTEN, tl.int64), mask=slot < count)


@triton.jit
def copy_strided(
    source,  # [*sizes]
    target,  # [*sizes]
    count,  # elements: the product of the sizes
    sizes,
    source_strides,
    target_strides,
    BLOCK: tl.constexpr,
):
    """Copy a tensor to one of the same shape and other strides, BLOCK elements a program."""
    element = block_indices(tl.program_id(0), BLOCK)
    inside = element < count
    remaining = element
    source_offset = tl.zeros((BLOCK,), tl.int64)
    target_offset = tl.zeros((BLOCK,), tl.int64)
    for axis in tl.static_range(len(sizes) - 1, -1, -1):
        index = remaining % sizes[axis]
        remaining = remaining // sizes[axis]
        source_offset += index * source_strides[axis]
        target_offset += index * target_strides[axis]
    tl.store(target + target_offset, tl.load(source + source_offset, mask=inside), mask=inside)


@triton.jit
def transpose(
    source,  # [*outer, rows, columns]
    target,  # [*outer, rows, columns]
    outer,  # sizes of the other dimensions
    rows,
    columns,
    source_strides,  # of the outer dimensions, of rows and of columns
    target_strides,
    BLOCK: tl.constexpr,
):
    """Copy a tensor where the source is contiguous along rows and the target along columns, or the other way round.

    A program copies a tile [BLOCK, BLOCK]. Triton chooses a layout for the load and one for the store, in each of which
    neighbouring threads access neighbouring elements, and exchanges the tile through shared memory in between.
    """
    remaining = tl.program_id(0).to(tl.int64)
    column_tiles = tl.cdiv(columns, BLOCK)
    row_tiles = tl.cdiv(rows, BLOCK)
    column = block_indices(remaining % column_tiles, BLOCK)[None, :]
    remaining = remaining // column_tiles
    row = block_indices(remaining % row_tiles, BLOCK)[:, None]
    remaining = remaining // row_tiles
    for axis in tl.static_range(len(outer) - 1, -1, -1):
        index = remaining % outer[axis]
        remaining = remaining // outer[axis]
        source += index * source_strides[axis]
        target += index * target_strides[axis]
    RANK: tl.constexpr = len(outer)
    mask = (row < rows) & (column < columns)
    tile = tl.load(source + row * source_strides[RANK] + column * source_strides[RANK + 1], mask=mask)
    tl.store(target + row * target_strides[RANK] + column * target_strides[RANK + 1], tile, mask=mask)


@triton.jit
def store_sums(first, second, which, index, sums, first_stride, second_stride, mask):
    """Store sums in the first or the second of two output tensors, unless that one is None."""
    if which == 0:
        if first is not None:
            store_rounded(first + index * first_stride, sums, mask)
    else:
        if second is not None:
            store_rounded(second + index * second_stride, sums, mask)


@triton.jit
def sum_partials(
    partial,  # float32 or float64 [outputs, rows, columns]
    first,  # [segments, columns]: the sums of partial[0]
    second,  # [segments, columns]: the sums of partial[1], or None
    rows,
    columns,
    segment,  # rows that a program adds up
    first_stride,  # of a column
    second_stride,
    ROWS: tl.constexpr,  # rows of a tile
    COLUMNS: tl.constexpr,  # columns of a tile
):
    """Second-stage reduction: sum a segment of the rows of a block of columns in float64.

    Program (i, j, k) sums segment j of column block i of partial[k]. Each thread adds up its rows in their order; a
    tree then adds up the threads of a column.
    """
    pdl_wait()
    column = block_indices(tl.program_id(0), COLUMNS)
    segment_index = tl.program_id(1)
    which = tl.program_id(2)
    begin = segment_index.to(tl.int64) * segment
    end = tl.minimum(begin + segment, rows)
    partial += which.to(tl.int64) * rows * columns
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & (column < columns)[None, :]
        offset = row.to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(partial + offset, mask=mask, other=0.0).to(tl.float64)
    sums = tl.sum(total, axis=0)
    index = segment_index.to(tl.int64) * columns + column
    store_sums(first, second, which, index, sums, first_stride, second_stride, column < columns)
