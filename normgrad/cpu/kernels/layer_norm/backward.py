"""LayerNorm backward: the kernel `layer_norm_backward`.

With g = grad_out*weight, x_hat = (x - mean)*rstd and means over a row: grad_input = rstd*(g - mean(g) -
x_hat*mean(g*x_hat)), grad_weight = sum(grad_out*x_hat) and grad_bias = sum(grad_out) over the rows.

Phases, each of which ends for all threads before the next begins:

1. `order_weight`: the weight as float32 in lane order;
2. `sum_segments`, for long rows (`splits_columns`) alone: the sums of their segments;
3. `compute_gradients`: blocks of rows, or for long rows chunks of columns, each with partial weight gradients in
   float64;
4. `reduce_partials`: the sums of these.

Within a block, rows come in groups of up to GROUP (`run_group`). A group's rows are summed (`sum_group`), then their
gradients are computed (`rows_gradients`) while they are in a cache, in tiles of up to TILE rows. Weight gradients are
added up in registers over a tile, in float32 over a group (`keep_sums`), and in float64 over a block (`add_sums`). How
rows are split depends on the shape alone.
"""

from collections import namedtuple

import numpy as np

from normgrad.cpu import limits
from normgrad.cpu.compile.jit import device, inline, kernel
from normgrad.cpu.descriptors import GROUP_SUMS, MEANS, MEANS_G, MEANS_GX, RSTDS, SUMS_G, SUMS_GX, LayerNormBackward
from normgrad.cpu.intrinsics.memory import fetch_add, item_size, load, stack_space, store
from normgrad.cpu.intrinsics.pairs import load_pair, load_pair_first, prefetch_pair, split_pair, stream_pair
from normgrad.cpu.intrinsics.vectors import fma, hsum, narrow, splat_f32, splat_f64, store_sums, vload, vstore, widen
from normgrad.cpu.kernels.common.lanes import from_lanes, load_element, to_lanes
from normgrad.cpu.kernels.common.reduce import add_pair, sum_partials
from normgrad.cpu.kernels.common.tensors import Cursor, load_some, moved, store_result
from normgrad.cpu.kernels.common.work import items_in_order, items_of
from normgrad.cpu.kernels.copy import copy_rows
from normgrad.cpu.kernels.layer_norm.rows import row_address, uniform_rows
from normgrad.cpu.tags import CODE_F32, F32, F64

#: What becomes of grad_input: it is not wanted; it is stored; its cache lines are prefetched, since it is large, and it
#: is stored; or it is stored past the caches.
NO_STORE, STORE, FETCH, STREAM = range(4)

#: Some rows of a group: a Cursor to them, how many they are, and the index r of the first one in the group; the address
#: of the group's scratch (`descriptors.MEANS` and so on), and of the float32 sums of its weight gradients.
GroupRows = namedtuple("GroupRows", "rows count r scratch sums")
#: How many bytes ahead of itself a tile prefetches, by tensor: input 0 is none, since it is in a cache; grad_input
#: counts for FETCH alone.
Ahead = namedtuple("Ahead", "grad_out input grad_input")
#: Columns [first, last) of a block of rows, and where their float64 partial weight gradients are added up.
Part = namedtuple("Part", "first last dw db")

_lanes = stack_space(2 * limits.GROUP * 16 * 8)

# Sums along rows.


@inline
def _pair_terms(d, x, weight, j, mean, rstd):
    """Return g and g*x_hat of 32 columns, added to 16 lanes, from pairs of grad_out (d), x and rstd."""
    g0, g1 = d[0] * vload(F32, weight, j), d[1] * vload(F32, weight, j + 16)
    return g0 + g1, fma(g1, (x[1] - mean) * rstd[1], g0 * ((x[0] - mean) * rstd[0]))


@inline
def _terms(dtype, grad_out, x, weight, j, mean, rstd, ahead):
    """Return the terms of 32 columns from j on, and prefetch these columns of the row at `ahead`."""
    prefetch_pair(dtype, ahead, j)
    return _pair_terms(load_pair(dtype, grad_out, j), load_pair(dtype, x, j), weight, j, mean, rstd)


@inline
def _terms_of_128(dtype, grad_out, x, weight, j, mean, rstd, ahead):
    a0, b0 = _terms(dtype, grad_out, x, weight, j, mean, rstd, ahead)
    a1, b1 = _terms(dtype, grad_out, x, weight, j + 32, mean, rstd, ahead)
    a2, b2 = _terms(dtype, grad_out, x, weight, j + 64, mean, rstd, ahead)
    a3, b3 = _terms(dtype, grad_out, x, weight, j + 96, mean, rstd, ahead)
    return (a0 + a1) + (a2 + a3), (b0 + b1) + (b2 + b3)


@device
def lane_sums(dtype, grad_out, x, weight, first, last, statistics, ahead):
    """Return sum(g), sum(g*x_hat) over columns in 16 lanes: float32 trees of 16 terms a lane, float64 beyond.

    Meanwhile prefetch the same columns of the row at the address `ahead`.
    """
    mean, rstd = statistics
    vm, vr = splat_f32(mean), (splat_f32(rstd), splat_f32(rstd))
    s1, s2 = splat_f64(0.0), splat_f64(0.0)
    j = first
    while j + 256 <= last:
        a0, b0 = _terms_of_128(dtype, grad_out, x, weight, j, vm, vr, ahead)
        a1, b1 = _terms_of_128(dtype, grad_out, x, weight, j + 128, vm, vr, ahead)
        s1, s2 = s1 + widen(a0 + a1), s2 + widen(b0 + b1)
        j += 256
    while j + 32 <= last:
        a0, b0 = _terms(dtype, grad_out, x, weight, j, vm, vr, ahead)
        s1, s2 = s1 + widen(a0), s2 + widen(b0)
        j += 32
    if j < last:
        prefetch_pair(dtype, ahead, j)
        # rstd is 0 in the lanes beyond the last column: (0 - mean)*rstd may overflow where no column's x_hat does.
        d, v = load_pair_first(dtype, grad_out, j, last - j), load_pair_first(dtype, x, j, last - j)
        a0, b0 = _pair_terms(d, v, weight, j, vm, split_pair(dtype, last - j, rstd, np.float32(0)))
        s1, s2 = s1 + widen(a0), s2 + widen(b0)
    return s1, s2


@inline
def _is_float32(vector):
    return vector.dtype == CODE_F32 and vector.stride == 1


@device
def load_statistics(desc, row, rows, scratch, r):
    """Store mean and rstd of rows from `row` on in the scratch, from the group's row r on."""
    if rows == limits.GROUP and _is_float32(desc.mean) and _is_float32(desc.rstd):
        vstore(F32, scratch + MEANS, r, vload(F32, desc.mean.address, row))
        vstore(F32, scratch + RSTDS, r, vload(F32, desc.rstd.address, row))
        return
    for i in range(rows):
        store(F32, scratch + MEANS, r + i, np.float32(load_element(desc.mean, row + i)))
        store(F32, scratch + RSTDS, r + i, np.float32(load_element(desc.rstd, row + i)))


@device
def read_sums(desc, row, rows, scratch, r):
    """Add up the sums that `sum_segments` has stored for rows, to the group's rows from r on."""
    segments = (desc.columns + limits.SEGMENT - 1) // limits.SEGMENT
    for i in range(rows):
        s1, s2 = 0.0, 0.0
        for at in range(2 * (row + i) * segments, 2 * (row + i + 1) * segments, 2):
            s1, s2 = s1 + load(F64, desc.row_sums, at), s2 + load(F64, desc.row_sums, at + 1)
        store(F64, scratch + SUMS_G, r + i, s1)
        store(F64, scratch + SUMS_GX, r + i, s2)


@inline
def _add_lanes(lanes, first, last, sums):
    """Add up the lanes of TILE rows from `first` on; row `last` is read in place of rows after it."""
    a, b = vload(F64, lanes, 16 * first), vload(F64, lanes, 16 * min(first + 1, last))
    c, d = vload(F64, lanes, 16 * min(first + 2, last)), vload(F64, lanes, 16 * min(first + 3, last))
    store_sums(sums + 8 * first, a, b, c, d)


@inline
def _sum_segment(dtype, desc, rows, count, i, first, scratch, r):
    """Sum a segment of row i of `count` rows, in 16 lanes; prefetch the input of the row `count` rows on."""
    d, x = rows.grad_out + i * rows.grad_out_step, rows.input + i * rows.input_step
    last, ahead = min(desc.columns, first + limits.SEGMENT), x + count * rows.input_step
    statistics = load(F32, scratch + MEANS, r + i), load(F32, scratch + RSTDS, r + i)
    return lane_sums(dtype, d, x, desc.weight_lanes, first, last, statistics, ahead)


@device
def sum_group(dtype, desc, rows, count, scratch, r):
    """Store sum(g) and sum(g*x_hat) of `count` rows, which are rows r and following of their group."""
    lanes, sums, sums_x = _lanes(), scratch + SUMS_G + 8 * r, scratch + SUMS_GX + 8 * r
    for i in range(count):  # all rows before any lanes are added up: that would wait for the row's last columns
        a, b = _sum_segment(dtype, desc, rows, count, i, 0, scratch, r)
        vstore(F64, lanes, 16 * i, a)
        vstore(F64, lanes, 16 * (limits.GROUP + i), b)
    for i in range(0, count, limits.TILE):
        _add_lanes(lanes, i, count - 1, sums)
        _add_lanes(lanes + 128 * limits.GROUP, i, count - 1, sums_x)
    for first in range(limits.SEGMENT, desc.columns, limits.SEGMENT):
        for i in range(count):
            a, b = _sum_segment(dtype, desc, rows, count, i, first, scratch, r)
            store(F64, sums, i, load(F64, sums, i) + hsum(a))
            store(F64, sums_x, i, load(F64, sums_x, i) + hsum(b))


# Tiles: up to TILE rows of a group whose row sums are known.


@inline
def splat_of(scratch, parameter, r):
    """Return a statistic of row r of a group, such as MEANS, in all lanes."""
    return splat_f32(load(F32, scratch + parameter, r))


@inline
def _gradient_pair(scratch, r, begins, d, x, w0, w1, s):
    """Return grad_input of 32 columns of a row, and the weight gradients s = (dw, dw, db, db) with its terms added.

    `begins`: the row is the first of its tile, so s has nothing yet.
    """
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
    """Add the weight gradients s of a tile to those of the group's tiles before it, for 32 columns from column i on.

    In memory 32 columns of grad_weight are followed by the same columns of grad_bias. `begins`: this is the first tile.
    """
    w0, w1, b0, b1 = s
    if not begins:
        w0, w1 = w0 + vload(F32, sums, 2 * i), w1 + vload(F32, sums, 2 * i + 16)
        b0, b1 = b0 + vload(F32, sums, 2 * i + 32), b1 + vload(F32, sums, 2 * i + 48)
    vstore(F32, sums, 2 * i, w0)
    vstore(F32, sums, 2 * i + 16, w1)
    vstore(F32, sums, 2 * i + 32, b0)
    vstore(F32, sums, 2 * i + 48, b1)


@inline
def _columns_of_tile(dtype, tile, count, first, j, columns, weight, ahead, store_mode):
    """Compute 32 columns from j on, or the first `columns` of them, of `count` rows; keep their weight gradients.

    `first` is the column with which the sums begin; `store_mode` says what becomes of grad_input (NO_STORE to STREAM).
    """
    grad_out, go_pitch, x, x_pitch, grad_input, gi_pitch = tile.rows
    w0, w1, zero = vload(F32, weight, j), vload(F32, weight, j + 16), splat_f32(np.float32(0))
    s = (zero, zero, zero, zero)
    for r in range(count):
        d, v = load_some(dtype, grad_out + r * go_pitch, j, columns), load_some(dtype, x + r * x_pitch, j, columns)
        prefetch_pair(dtype, grad_out + ahead.grad_out + r * go_pitch, j)
        if ahead.input:
            prefetch_pair(dtype, x + ahead.input + r * x_pitch, j)
        if store_mode == FETCH:
            prefetch_pair(dtype, grad_input + ahead.grad_input + r * gi_pitch, j)
        o0, o1, s = _gradient_pair(tile.scratch, tile.r + r, r == 0, d, v, w0, w1, s)
        if store_mode != NO_STORE:
            store_result(dtype, grad_input + r * gi_pitch, j, o0, o1, columns, store_mode == STREAM)
    keep_sums(tile.sums, j - first, s, tile.r == 0)


@inline
def _whole_pairs(dtype, tile, count, first, last, weight, ahead, store_mode):
    """Compute columns [first, last) in whole pairs, and return the first column that is left."""
    j = first
    while j + 32 <= last:
        _columns_of_tile(dtype, tile, count, first, j, 32, weight, ahead, store_mode)
        j += 32
    return j


@device
def tile_gradients(dtype, tile, first, last, weight, ahead, store_mode):
    """Compute columns [first, last) of up to TILE rows.

    Add their terms of the weight gradients, in float32, to the group's sums.
    """
    if tile.count == limits.TILE and store_mode == STREAM:  # with constants LLVM unrolls the loop over rows
        j = _whole_pairs(dtype, tile, limits.TILE, first, last, weight, ahead, STREAM)
    elif tile.count == limits.TILE and store_mode == FETCH:
        j = _whole_pairs(dtype, tile, limits.TILE, first, last, weight, ahead, FETCH)
    elif tile.count == limits.TILE and store_mode == STORE:
        j = _whole_pairs(dtype, tile, limits.TILE, first, last, weight, ahead, STORE)
    else:
        j = _whole_pairs(dtype, tile, tile.count, first, last, weight, ahead, store_mode)
    if j < last:
        _columns_of_tile(dtype, tile, tile.count, first, j, last - j, weight, ahead, store_mode)


@inline
def _float64_sums_pair(dtype, group, j, count, dw, db, lane):
    """Add the terms of both weight gradients of 32 columns, over the rows of a group, all in float64."""
    grad_out, go_pitch, x, x_pitch, _, _ = group.rows
    w0, w1 = vload(F64, dw, lane), vload(F64, dw, lane + 16)
    b0, b1 = vload(F64, db, lane), vload(F64, db, lane + 16)
    for r in range(group.count):
        d = load_pair_first(dtype, grad_out + r * go_pitch, j, count)
        v = load_pair_first(dtype, x + r * x_pitch, j, count)
        m = splat_f64(np.float64(load(F32, group.scratch + MEANS, r)))
        s = splat_f64(np.float64(load(F32, group.scratch + RSTDS, r)))
        d0, d1 = widen(d[0]), widen(d[1])
        w0, w1 = fma(d0, (widen(v[0]) - m) * s, w0), fma(d1, (widen(v[1]) - m) * s, w1)
        b0, b1 = b0 + d0, b1 + d1
    vstore(F64, dw, lane, w0)
    vstore(F64, dw, lane + 16, w1)
    vstore(F64, db, lane, b0)
    vstore(F64, db, lane + 16, b1)


@inline
def _add_sums_pair(sums, dw, db, lane):
    """Add the group's float32 sums of 32 columns to the part's float64 ones."""
    add_pair(dw, lane, vload(F32, sums, 0), vload(F32, sums, 16))
    add_pair(db, lane, vload(F32, sums, 32), vload(F32, sums, 48))


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


# Rows of 16 float32 columns, each a single vector: 1.8 times as fast as tiles (Zen 5).

SHORT = 16


@inline
def _short_x_hat(rows, scratch, r, i):
    x = vload(F32, rows.input + i * rows.input_step, 0) - splat_of(scratch, MEANS, r + i)
    return x * splat_of(scratch, RSTDS, r + i)


@inline
def _short_terms(w, rows, scratch, r, i):
    g = vload(F32, rows.grad_out + i * rows.grad_out_step, 0) * w
    return widen(g), widen(g * _short_x_hat(rows, scratch, r, i))


@device
def sum_short_rows(weight, rows, count, scratch, r):
    """Do as `sum_group` for rows of 16 float32 columns."""
    w, last = vload(F32, weight, 0), count - 1
    for i in range(0, count, limits.TILE):  # the last row is read in place of rows after it
        a0, b0 = _short_terms(w, rows, scratch, r, i)
        a1, b1 = _short_terms(w, rows, scratch, r, min(i + 1, last))
        a2, b2 = _short_terms(w, rows, scratch, r, min(i + 2, last))
        a3, b3 = _short_terms(w, rows, scratch, r, min(i + 3, last))
        store_sums(scratch + SUMS_G + 8 * (r + i), a0, a1, a2, a3)
        store_sums(scratch + SUMS_GX + 8 * (r + i), b0, b1, b2, b3)


@inline
def _short_gradient(w, tile, i):
    """Return a row's grad_input, x_hat and grad_out."""
    rows, scratch, r = tile.rows, tile.scratch, tile.r
    d, x_hat = vload(F32, rows.grad_out + i * rows.grad_out_step, 0), _short_x_hat(rows, scratch, r, i)
    means = fma(x_hat, splat_of(scratch, MEANS_GX, r + i), splat_of(scratch, MEANS_G, r + i))
    return fma(d, w, -means) * splat_of(scratch, RSTDS, r + i), x_hat, d


@device
def short_tile_gradients(weight, tile, ahead, store_mode):
    """Compute TILE rows of 16 float32 columns, and keep their weight gradients; prefetch the rows `ahead` rows on."""
    w, zero, rows = vload(F32, weight, 0), splat_f32(np.float32(0)), tile.rows
    out, pitch = rows.result, rows.result_step
    for i in range(0, limits.TILE, 2):
        prefetch_pair(F32, rows.grad_out + (ahead + i) * rows.grad_out_step, 0)
        prefetch_pair(F32, rows.input + (ahead + i) * rows.input_step, 0)
    o0, x0, d0 = _short_gradient(w, tile, 0)
    o1, x1, d1 = _short_gradient(w, tile, 1)
    o2, x2, d2 = _short_gradient(w, tile, 2)
    o3, x3, d3 = _short_gradient(w, tile, 3)
    if store_mode == STREAM and pitch == 4 * SHORT:
        stream_pair(F32, out, 0, o0, o1)
        stream_pair(F32, out, 2 * SHORT, o2, o3)
    else:
        vstore(F32, out, 0, o0)
        vstore(F32, out + pitch, 0, o1)
        vstore(F32, out + 2 * pitch, 0, o2)
        vstore(F32, out + 3 * pitch, 0, o3)
    dw, db = fma(d3, x3, fma(d2, x2, fma(d1, x1, d0 * x0))), ((d0 + d1) + d2) + d3
    keep_sums(tile.sums, 0, (dw, zero, db, zero), tile.r == 0)


# Groups of rows, and the phases.


@device
def prepare_rows(dtype, desc, row, rows, count, scratch, r):
    """Store the statistics of rows, and the means of g and of g*x_hat where grad_input is wanted."""
    n = desc.columns
    load_statistics(desc, row, count, scratch, r)
    if desc.wants_input == 0:
        return
    if desc.splits_columns != 0:
        read_sums(desc, row, count, scratch, r)
    elif item_size(dtype) == 4 and n == SHORT:
        sum_short_rows(desc.weight_lanes, rows, count, scratch, r)
    else:
        sum_group(dtype, desc, rows, count, scratch, r)
    per_column = splat_f64(1.0 / n)
    vstore(F32, scratch + MEANS_G, r, narrow(vload(F64, scratch + SUMS_G, r) * per_column))
    vstore(F32, scratch + MEANS_GX, r, narrow(vload(F64, scratch + SUMS_GX, r) * per_column))


@inline
def store_mode_of(desc):
    """Return what becomes of grad_input. It is streamed if it is large and every row begins at a cache line."""
    if desc.wants_input == 0:
        return NO_STORE
    if desc.is_large == 0:
        return STORE
    strides = desc.grad_input.strides
    return FETCH if (desc.grad_input.address | strides.inner | strides.middle | strides.outer) % 64 else STREAM


@device
def rows_gradients(dtype, desc, these, first, last):
    """Compute columns [first, last) of the rows `these` of a group, whose statistics and means are in its scratch."""
    rows, count, store_mode = these.rows, these.count, store_mode_of(desc)
    short = item_size(dtype) == 4 and desc.columns == SHORT and store_mode != NO_STORE
    for i in range(0, count, limits.TILE):
        tile = GroupRows(moved(rows, i), min(limits.TILE, count - i), these.r + i, these.scratch, these.sums)
        # What comes next: other rows, whose input the sums have prefetched. Where columns are split there are no sums
        # before: the next tile, or after the last one the next STRIP columns of the first.
        next_rows, next_bytes, next_input = count, 0, 0
        if desc.splits_columns != 0:
            next_rows = limits.TILE if i + limits.TILE < count else -i
            next_bytes = 0 if i + limits.TILE < count else limits.STRIP * item_size(dtype)
            next_input = next_rows * rows.input_step + next_bytes
        next_result = next_rows * rows.result_step + next_bytes
        ahead = Ahead(next_rows * rows.grad_out_step + next_bytes, next_input, next_result)
        if short and tile.count == limits.TILE:
            short_tile_gradients(desc.weight_lanes, tile, count, store_mode)
        else:
            tile_gradients(dtype, tile, first, last, desc.weight_lanes, ahead, store_mode)


@device
def run_group(dtype, desc, row, rows, count, part, scratch):
    """Compute the columns of a part, of a group of up to GROUP rows from `row` on.

    `cached_rows` of them at a time are summed, and then their gradients are computed while they are in a cache. Where
    that is fewer than GROUP, the float32 weight gradients of all the part's columns are kept until the last rows.
    """
    cached, want_sums = desc.cached_rows, (desc.wants_weight | desc.wants_bias) != 0
    for r in range(0, count, cached):
        here, some = moved(rows, r), min(cached, count - r)
        prepare_rows(dtype, desc, row + r, here, some, scratch, r)
        for j in range(part.first, part.last, limits.STRIP):
            end, sums = min(part.last, j + limits.STRIP), scratch + GROUP_SUMS
            if cached < limits.GROUP:
                sums += 8 * (j - part.first)
            rows_gradients(dtype, desc, GroupRows(here, some, r, scratch, sums), j, end)
            if want_sums and r + cached >= count:
                add_sums(dtype, desc.float64_terms != 0, GroupRows(rows, count, 0, scratch, sums), j, end, part)


@inline
def process_rows(dtype, desc, first_row, last_row, part, scratch):
    """Compute the columns of a part, of some rows.

    Rows with other column strides, or whose gradient overwrites its input, go through contiguous copies.
    """
    n, size, pitch = desc.columns, item_size(dtype), desc.staged_pitch
    copies = scratch + GROUP_SUMS + desc.group_sums_size
    row = first_row
    while row < last_row:
        rows = uniform_rows(desc.row_axes, row, min(limits.STAGED_ROWS if pitch else limits.GROUP, last_row - row))
        d, x = row_address(desc.grad_out, desc.row_axes, row), row_address(desc.input, desc.row_axes, row)
        result = o = row_address(desc.grad_input, desc.row_axes, row)
        dp, xp, op = desc.grad_out.strides.inner, desc.input.strides.inner, desc.grad_input.strides.inner
        if pitch:
            copy_d, copy_x, inner = copies, copies + limits.STAGED_ROWS * pitch, (pitch // size, 1)
            copy_rows(dtype, dtype, d, (dp // size, desc.grad_out.column_stride), copy_d, inner, rows, n)
            copy_rows(dtype, dtype, x, (xp // size, desc.input.column_stride), copy_x, inner, rows, n)
            d, x, o = copy_d, copy_x, copies + 2 * limits.STAGED_ROWS * pitch
            dp, xp, op = pitch, pitch, pitch
        for r in range(0, rows, limits.GROUP):
            group = moved(Cursor(d, dp, x, xp, o, op), r)
            run_group(dtype, desc, row + r, group, min(limits.GROUP, rows - r), part, scratch)
        if pitch and desc.wants_input:
            strides = desc.grad_input.strides.inner // size, desc.grad_input.column_stride
            copy_rows(dtype, dtype, o, (pitch // size, 1), result, strides, rows, n)
        row += rows


@device
def zero_f64(address, count):
    """Set float64 elements to 0, in whole vectors."""
    for i in range(0, count, 16):
        vstore(F64, address, i, splat_f64(0.0))


@device
def order_weight(dtype, desc):
    """Phase 1: store the weight as float32 in lane order, padded with zeros, by one thread."""
    for _ in items_in_order(desc.weight_phase, 1):
        to_lanes(dtype, True, desc.weight, 1.0, desc.weight_lanes, 0, (desc.columns + 31) // 32 * 32, desc.columns)


@device
def sum_segments(dtype, desc):
    """Phase 2, for long rows: sum them, a segment at a time."""
    n, segments = desc.columns, (desc.columns + limits.SEGMENT - 1) // limits.SEGMENT
    items = desc.rows * segments if desc.wants_input and desc.splits_columns else 0
    for i in items_in_order(desc.row_sum_phase, items):
        row, first = i // segments, (i % segments) * limits.SEGMENT
        d, x = row_address(desc.grad_out, desc.row_axes, row), row_address(desc.input, desc.row_axes, row)
        last = min(n, first + limits.SEGMENT)
        statistics = np.float32(load_element(desc.mean, row)), np.float32(load_element(desc.rstd, row))
        s1, s2 = lane_sums(dtype, d, x, desc.weight_lanes, first, last, statistics, x + limits.PREFETCH_BYTES)
        store(F64, desc.row_sums, 2 * i, hsum(s1))
        store(F64, desc.row_sums, 2 * i + 1, hsum(s2))


@inline
def compute_gradients(dtype, desc, slot, scratch):
    """Phase 3: blocks of rows, each with its own partial weight gradients; for long rows, chunks of columns."""
    m, n, splits_columns = desc.rows, desc.columns, desc.splits_columns != 0
    padded = (n + 31) // 32 * 32
    want_sums = (desc.wants_weight | desc.wants_bias) != 0
    items = (n + limits.COLUMN_CHUNK - 1) // limits.COLUMN_CHUNK if splits_columns else desc.blocks
    for i in items_of(desc.gradient_phase, items, 1, slot):
        first_row, last_row, first, last = i * desc.block_rows, min(m, (i + 1) * desc.block_rows), 0, n
        dw = desc.partials + i * padded * 16
        if splits_columns:
            first_row, last_row, first, last = 0, m, i * limits.COLUMN_CHUNK, min(n, (i + 1) * limits.COLUMN_CHUNK)
            dw = desc.partials + first * 8
        db = dw + padded * 8
        if want_sums:
            zero_f64(dw, (last - first + 31) // 32 * 32)
            zero_f64(db, (last - first + 31) // 32 * 32)
        process_rows(dtype, desc, first_row, last_row, Part(first, last, dw, db), scratch)


@device
def reduce_partials(dtype, desc):
    """Phase 4: add up the partial weight gradients of the blocks, and write them."""
    n, blocks = desc.columns, 1 if desc.splits_columns else desc.blocks
    padded = (n + 31) // 32 * 32
    chunks = (n + limits.REDUCED_COLUMNS - 1) // limits.REDUCED_COLUMNS if desc.wants_weight | desc.wants_bias else 0
    for chunk in items_in_order(desc.reduce_phase, chunks):
        for j in range(chunk * limits.REDUCED_COLUMNS, min(n, (chunk + 1) * limits.REDUCED_COLUMNS), 32):
            dw, last = desc.partials + 8 * j, min(n, j + 32)
            if blocks != 1:
                sum_partials(dw, blocks, 16 * padded, padded)
            from_lanes(dtype, True, desc.grad_weight, j, last, dw)
            from_lanes(dtype, True, desc.grad_bias, j, last, dw + 8 * padded)


@kernel
def layer_norm_backward(desc: LayerNormBackward, dtype):
    slot = fetch_add(desc.slot, 1)
    if slot >= desc.slots:
        return
    order_weight(dtype, desc)
    sum_segments(dtype, desc)
    compute_gradients(dtype, desc, slot, desc.scratch + slot * desc.scratch_size)
    reduce_partials(dtype, desc)
