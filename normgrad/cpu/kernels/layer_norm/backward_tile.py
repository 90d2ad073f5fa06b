"""LayerNorm backward on a tile: up to TILE rows whose weight gradients are added up in registers.

`normgrad.cpu.kernels.layer_norm.backward` calls it for every tile of a group whose row sums are known.
"""

from collections import namedtuple

import numpy as np

from normgrad.cpu.compile.jit import device, inline
from normgrad.cpu.descriptors import MEANS, MEANS_G, MEANS_GX, RSTDS
from normgrad.cpu.intrinsics.memory import load
from normgrad.cpu.intrinsics.pairs import load_pair_first, prefetch_pair
from normgrad.cpu.intrinsics.vectors import fma, splat_f32, splat_f64, vload, vload_f64, vstore, vstore_f64, widen
from normgrad.cpu.kernels.common.results import load_some, store_result
from normgrad.cpu.limits import TILE
from normgrad.cpu.tags import F32

#: What becomes of grad_input: it is not wanted; it is stored; its cache lines are prefetched, since it is large, and it
#: is stored; or it is stored past the caches.
NO_STORE, STORE, FETCH, STREAM = range(4)

#: Some rows of a group: where they are, how many, and the first one's number r in the group; the group's scratch memory
#: with its statistics, and the float32 sums of its weight gradients.
GroupRows = namedtuple("GroupRows", "rows count r scratch sums")
#: How many bytes ahead a tile prefetches: 0 for an input that is in a cache; grad_input for FETCH alone.
Ahead = namedtuple("Ahead", "grad_out input grad_input")


@inline
def splat_of(scratch, parameter, r):
    return splat_f32(load(F32, scratch + parameter, r))


@inline
def _gradient_pair(scratch, r, begins, d, x, w0, w1, s):
    """Compute 32 columns of a row: return grad_input, and the weight gradients s = (dw, dw, db, db) with its terms."""
    mean, rstd = splat_of(scratch, MEANS, r), splat_of(scratch, RSTDS, r)
    mean_g, mean_gx = splat_of(scratch, MEANS_G, r), splat_of(scratch, MEANS_GX, r)
    x0, x1 = (x[0] - mean) * rstd, (x[1] - mean) * rstd
    if begins:
        sums = (d[0] * x0, d[1] * x1, d[0], d[1])
    else:
        sums = (fma(d[0], x0, s[0]), fma(d[1], x1, s[1]), s[2] + d[0], s[3] + d[1])
    # The two means, usually small, are added first, so that g is rounded once.
    o0, o1 = fma(d[0], w0, -fma(x0, mean_gx, mean_g)), fma(d[1], w1, -fma(x1, mean_gx, mean_g))
    return o0 * rstd, o1 * rstd, sums


@inline
def keep_sums(sums, i, s, begins):
    """Add the sums of a tile's rows to those of the tiles before: for 32 columns grad_weight, then grad_bias."""
    w0, w1, b0, b1 = s
    if not begins:
        w0, w1 = w0 + vload(F32, sums, 2 * i), w1 + vload(F32, sums, 2 * i + 16)
        b0, b1 = b0 + vload(F32, sums, 2 * i + 32), b1 + vload(F32, sums, 2 * i + 48)
    vstore(F32, sums, 2 * i, w0)
    vstore(F32, sums, 2 * i + 16, w1)
    vstore(F32, sums, 2 * i + 32, b0)
    vstore(F32, sums, 2 * i + 48, b1)


@inline
def _columns_of_tile(dtype, tile, count, first, j, columns, weight, ahead, store):
    """Compute 32 columns from j on, or the first `columns` of them, of `count` rows."""
    grad_out, go_pitch, x, x_pitch, grad_input, gi_pitch = tile.rows
    w0, w1, zero = vload(F32, weight, j), vload(F32, weight, j + 16), splat_f32(np.float32(0))
    s = (zero, zero, zero, zero)
    for r in range(count):
        d, v = load_some(dtype, grad_out + r * go_pitch, j, columns), load_some(dtype, x + r * x_pitch, j, columns)
        prefetch_pair(dtype, grad_out + ahead.grad_out + r * go_pitch, j)
        if ahead.input:
            prefetch_pair(dtype, x + ahead.input + r * x_pitch, j)
        if store == FETCH:
            prefetch_pair(dtype, grad_input + ahead.grad_input + r * gi_pitch, j)
        o0, o1, s = _gradient_pair(tile.scratch, tile.r + r, r == 0, d, v, w0, w1, s)
        if store != NO_STORE:
            store_result(dtype, grad_input + r * gi_pitch, j, o0, o1, columns, store == STREAM)
    keep_sums(tile.sums, j - first, s, tile.r == 0)


@inline
def _whole_pairs(dtype, tile, count, first, last, weight, ahead, store):
    j = first
    while j + 32 <= last:
        _columns_of_tile(dtype, tile, count, first, j, 32, weight, ahead, store)
        j += 32
    return j


@device
def tile_gradients(dtype, tile, first, last, weight, ahead, store):
    """Compute columns [first, last) of up to TILE rows.

    Add their terms of the weight gradients, in float32, to the group's sums.
    """
    if tile.count == TILE and store == STREAM:  # constants, for which LLVM unrolls the loop over rows
        j = _whole_pairs(dtype, tile, TILE, first, last, weight, ahead, STREAM)
    elif tile.count == TILE and store == FETCH:
        j = _whole_pairs(dtype, tile, TILE, first, last, weight, ahead, FETCH)
    elif tile.count == TILE and store == STORE:
        j = _whole_pairs(dtype, tile, TILE, first, last, weight, ahead, STORE)
    else:
        j = _whole_pairs(dtype, tile, tile.count, first, last, weight, ahead, store)
    if j < last:
        _columns_of_tile(dtype, tile, tile.count, first, j, last - j, weight, ahead, store)


@inline
def _float64_sums_pair(dtype, group, j, count, dw, db, lane):
    """Add the rows' terms of both weight gradients of 32 columns, in float64."""
    grad_out, go_pitch, x, x_pitch, _, _ = group.rows
    w0, w1 = vload_f64(dw, lane), vload_f64(dw, lane + 16)
    b0, b1 = vload_f64(db, lane), vload_f64(db, lane + 16)
    for r in range(group.count):
        d = load_pair_first(dtype, grad_out + r * go_pitch, j, count)
        v = load_pair_first(dtype, x + r * x_pitch, j, count)
        m = splat_f64(np.float64(load(F32, group.scratch + MEANS, r)))
        s = splat_f64(np.float64(load(F32, group.scratch + RSTDS, r)))
        d0, d1 = widen(d[0]), widen(d[1])
        w0, w1 = fma(d0, (widen(v[0]) - m) * s, w0), fma(d1, (widen(v[1]) - m) * s, w1)
        b0, b1 = b0 + d0, b1 + d1
    vstore_f64(dw, lane, w0)
    vstore_f64(dw, lane + 16, w1)
    vstore_f64(db, lane, b0)
    vstore_f64(db, lane + 16, b1)


@inline
def _add_sums_pair(sums, dw, db, lane):
    """Add the group's float32 sums of 32 columns."""
    vstore_f64(dw, lane, vload_f64(dw, lane) + widen(vload(F32, sums, 0)))
    vstore_f64(dw, lane + 16, vload_f64(dw, lane + 16) + widen(vload(F32, sums, 16)))
    vstore_f64(db, lane, vload_f64(db, lane) + widen(vload(F32, sums, 32)))
    vstore_f64(db, lane + 16, vload_f64(db, lane + 16) + widen(vload(F32, sums, 48)))


@device
def add_sums(dtype, in_float64, group, first, last, part):
    """Add the sums of a group of rows over columns [first, last) to those of its part, in float64.

    Where there are few rows in all, the terms too are computed in float64.
    """
    for j in range(first, last, 32):
        if in_float64:
            _float64_sums_pair(dtype, group, j, min(32, last - j), part.dw, part.db, j - part.first)
        else:
            _add_sums_pair(group.sums + 8 * (j - first), part.dw, part.db, j - part.first)
