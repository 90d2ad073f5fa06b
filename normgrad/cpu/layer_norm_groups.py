"""LayerNorm backward on a group of rows: their sums, then their gradients."""

from normgrad.cpu.copies import load_coded
from normgrad.cpu.jit import device, in_place
from normgrad.cpu.kinds import F32
from normgrad.cpu.layer_norm_backward_fields import (
    COLUMNS,
    EXACT_SUMS,
    MEAN,
    ORDERED_WEIGHT,
    ROW_SUMS,
    RSTD,
    STATISTICS_CODE,
    STREAM,
    TOGETHER,
    WANT_BIAS,
    WANT_INPUT,
    WANT_WEIGHT,
    WIDE,
)
from normgrad.cpu.layer_norm_short_rows import SHORT, short_tile_gradients, sum_short_rows
from normgrad.cpu.layer_norm_tiles import add_sums, tile_gradients
from normgrad.cpu.memory import item_size, load_f64, stack_space, store, store_f64
from normgrad.cpu.row_sizes import (
    GROUP,
    MEANS,
    MEANS_G,
    MEANS_GX,
    RSTDS,
    SEGMENT,
    STRETCH,
    SUMS,
    SUMS_G,
    SUMS_GX,
    TILE,
)
from normgrad.cpu.rows import lane_sums
from normgrad.cpu.vectors import hsum, narrow, splat_f64, store_sums, vload, vload_f64, vstore, vstore_f64

_lanes, _before = stack_space(2 * GROUP * 16 * 8), stack_space(2 * GROUP * 8)


@in_place
def rows_from(tensors, r):
    """The addresses and pitches of three tensors' rows, from row r on."""
    grad_out, go_pitch, x, x_pitch, grad_input, gi_pitch = tensors
    return grad_out + r * go_pitch, go_pitch, x + r * x_pitch, x_pitch, grad_input + r * gi_pitch, gi_pitch


@device
def load_statistics(desc, row, rows, scratch, r):
    """mean and rstd of rows from `row` on, to the scratch from the group's row r on."""
    code, means, rstds = desc[STATISTICS_CODE], desc[MEAN], desc[RSTD]
    if code == 0 and rows == GROUP:
        vstore(F32, scratch + MEANS, r, vload(F32, means, row))
        vstore(F32, scratch + RSTDS, r, vload(F32, rstds, row))
        return
    for i in range(rows):
        store(F32, scratch + MEANS, r + i, load_coded(code, means, row + i))
        store(F32, scratch + RSTDS, r + i, load_coded(code, rstds, row + i))


@device
def read_sums(desc, row, rows, scratch, r):
    """The sums of rows, whose segments a first phase made."""
    segments = (desc[COLUMNS] + SEGMENT - 1) // SEGMENT
    for i in range(rows):
        s1, s2 = 0.0, 0.0
        for at in range(2 * (row + i) * segments, 2 * (row + i + 1) * segments, 2):
            s1, s2 = s1 + load_f64(desc[ROW_SUMS], at), s2 + load_f64(desc[ROW_SUMS], at + 1)
        store_f64(scratch + SUMS_G, r + i, s1)
        store_f64(scratch + SUMS_GX, r + i, s2)


@device
def sum_row(kind, desc, row, grad_out, x, lanes, ahead):
    """A row's sums: those of its last segment are left in lanes."""
    mean, rstd = load_coded(desc[STATISTICS_CODE], desc[MEAN], row), load_coded(desc[STATISTICS_CODE], desc[RSTD], row)
    s1, s2, first, n = 0.0, 0.0, 0, desc[COLUMNS]
    while first + SEGMENT < n:
        a, b = lane_sums(kind, grad_out, x, desc[ORDERED_WEIGHT], first, first + SEGMENT, mean, rstd, ahead)
        s1, s2 = s1 + hsum(a), s2 + hsum(b)
        first += SEGMENT
    a, b = lane_sums(kind, grad_out, x, desc[ORDERED_WEIGHT], first, n, mean, rstd, ahead)
    vstore_f64(lanes, 0, a)
    vstore_f64(lanes, 16 * GROUP, b)
    return s1, s2


@in_place
def _add_lanes(lanes, first, last, sums):
    """The sums over lanes of TILE rows; the last one instead of those that are not there."""
    a, b = vload_f64(lanes, 16 * first), vload_f64(lanes, 16 * min(first + 1, last))
    c, d = vload_f64(lanes, 16 * min(first + 2, last)), vload_f64(lanes, 16 * min(first + 3, last))
    store_sums(sums + 8 * first, a, b, c, d)


@device
def sum_rows(kind, desc, row, rows, tensors, scratch, r):
    """The sums of rows from `row` on, which are those from r on of their group."""
    grad_out, go_pitch, x, x_pitch, _, _ = tensors
    lanes, before = _lanes(), _before()
    for i in range(rows):  # all rows first: the sum over a row's lanes would wait for its columns
        d, v = grad_out + i * go_pitch, x + i * x_pitch
        s1, s2 = sum_row(kind, desc, row + i, d, v, lanes + 128 * i, v + rows * x_pitch)
        store_f64(before, i, s1)
        store_f64(before, GROUP + i, s2)
    for i in range(0, rows, TILE):
        _add_lanes(lanes, i, rows - 1, scratch + SUMS_G + 8 * r)
        _add_lanes(lanes + 128 * GROUP, i, rows - 1, scratch + SUMS_GX + 8 * r)
    if desc[COLUMNS] > SEGMENT:
        for i in range(rows):
            first, second = load_f64(scratch + SUMS_G, r + i), load_f64(scratch + SUMS_GX, r + i)
            store_f64(scratch + SUMS_G, r + i, load_f64(before, i) + first)
            store_f64(scratch + SUMS_GX, r + i, load_f64(before, GROUP + i) + second)


@device
def prepare_rows(kind, desc, row, rows, tensors, scratch, r):
    """Statistics of rows, and the means of g and of g*x_hat where grad_input is wanted."""
    n = desc[COLUMNS]
    load_statistics(desc, row, rows, scratch, r)
    if desc[WANT_INPUT] == 0:
        return
    if desc[WIDE] != 0:
        read_sums(desc, row, rows, scratch, r)
    elif item_size(kind) == 4 and n == SHORT:
        sum_short_rows(desc[ORDERED_WEIGHT], rows, tensors, scratch, r)
    else:
        sum_rows(kind, desc, row, rows, tensors, scratch, r)
    per_column = splat_f64(1.0 / n)
    vstore(F32, scratch + MEANS_G, r, narrow(vload_f64(scratch + SUMS_G, r) * per_column))
    vstore(F32, scratch + MEANS_GX, r, narrow(vload_f64(scratch + SUMS_GX, r) * per_column))


@device
def rows_gradients(kind, desc, rows, first, last, tensors, scratch, sums, r):
    """Columns [first, last) of rows that are prepared, from the group's row r on."""
    weight, want_input, stream = desc[ORDERED_WEIGHT], desc[WANT_INPUT] != 0, desc[STREAM] != 0
    short = item_size(kind) == 4 and desc[COLUMNS] == SHORT and want_input
    for i in range(0, rows, TILE):
        here = rows_from(tensors, i)
        ahead_go, ahead_x = rows * tensors[1], 0  # the next rows; of x, the sums have prefetched them
        if desc[WIDE] != 0:
            ahead = TILE if i + TILE < rows else -i
            stretch = 0 if i + TILE < rows else STRETCH * item_size(kind)
            ahead_go, ahead_x = ahead * tensors[1] + stretch, ahead * tensors[3] + stretch
        if short and i + TILE <= rows:
            short_tile_gradients(weight, here, scratch, sums, r + i, stream, rows)
        else:
            count = min(TILE, rows - i)
            tile_gradients(
                kind, count, first, last, here, weight, scratch, sums, r + i, want_input, stream, ahead_go, ahead_x
            )


@device
def run_group(kind, desc, row, rows, first, last, tensors, scratch, dw, db, dw_first):
    """Columns [first, last) of up to GROUP rows. TOGETHER of them stay in a cache between their sums and their
    gradients; where that is not all of them, the sums of whole rows are kept meanwhile.
    """
    together, want_sums = desc[TOGETHER], (desc[WANT_WEIGHT] | desc[WANT_BIAS]) != 0
    for r in range(0, rows, together):
        here, count = rows_from(tensors, r), min(together, rows - r)
        prepare_rows(kind, desc, row + r, count, here, scratch, r)
        for j in range(first, last, STRETCH):
            end, sums = min(last, j + STRETCH), scratch + SUMS + (8 * (j - first) if together < GROUP else 0)
            rows_gradients(kind, desc, count, j, end, here, scratch, sums, r)
            if want_sums and r + together >= rows:
                exact = desc[EXACT_SUMS] != 0
                add_sums(kind, exact, j, end, tensors, scratch, sums, rows, dw, db, dw_first)
