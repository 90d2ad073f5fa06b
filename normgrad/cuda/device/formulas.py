"""The normalization formulas, each in the order of operations that keeps its rounding errors small.

float32 data is computed in float64, 16-bit data in float32; the dtype of the arguments decides.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.compiler_barriers import block_rematerialization
from normgrad.cuda.device.pack16 import UNPACKED, unpack_acc_dtype
from normgrad.cuda.device.sums import row_sums_float64


@triton.jit
def divide(value, divisor, reciprocal):
    """Divide float64 by a divisor whose reciprocal is given: faster than a division, and exact for short quotients."""
    quotient = value * reciprocal
    corrected = quotient + tl.fma(-quotient, divisor, value) * reciprocal
    # Not `quotient - quotient == 0`: the compiler contracts that to an FMA, which returns the rounding error.
    return tl.where(tl.abs(quotient) < float("inf"), corrected, quotient)


@triton.jit
def input_gradient(dy, x, mean, rstd, weight, mean_g, mean_gx):
    """Return ``rstd·(dy·weight − mean_g − (x − mean)·rstd·mean_gx)``, where g is dy·weight; weight may be None.

    float64: the fewest operations. float32: the small terms first, so that with fused multiply-adds only two rounding
    errors have the size of the result.
    """
    if x.dtype == tl.float64:
        factor = rstd.to(tl.float64)
        if weight is not None:
            factor = factor * unpack_acc_dtype(weight, UNPACKED)
        slope = -(rstd.to(tl.float64) * rstd * mean_gx)
        result = dy * factor + ((x - mean) * slope - rstd * mean_g)
    else:
        # In the order of the formula: a product like rstd·mean_gx may overflow where none of the terms does.
        small = (x - mean) * rstd * mean_gx.to(tl.float32) + mean_g.to(tl.float32)
        if weight is not None:
            dy = dy * weight
        result = rstd * (dy - small)
    return result


@triton.jit
def split_mean(mean, dtype: tl.constexpr):
    """Split a float64 mean into the nearest value of a dtype and the remainder.

    A sum of n squares about the rounded mean exceeds the one about the mean itself by n·remainder².
    """
    rounded = mean.to(dtype)
    return rounded, mean - rounded.to(tl.float64)


@triton.jit
def row_moments(values, in_row, counts, SEGMENTS: tl.constexpr, ALONE: tl.constexpr, TILE: tl.constexpr):
    """Return sum, mean and sum of squares about the mean of each row of a tile [rows, columns], in float64.

    ``in_row``: which columns there are; ``counts``: how many, and the reciprocal. SEGMENTS of the columns are added up
    first; 1 where a thread holds few. ALONE: the CTA holds whole rows.
    """
    count, reciprocal_count = counts
    total = tl.sum(values.to(tl.float64), axis=1)
    mean = divide(total, count, reciprocal_count)
    rounded_mean, remainder = split_mean(mean, values.dtype)
    deviation = values - rounded_mean[:, None]
    if TILE.masked:
        deviation = tl.where(in_row, deviation, 0.0)
    squares = row_sums_float64(deviation * deviation, SEGMENTS, TILE.packing)
    if SEGMENTS > 1 and ALONE:
        squares = block_rematerialization(squares)
    return total, mean, squares - remainder * remainder * count


@triton.jit
def merge_moments(sums, squares, part_counts, mask, count):
    """Return the means of rows or groups and their sums of squares about these, from moments [rows, parts] of parts.

    Chan's formula: to each part's squares about its own mean comes its count times the squared distance of the means.
    ``part_counts``: the elements of each part, [1, parts], and their reciprocals; ``count``: those of a row or group,
    and the reciprocal.
    """
    mean = divide(tl.sum(sums, axis=1), count[0], count[1])
    deviation = sums - mean[:, None] * part_counts[0]
    combined = squares + deviation * deviation * part_counts[1]
    return mean, tl.sum(tl.where(mask, combined, 0.0), axis=1)


@triton.jit
def nan_where_infinite(squares):
    """Return sums of squares, with NaN for those that overflow: rstd would be 0, and the output the bias."""
    return tl.where(squares < float("inf"), squares, float("nan"))


@triton.jit
def remainder_term(remainder, rstd):
    """Return what the remainder of a mean contributes to the normalized values, in float32; 0 for an infinite mean."""
    term = (-remainder * rstd).to(tl.float32)
    return tl.where(term == term, term, 0.0)


@triton.jit
def normalize(x, mean, rstd, weight, bias):
    """Return ``(x − mean)·rstd·weight + bias`` from float64 statistics; weight and bias may be None.

    float32: about the float32 nearest to the mean. The remainder of the mean is added to the normalized value, where
    the rounding of a subnormal remainder matters least.
    """
    if x.dtype == tl.float64:
        factor = rstd
        if weight is not None:
            factor = factor * weight
        result = (x - mean) * factor
    else:
        rounded, remainder = split_mean(mean, tl.float32)
        result = (x - rounded) * rstd.to(tl.float32) + remainder_term(remainder, rstd)
        if weight is not None:
            result = result * weight
    if bias is not None:
        result = result + bias
    return result
