"""The kernels `copy` and `fill`, copies of rows, and elements of a dtype that is known at run time."""

import numpy as np

from normgrad.cpu import limits
from normgrad.cpu.compile.jit import device, inline, kernel
from normgrad.cpu.descriptors import COPY_RANK, Copy, Fill
from normgrad.cpu.intrinsics.memory import item_size, load, round_for, store
from normgrad.cpu.intrinsics.pairs import copy_element, copy_vector, prefetch_pair
from normgrad.cpu.kernels.common.work import items_of
from normgrad.cpu.tags import BF16, CODE_F16, CODE_F32, F16, F32


@inline
def load_by_code(code, address, index):
    """Load an element of a dtype that is known at run time."""
    if code == CODE_F32:
        return load(F32, address, index)
    return load(F16, address, index) if code == CODE_F16 else load(BF16, address, index)


@device
def store_rounded_once(code, address, index, value):
    """Store a float64 as an element of a dtype known at run time."""
    if code == CODE_F32:
        store(F32, address, index, np.float32(value))
    elif code == CODE_F16:
        store(F16, address, index, round_for(F16, value))
    else:
        store(BF16, address, index, round_for(BF16, value))


@device
def copy_rows(source_dtype, target_dtype, source, source_strides, target, target_strides, rows, columns):
    """Copy rows; the strides are those of rows and of columns, in elements.

    Rows that are adjacent in memory on either side are copied column by column: the elements of a column share its
    cache lines, while columns may lie so far apart that few of them fit into the cache together.
    """
    source_row, source_column = source_strides
    target_row, target_column = target_strides
    if rows > 1 and (0 < abs(source_row) < abs(source_column) or abs(target_row) < abs(target_column)):
        for j in range(columns):
            x, y = source_column * j, target_column * j
            prefetch_pair(source_dtype, source, x + limits.PREFETCH_COLUMNS * source_column)
            prefetch_pair(target_dtype, target, y + limits.PREFETCH_COLUMNS * target_column)
            for r in range(rows):
                copy_element(source_dtype, target_dtype, source, x + r * source_row, target, y + r * target_row)
        return
    whole = columns & ~15 if source_column == 1 and target_column == 1 else 0
    for r in range(rows):
        x, y = source_row * r, target_row * r
        for j in range(0, whole, 16):
            copy_vector(source_dtype, target_dtype, source, x + j, target, y + j)
        for j in range(whole, columns):
            copy_element(source_dtype, target_dtype, source, x + j * source_column, target, y + j * target_column)


@kernel
def copy(desc: Copy, source_dtype, target_dtype):
    """Copy a strided tensor, with a conversion of its dtype: blocks of rows along its last two axes."""
    rows, columns = desc.sizes[COPY_RANK - 2], desc.sizes[COPY_RANK - 1]
    s, t = desc.source.strides, desc.target.strides
    source_strides, target_strides = (s[COPY_RANK - 2], s[COPY_RANK - 1]), (t[COPY_RANK - 2], t[COPY_RANK - 1])
    for block in items_of(desc.phase, desc.blocks, desc.blocks_per_take, 0):
        rest, j = block // desc.column_blocks, block % desc.column_blocks * desc.block_columns
        r, rest = rest % desc.row_blocks * desc.block_rows, rest // desc.row_blocks
        x = r * source_strides[0] + j * source_strides[1]
        y = r * target_strides[0] + j * target_strides[1]
        for axis in range(COPY_RANK - 3, -1, -1):
            if rest == 0:
                break
            index, rest = rest % desc.sizes[axis], rest // desc.sizes[axis]
            x += index * s[axis]
            y += index * t[axis]
        copy_rows(
            source_dtype,
            target_dtype,
            desc.source.address + x * item_size(source_dtype),
            source_strides,
            desc.target.address + y * item_size(target_dtype),
            target_strides,
            min(desc.block_rows, rows - r),
            min(desc.block_columns, columns - j),
        )


@kernel
def fill(desc: Fill):
    """Store one value in every element of a vector."""
    for i in range(desc.count):
        store_rounded_once(desc.target.dtype, desc.target.address, i * desc.target.stride, desc.value)
