"""Sums in a fixed order, with few float32 roundings in a chain.

A thread that adds many equal float32 values one by one may round in the same direction each time. The sums here split
such chains: into segments, with a compensation term, or in float64.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.indexing import INTERPRETED, int64
from normgrad.cuda.device.pack16 import UNPACKED


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def sum_pair(first, second, axis: tl.constexpr):
    """Sum two tensors over an axis in one reduction, which exchanges both between threads at once."""
    if INTERPRETED:
        sums = tl.sum(first, axis=axis), tl.sum(second, axis=axis)
    else:
        sums = tl.reduce((first, second), axis, _add_pairs)
    return sums


@triton.jit
def finite_median(a, b, c):
    """Return the median of three values; 0 where it is not finite."""
    median = tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))
    return tl.where(median - median == 0.0, median, 0.0)


@triton.jit
def compensated_add(total, compensation, value):
    """Add a value to a sum, and what float32 rounding left out of it to ``compensation`` (Kahan, FastTwoSum).

    The compensation is exact where the sum is larger than the value; otherwise it has a rounding error or two of the
    value. A float64 sum is not compensated.
    """
    grown = total + value
    if total.dtype == tl.float32:
        compensation += value - (grown - total)
    return grown, compensation


@triton.jit
def compensated_total(total, compensation):
    """Return a compensated sum; the compensation of an infinite sum is NaN and left out."""
    if total.dtype == tl.float32:
        total = tl.where(compensation == compensation, total + compensation, total)
    return total


@triton.jit
def column_sums(values, SEGMENTED: tl.constexpr):
    """Sum [rows, columns] over the rows; SEGMENTED: in eight segments first, where a thread holds many rows."""
    if SEGMENTED:
        values = tl.sum(tl.reshape(values, (8, values.shape[0] // 8, values.shape[1])), axis=0)
    return tl.sum(values, axis=0)


@triton.jit
def store_partials(pointers, rows, columns, weight_sum, bias_sum, mask, WANT: tl.constexpr):
    """Store partial sums of the weight gradients that are wanted, at these addresses in [outputs, rows, columns]."""
    if WANT.weight:
        tl.store(pointers, weight_sum, mask=mask)
        pointers += int64(rows) * columns
    if WANT.bias:
        tl.store(pointers, bias_sum, mask=mask)


@triton.jit
def row_sums_float64(values, SEGMENTS: tl.constexpr, PACKING: tl.constexpr):
    """Sum float32 [rows, columns] over the columns to float64.

    A thread adds no more than eight elements as float32: the SEGMENTS of its columns element by element, and the two
    elements of a word. So the square of an outlier absorbs few others.
    """
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    if SEGMENTS == 1:
        result = tl.sum(values, axis=1).to(tl.float64)
    else:
        partial = tl.sum(tl.reshape(values, (ROWS, SEGMENTS, COLUMNS // SEGMENTS)), axis=1)
        if PACKING != UNPACKED:
            partial = tl.sum(tl.reshape(partial, (ROWS, COLUMNS // SEGMENTS // 2, 2)), axis=2)
        result = tl.sum(partial.to(tl.float64), axis=1)
    return result
