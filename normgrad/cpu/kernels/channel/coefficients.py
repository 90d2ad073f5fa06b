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
from normgrad.cpu.kernels.common.tensors import load_some, store_result
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
def store_gradients(dtype, at, k, stream, i, count):
    """Compute grad_input of 32 elements from i on, or of the first `count`; k has the coefficients of either vector."""
    g, v = load_some(dtype, at.grad_out, i, count), load_some(dtype, at.input, i, count)
    store_result(dtype, at.result, i, gradient(g[0], v[0], k[0]), gradient(g[1], v[1], k[1]), count, stream)


@inline
def store_outputs(dtype, at, k, stream, i, count):
    """Compute the output of 32 elements, in the same way."""
    v = load_some(dtype, at.input, i, count)
    store_result(dtype, at.result, i, output(v[0], k[0]), output(v[1], k[1]), count, stream)


@inline
def splat(array, c):
    """Return a coefficient of one channel in all lanes."""
    return splat_f32(load(F32, array, c))


@inline
def lanes(array, c):
    """Return a coefficient of 16 channels."""
    return vload(F32, array, c)


@inline
def four(get, array, pitch, c):
    """Return the coefficients of an output, by `splat` or by `lanes`."""
    return get(array, c), get(array, pitch + c), get(array, 2 * pitch + c), get(array, 3 * pitch + c)


@inline
def six(get, array, pitch, c):
    """Return the coefficients of a gradient."""
    return *four(get, array, pitch, c), get(array, 4 * pitch + c), get(array, 5 * pitch + c)


@device
def whole_vectors(paired, first, last):
    """Return up to which channel, from the first on, vectors hold no channel of another group."""
    if paired:
        return last if (first | last) % 32 == 0 else first
    return last - (last - first) % 16


@device
def filled_vectors(paired, desc, first, last):
    """As whole_vectors, where coefficients are written.

    Those of rows have spare lanes behind the last channel, and a unit's own are written group after group.
    """
    return whole_vectors(paired, first, last) if paired or desc.in_phases else last
