"""LayerNorm's output of a row, from its statistics.

Weight and bias are float32 in the workspace; before bfloat16 data all even columns come first, then all odd ones, so
that pairs can begin at any column: at the one from which on whole cache lines of the result are written.
"""

import numpy as np

from normgrad.cpu.jit import device, in_place
from normgrad.cpu.kinds import F32
from normgrad.cpu.memory import item_size
from normgrad.cpu.pairs import (
    is_bfloat,
    load_pair,
    load_pair_first,
    store_pair,
    store_pair_first,
    stream_pair,
)
from normgrad.cpu.vectors import fma, scaled, splat_f32, vload

_SHORT = 128  # columns of a row that is not aligned


@device
def vector_lane(kind, column, pitch):
    """Where a column is in weight and bias, of which each has `pitch` numbers."""
    return (column & 1) * (pitch >> 1) + (column >> 1) if is_bfloat(kind) else column


@in_place
def _vectors_at(kind, vector, column, pitch):
    """Where the two vectors of the pair from a column on begin."""
    if is_bfloat(kind):
        return vector + 4 * vector_lane(kind, column, pitch), vector + 4 * vector_lane(kind, column + 1, pitch)
    return vector + 4 * column, vector + 4 * (column + 16)


@in_place
def _pair(kind, v, first, second, to_bias, high, factor, low, rest):
    a = scaled(kind, v[0] - high, factor, low, rest)
    b = scaled(kind, v[1] - high, factor, low, rest)
    return (
        fma(a, vload(F32, first, 0), vload(F32, first + to_bias, 0)),
        fma(b, vload(F32, second, 0), vload(F32, second + to_bias, 0)),
    )


@device
def normalise_row(kind, x, y, n, weight, bias, pitch, mean, rstd, stream):
    """y = ((x - mean)*rstd + rest)*weight + bias; the rest is the mean's second part, for rows far from zero."""
    high, factor = np.float32(mean), np.float32(rstd)
    rest, low = np.float32((high - mean) * rstd), np.float32(rstd - factor)
    vh, vr, vc, vl = splat_f32(high), splat_f32(factor), splat_f32(rest), splat_f32(low)
    size, to_bias, step = item_size(kind), bias - weight, 64 if is_bfloat(kind) else 128
    j = 0
    while j < n:
        first, second = _vectors_at(kind, weight, j, pitch)
        left = (-(y + j * size) & 63) // size
        if left == 0 or n <= _SHORT:
            whole = j + ((n - j) & ~31)
            while j < whole:
                a, b = _pair(kind, load_pair(kind, x, j), first, second, to_bias, vh, vr, vl, vc)
                if stream and left == 0:
                    stream_pair(kind, y, j, a, b)
                else:
                    store_pair(kind, y, j, a, b)
                j, first, second = j + 32, first + step, second + step
            left = n - j
        if left > 0:
            left = min(left, n - j)
            a, b = _pair(kind, load_pair_first(kind, x, j, left), first, second, to_bias, vh, vr, vl, vc)
            store_pair_first(kind, y, j, a, b, left)
            j += left
