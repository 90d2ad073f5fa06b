"""Rows of LayerNorm: where they are, and strided rows through contiguous copies."""

from collections import namedtuple

from normgrad.cpu.compile.jit import device, inline
from normgrad.cpu.intrinsics.pairs import copy_element

#: Where rows of LayerNorm backward begin in three tensors, and the bytes from one row to the next.
Rows = namedtuple("Rows", "grad_out grad_out_pitch input input_pitch grad_input grad_input_pitch")


@inline
def rows_from(rows, r):
    """Return the rows from row r on."""
    return Rows(
        rows.grad_out + r * rows.grad_out_pitch,
        rows.grad_out_pitch,
        rows.input + r * rows.input_pitch,
        rows.input_pitch,
        rows.grad_input + r * rows.grad_input_pitch,
        rows.grad_input_pitch,
    )


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
def gather_rows(dtype, source, row_stride, column_stride, target, pitch, rows, columns):
    """Copy strided rows (strides in elements) into contiguous ones `pitch` bytes apart.

    32 columns at a time: where rows are adjacent in memory each cache line is read once.
    """
    for j0 in range(0, columns, 32):
        for r in range(rows):
            for j in range(j0, min(j0 + 32, columns)):
                copy_element(dtype, source, r * row_stride + j * column_stride, target + r * pitch, j)


@device
def scatter_rows(dtype, source, pitch, target, row_stride, column_stride, rows, columns):
    for j0 in range(0, columns, 32):
        for r in range(rows):
            for j in range(j0, min(j0 + 32, columns)):
                copy_element(dtype, source + r * pitch, j, target, r * row_stride + j * column_stride)
