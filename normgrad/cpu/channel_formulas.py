"""The arithmetic of GroupNorm and BatchNorm on vectors, with per-channel coefficients in float32.

A coefficient that multiplies x − mean may be too large or too small for float32 where no term of the formula is. So it
is split into a power of two `scale` and a `factor`, and ``fma(x, scale, −mean·scale)`` takes the place of x − mean: the
same number, rounded alike, of about the size of the product, which overflows only where that does.
"""

from normgrad.cpu.jit import in_place
from normgrad.cpu.vectors import fma


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
