"""Tables of per-channel coefficients in float32, and small outputs.

The arithmetic of GroupNorm and BatchNorm on vectors, with per-channel coefficients in float32.

A coefficient that multiplies x − mean may be too large or too small for float32 where no term of the formula is. So it
is split into a power of two `scale` and a `factor`, and ``fma(x, scale, −mean·scale)`` takes the place of x − mean: the
same number, rounded alike, of about the size of the product, which overflows only where that does.
"""

from normgrad.cpu.compile.jit import device, in_place
from normgrad.cpu.fields.channel import APART
from normgrad.cpu.intrinsics.memory import load
from normgrad.cpu.intrinsics.vectors import fma, splat_f32, vload
from normgrad.cpu.kernels.copy import store_exact
from normgrad.cpu.kernels.layer_norm.rows import lane_of_column
from normgrad.cpu.tags import F32


@device
def lane_of(kind, columns, c):
    """Where a channel is in partials and tables."""
    return lane_of_column(kind, c) if columns else c


@device
def whole_vectors(columns, first, last):
    """Up to which channel from the first on vectors hold no channel of another group."""
    if columns:
        return last if (first | last) % 32 == 0 else first
    return last - (last - first) % 16


@device
def filled_vectors(columns, desc, first, last):
    """As whole_vectors, of a table: a unit's own has room for a vector that goes beyond the group."""
    return whole_vectors(columns, first, last) if columns or desc[APART] else last


@in_place
def splat_entry(table, pitch, plane, c):
    """A channel's coefficient in all lanes."""
    return splat_f32(load(F32, table, plane * pitch + c))


@in_place
def coefficients(table, pitch, c):
    """A channel's six coefficients, each in all lanes."""
    return (
        splat_entry(table, pitch, 0, c),
        splat_entry(table, pitch, 1, c),
        splat_entry(table, pitch, 2, c),
        splat_entry(table, pitch, 3, c),
        splat_entry(table, pitch, 4, c),
        splat_entry(table, pitch, 5, c),
    )


@in_place
def lane_coefficients(table, pitch, lane):
    """The six coefficients of 16 channels."""
    return (
        vload(F32, table, lane),
        vload(F32, table, pitch + lane),
        vload(F32, table, 2 * pitch + lane),
        vload(F32, table, 3 * pitch + lane),
        vload(F32, table, 4 * pitch + lane),
        vload(F32, table, 5 * pitch + lane),
    )


@device
def put_vector(desc, output, index, value):
    """Store an element of a small output, where it is wanted."""
    if desc[output] != 0:
        store_exact(desc[output + 2], desc[output], index * desc[output + 1], value)


@in_place
def deviation(x, scale, shift):
    """(x − mean)·scale, where the shift is −mean·scale."""
    return fma(x, scale, shift)


@in_place
def gradient(g, x, k):
    """(pre·g − ((x − mean)·scale·factor + mean_g))·post, with k = (scale, shift, factor, mean_g, pre, post).

    In GroupNorm scale·factor = rstd·mean(g·x̂), pre = weight and post = rstd. In BatchNorm e is the power of two below
    invstd, scale·factor = e·invstd²·sum_dy_xmu/n, mean_g = e·sum_dy/n, pre = e and post = weight·invstd/e.
    """
    # The means are usually small. They are added first, so that pre·g is rounded once.
    return fma(k[4], g, -fma(deviation(x, k[0], k[1]), k[2], k[3])) * k[5]


@in_place
def output(x, scale, shift, factor, offset):
    """(x − mean)·scale·factor + offset, where scale·factor = rstd·weight."""
    return fma(deviation(x, scale, shift), factor, offset)
