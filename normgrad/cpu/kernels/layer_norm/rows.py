"""What the row kernels share: where a row is, its sums, strided rows."""

import numpy as np

from normgrad.cpu.compile.jit import device, in_place
from normgrad.cpu.intrinsics.pairs import ask_for_pair, copy_element, is_bfloat, load_pair, load_pair_first, split_pair
from normgrad.cpu.intrinsics.vectors import fma, hsum, splat_f32, splat_f64, vload, widen
from normgrad.cpu.tags import F32

AHEAD_BYTES = 1024  # where no other row is asked for


@device
def lane_of_column(kind, column):
    """Where a column is in a vector kept in the pairs' lane order."""
    if is_bfloat(kind):
        return (column & ~31) | ((column & 1) << 4) | ((column & 31) >> 1)
    return column


@device
def row_offset(desc, shape, strides, row):
    """Bytes from a tensor's address to a row; `shape` and `strides` are positions of OUTER_RANK numbers in desc."""
    inner, middle = desc[shape + 2], desc[shape + 1]
    if row < inner:
        return row * desc[strides + 2]
    rest = row // inner
    return (
        (row - rest * inner) * desc[strides + 2]
        + (rest % middle) * desc[strides + 1]
        + (rest // middle) * desc[strides]
    )


@in_place
def _pair_terms(d, x, weight, j, mean, rstd):
    g0, g1 = d[0] * vload(F32, weight, j), d[1] * vload(F32, weight, j + 16)
    return g0 + g1, fma(g1, (x[1] - mean) * rstd[1], g0 * ((x[0] - mean) * rstd[0]))


@in_place
def _terms(kind, grad_out, x, weight, j, mean, rstd, ahead):
    ask_for_pair(kind, ahead, j)
    return _pair_terms(load_pair(kind, grad_out, j), load_pair(kind, x, j), weight, j, mean, rstd)


@device
def lane_sums(kind, grad_out, x, weight, first, last, mean, rstd, ahead):
    """sum(g), sum(g*x_hat) over columns, in 16 lanes: float32 trees of 16 terms a lane, float64 beyond.

    Prefetches the elements of another row.
    """
    vm, vr = splat_f32(mean), (splat_f32(rstd), splat_f32(rstd))
    s1, s2 = splat_f64(0.0), splat_f64(0.0)
    j = first
    while j + 256 <= last:
        a0, b0 = _terms(kind, grad_out, x, weight, j, vm, vr, ahead)
        a1, b1 = _terms(kind, grad_out, x, weight, j + 32, vm, vr, ahead)
        a2, b2 = _terms(kind, grad_out, x, weight, j + 64, vm, vr, ahead)
        a3, b3 = _terms(kind, grad_out, x, weight, j + 96, vm, vr, ahead)
        a, b = (a0 + a1) + (a2 + a3), (b0 + b1) + (b2 + b3)
        a0, b0 = _terms(kind, grad_out, x, weight, j + 128, vm, vr, ahead)
        a1, b1 = _terms(kind, grad_out, x, weight, j + 160, vm, vr, ahead)
        a2, b2 = _terms(kind, grad_out, x, weight, j + 192, vm, vr, ahead)
        a3, b3 = _terms(kind, grad_out, x, weight, j + 224, vm, vr, ahead)
        s1 = s1 + widen(a + ((a0 + a1) + (a2 + a3)))
        s2 = s2 + widen(b + ((b0 + b1) + (b2 + b3)))
        j += 256
    while j + 32 <= last:
        a0, b0 = _terms(kind, grad_out, x, weight, j, vm, vr, ahead)
        s1, s2 = s1 + widen(a0), s2 + widen(b0)
        j += 32
    if j < last:
        # rstd is 0 in the lanes beyond the last column: (0 - mean)*rstd may overflow where no column's x_hat does.
        d, v = load_pair_first(kind, grad_out, j, last - j), load_pair_first(kind, x, j, last - j)
        a0, b0 = _pair_terms(d, v, weight, j, vm, split_pair(kind, last - j, rstd, np.float32(0)))
        s1, s2 = s1 + widen(a0), s2 + widen(b0)
    return s1, s2


@device
def segment_sums(kind, grad_out, x, weight, first, last, mean, rstd):
    """sum(g), sum(g*x_hat) over columns."""
    s1, s2 = lane_sums(kind, grad_out, x, weight, first, last, mean, rstd, x + AHEAD_BYTES)
    return hsum(s1), hsum(s2)


@device
def gather_rows(kind, source, row_stride, column_stride, target, pitch, rows, columns):
    """Copy strided rows (strides in elements) into contiguous ones `pitch` bytes apart, 32 columns at a time:
    where rows are adjacent in memory each cache line is read once."""
    for j0 in range(0, columns, 32):
        for r in range(rows):
            for j in range(j0, min(j0 + 32, columns)):
                copy_element(kind, source, r * row_stride + j * column_stride, target + r * pitch, j)


@device
def scatter_rows(kind, source, pitch, target, row_stride, column_stride, rows, columns):
    for j0 in range(0, columns, 32):
        for r in range(rows):
            for j in range(j0, min(j0 + 32, columns)):
                copy_element(kind, source + r * pitch, j, target, r * row_stride + j * column_stride)
