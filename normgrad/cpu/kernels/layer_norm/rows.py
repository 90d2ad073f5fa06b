"""Rows of LayerNorm: where they are, and strided rows through contiguous copies."""

from normgrad.cpu import limits
from normgrad.cpu.compile.jit import device
from normgrad.cpu.intrinsics.pairs import copy_element, prefetch_pair


@device
def row_address(tensor, axes, row):
    """Return the address of a row of a tensor whose rows extend over these axes."""
    strides = tensor.strides
    if row < axes.inner:
        return tensor.address + row * strides.inner
    rest = row // axes.inner
    offset = (rest % axes.middle) * strides.middle + (rest // axes.middle) * strides.outer
    return tensor.address + (row - rest * axes.inner) * strides.inner + offset


@device
def uniform_rows(axes, row, most):
    """Return how many rows from `row` on, at most so many, are equally spaced in all tensors."""
    return min(most, axes.inner - (row if row < axes.inner else row % axes.inner))


@device
def copy_rows(dtype, source, source_strides, target, target_strides, rows, columns):
    """Copy rows; the strides are those of rows and of columns, in elements.

    Rows that are adjacent in memory on either side are copied column by column: the elements of a column share its
    cache lines, while columns may lie so far apart that few of them fit into the cache together.
    """
    source_row, source_column = source_strides
    target_row, target_column = target_strides
    if source_row < source_column or target_row < target_column:
        for j in range(columns):
            x, y = source_column * j, target_column * j
            prefetch_pair(dtype, source, x + limits.PREFETCH_COLUMNS * source_column)
            prefetch_pair(dtype, target, y + limits.PREFETCH_COLUMNS * target_column)
            for r in range(rows):
                copy_element(dtype, source, x + r * source_row, target, y + r * target_row)
        return
    for r in range(rows):
        x, y = source_row * r, target_row * r
        for j in range(columns):
            copy_element(dtype, source, x + j * source_column, target, y + j * target_column)
