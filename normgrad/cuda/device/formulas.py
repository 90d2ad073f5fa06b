"""The formulas and their arithmetic: float32 is made float64 where its roundings would be seen, 16 bits are float32."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.common import INTERPRETED, SINGLE, high, numbers


@triton.jit
def precise(data, KIND: tl.constexpr):
    """Loaded data as the formulas take it: float32 as float64, so that results have one rounding; 16 bits as float32.

    Made anew wherever it is needed, as ``numbers`` are.
    """
    if data.dtype != tl.float32:
        result = numbers(data, KIND)
    elif INTERPRETED:
        result = data.to(tl.float64)
    else:
        result = tl.inline_asm_elementwise("cvt.f64.f32 $0, $1;", "=d,f", [data], tl.float64, is_pure=False, pack=1)
    return result


@triton.jit
def wider(data, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Loaded data in float32, or where it is to be EXACT in float64."""
    return precise(data, KIND).to(tl.float64) if EXACT else numbers(data, KIND)


@triton.jit
def gradient(dy, x, mu, rs, scale, mean_g, mean_gx):
    """``rs·(dy·scale − mean_g − (x − mu)·rs·mean_gx)``: of float64 in few steps, of float32 with the small terms first.

    So two roundings are of the size of the result, where products and sums are rounded once.
    """
    if x.dtype == tl.float64:
        factor = rs.to(tl.float64)
        if scale is not None:
            factor = factor * precise(scale, SINGLE)
        steep = -(rs.to(tl.float64) * rs * mean_gx)
        result = dy * factor + ((x - mu) * steep - rs * mean_g)
    else:
        # In the order of the formula: a product like rs·mean_gx may overflow where none of the terms does.
        small = (x - mu) * rs * mean_gx.to(tl.float32) + mean_g.to(tl.float32)
        if scale is not None:
            dy = dy * scale
        result = rs * (dy - small)
    return result


@triton.jit
def near_and_rest(centre, dtype: tl.constexpr):
    """The number of a dtype that is nearest to a centre of float64, and what the centre is more than that.

    The sum of the squares about that number is as much more than about the centre itself as the square of the rest, for
    each of them.
    """
    near = centre.to(dtype)
    return near, centre - near.to(tl.float64)


@triton.jit
def left_out_of(rest, inverse):
    """What the rest of a centre takes off the results, in float32; nothing where the centre is infinite."""
    left_out = high(-rest * inverse)
    return tl.where(left_out == left_out, left_out, 0.0)


@triton.jit
def normalised(x, centre, inverse, scale, shift):
    """``(x − centre)·inverse·scale + shift``: of float64 in few steps, of float32 by the float32 next to the centre.

    What that leaves out of the centre comes in as a part of the result, where a subnormal's rounding counts least.
    """
    if x.dtype == tl.float64:
        factor = inverse
        if scale is not None:
            factor = factor * scale
        result = (x - centre) * factor
    else:
        near, rest = near_and_rest(centre, tl.float32)
        result = (x - near) * high(inverse) + left_out_of(rest, inverse)
        if scale is not None:
            result = result * scale
    if shift is not None:
        result = result + shift
    return result
