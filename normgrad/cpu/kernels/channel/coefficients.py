"""Per-channel coefficients in float32, and the formulas of GroupNorm and BatchNorm that use them.

A coefficient that multiplies x - mean may be too large or too small for float32 where no term of the formula is. So it
is split into a power of two `scale` and a `factor`, and ``fma(x, scale, -mean*scale)`` replaces x - mean: the same
value, rounded alike, of about the size of the product, which overflows only where that does.

The coefficients of all channels are arrays in the workspace, `pitch` elements apart: scale, shift = -mean*scale,
factor, then those that `gradient` or `output` add.
"""

from normgrad.cpu.compile.jit import device, inline
from normgrad.cpu.intrinsics.memory import load
from normgrad.cpu.intrinsics.vectors import fma, splat_f32, vload
from normgrad.cpu.tags import F32


@inline
def deviation(x, scale, shift):
    """Return (x - mean)*scale, where shift = -mean*scale."""
    return fma(x, scale, shift)


@inline
def gradient(g, x, k):
    """Return (pre*g - ((x - mean)*scale*factor + mean_g))*post, with k = (scale, shift, factor, mean_g, pre, post).

    In GroupNorm scale*factor = rstd*mean(g*x_hat), pre = weight and post = rstd. In BatchNorm e is the power of two
    above weight*invstd, scale*factor = e*invstd^2*sum_dy_xmu/n, mean_g = e*sum_dy/n, pre = e and post =
    weight*invstd/e.
    """
    # The means are usually small. They are added first, so that pre*g is rounded once.
    return fma(k[4], g, -fma(deviation(x, k[0], k[1]), k[2], k[3])) * k[5]


@inline
def output(x, k):
    """Return (x - mean)*scale*factor + offset, with k = (scale, shift, factor, offset), scale*factor = rstd*weight."""
    return fma(deviation(x, k[0], k[1]), k[2], k[3])


@inline
def splat(array, pitch, number, c):
    """Return one of a channel's coefficients in all lanes."""
    return splat_f32(load(F32, array, number * pitch + c))


@inline
def splat_four(array, pitch, c):
    return splat(array, pitch, 0, c), splat(array, pitch, 1, c), splat(array, pitch, 2, c), splat(array, pitch, 3, c)


@inline
def splat_six(array, pitch, c):
    a, b, d, e = splat_four(array, pitch, c)
    return a, b, d, e, splat(array, pitch, 4, c), splat(array, pitch, 5, c)


@inline
def load_four(array, pitch, lane):
    """Return four coefficients of 16 channels."""
    return (
        vload(F32, array, lane),
        vload(F32, array, pitch + lane),
        vload(F32, array, 2 * pitch + lane),
        vload(F32, array, 3 * pitch + lane),
    )


@inline
def load_six(array, pitch, lane):
    a, b, c, d = load_four(array, pitch, lane)
    return a, b, c, d, vload(F32, array, 4 * pitch + lane), vload(F32, array, 5 * pitch + lane)


@device
def whole_vectors(paired, first, last):
    """Return up to which channel, from the first on, vectors hold no channel of another group."""
    if paired:
        return last if (first | last) % 32 == 0 else first
    return last - (last - first) % 16


@device
def filled_vectors(paired, desc, first, last):
    """As whole_vectors, where coefficients are written: a unit's own have spare lanes behind the group."""
    return whole_vectors(paired, first, last) if paired or desc.in_phases else last
