"""LayerNorm backward on a group of rows: their sums, then their gradients."""

from normgrad.cpu.copies import load_coded
from normgrad.cpu.jit import device, in_place
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
from normgrad.cpu.layer_norm_rows import exact_row, load_statistics, parameters_of, parameters_of_all
from normgrad.cpu.layer_norm_short_rows import SHORT, short_tile_gradients, sum_short_rows
from normgrad.cpu.layer_norm_tiles import add_sums, tile_gradients
from normgrad.cpu.memory import item_size, load_f64, stack_space, store_f64
from normgrad.cpu.row_sizes import FINE, FIRST_SUMS, GROUP, SECOND_SUMS, SEGMENT, STRETCH, SUMS, TILE
from normgrad.cpu.rows import lane_sums
from normgrad.cpu.vectors import hsum, splat_f64, store_sums, vload_f64, vstore_f64

_lanes, _before = stack_space(2 * GROUP * 16 * 8), stack_space(2 * GROUP * 8)


@in_place
def rows_from(tensors, r):
    """The addresses and pitches of three tensors' rows, from row r on."""
    grad_out, go_pitch, x, x_pitch, grad_input, gi_pitch = tensors
    return grad_out + r * go_pitch, go_pitch, x + r * x_pitch, x_pitch, grad_input + r * gi_pitch, gi_pitch


@device
def read_sums(desc, row, rows, scratch, r):
    """The sums of rows, whose segments a first phase made."""
    segments = (desc[COLUMNS] + SEGMENT - 1) // SEGMENT
    for i in range(rows):
        s1, s2 = 0.0, 0.0
        for at in range(2 * (row + i) * segments, 2 * (row + i + 1) * segments, 2):
            s1, s2 = s1 + load_f64(desc[ROW_SUMS], at), s2 + load_f64(desc[ROW_SUMS], at + 1)
        store_f64(scratch + FIRST_SUMS, r + i, s1)
        store_f64(scratch + SECOND_SUMS, r + i, s2)


@device
def sum_row(kind, desc, row, grad_out, x, lanes, ahead):
    """A row's sums: those of its last segment are left in lanes."""
    mean, s1, s2 = load_coded(desc[STATISTICS_CODE], desc[MEAN], row), 0.0, 0.0
    first, n = 0, desc[COLUMNS]
    while first + SEGMENT < n:
        a, b = lane_sums(kind, grad_out, x, desc[ORDERED_WEIGHT], first, first + SEGMENT, mean, ahead)
        s1, s2 = s1 + hsum(a), s2 + hsum(b)
        first += SEGMENT
    a, b = lane_sums(kind, grad_out, x, desc[ORDERED_WEIGHT], first, n, mean, ahead)
    vstore_f64(lanes, 0, a)
    vstore_f64(lanes, 16 * GROUP, b)
    return s1, s2


@in_place
def _add_lanes(lanes, sums):
    """The sums over lanes of TILE rows."""
    store_sums(sums, vload_f64(lanes, 0), vload_f64(lanes, 16), vload_f64(lanes, 32), vload_f64(lanes, 48))


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
    for i in range(0, rows, TILE):  # of rows that are not there nothing is used
        _add_lanes(lanes + 128 * i, scratch + FIRST_SUMS + 8 * (r + i))
        _add_lanes(lanes + 128 * (GROUP + i), scratch + SECOND_SUMS + 8 * (r + i))
    if desc[COLUMNS] > SEGMENT:
        for i in range(rows):
            first, second = load_f64(scratch + FIRST_SUMS, r + i), load_f64(scratch + SECOND_SUMS, r + i)
            store_f64(scratch + FIRST_SUMS, r + i, load_f64(before, i) + first)
            store_f64(scratch + SECOND_SUMS, r + i, load_f64(before, GROUP + i) + second)


@device
def prepare_rows(kind, desc, row, rows, tensors, scratch, r):
    """Parameters of rows; whether float32 is enough for all of them."""
    n, want_input = desc[COLUMNS], desc[WANT_INPUT] != 0
    load_statistics(desc[STATISTICS_CODE], desc[MEAN], desc[RSTD], row, rows, scratch, r)
    if want_input and desc[WIDE] != 0:
        read_sums(desc, row, rows, scratch, r)
    elif want_input and item_size(kind) == 4 and n == SHORT:
        sum_short_rows(desc[ORDERED_WEIGHT], rows, tensors, scratch, r)
    elif want_input:
        sum_rows(kind, desc, row, rows, tensors, scratch, r)
    if parameters_of_all(kind, scratch, r, n, want_input):
        return True
    all_fine, weight = True, desc[ORDERED_WEIGHT]
    for i in range(rows):
        d, v = tensors[0] + i * tensors[1], tensors[2] + i * tensors[3]
        all_fine = parameters_of(kind, scratch, r + i, n, d, v, weight, want_input) and all_fine
    return all_fine


@device
def rows_gradients(kind, desc, at_once, rows, first, last, tensors, scratch, sums, r, dw, db, dw_first):
    """Columns [first, last) of rows that are prepared, from the group's row r on."""
    weight, want_sums = desc[ORDERED_WEIGHT], (desc[WANT_WEIGHT] | desc[WANT_BIAS]) != 0
    wide, want_input, stream = desc[WIDE] != 0, desc[WANT_INPUT] != 0, desc[STREAM] != 0
    short = item_size(kind) == 4 and desc[COLUMNS] == SHORT and want_input
    for i in range(0, rows, at_once):
        here = rows_from(tensors, i)
        ahead_go, ahead_x = rows * tensors[1], 0  # the next rows; of x, the sums have asked for them
        if wide:
            ahead = TILE if i + TILE < rows else -i
            stretch = 0 if i + TILE < rows else STRETCH * item_size(kind)
            ahead_go, ahead_x = ahead * tensors[1] + stretch, ahead * tensors[3] + stretch
        if short and at_once == TILE and i + TILE <= rows:
            short_tile_gradients(weight, here, scratch, sums, r + i, stream, rows)
        elif load_f64(scratch + FINE, r + i) != 0:
            count = min(at_once, rows - i)
            tile_gradients(
                kind,
                count,
                first,
                last,
                here,
                weight,
                scratch,
                sums,
                r + i,
                want_input,
                stream,
                ahead_go,
                ahead_x,
            )
        else:
            d, _, v, _, o, _ = here
            exact_row(kind, first, last, d, v, o, weight, scratch, r + i, dw, db, dw_first, want_input, want_sums)


@device
def run_group(kind, desc, row, rows, first, last, tensors, scratch, dw, db, dw_first):
    """Columns [first, last) of up to GROUP rows. TOGETHER of them stay in a cache between their sums and their
    gradients; where that is not all of them, the sums of whole rows are kept meanwhile.
    """
    together, exact = desc[TOGETHER], desc[EXACT_SUMS] != 0
    want_sums, pad = (desc[WANT_WEIGHT] | desc[WANT_BIAS]) != 0, desc[ORDERED_WEIGHT] + (desc[COLUMNS] + 31) // 32 * 128
    vstore_f64(scratch + FINE, 0, splat_f64(1.0))
    for r in range(0, rows, together):
        here, count, at_once = rows_from(tensors, r), min(together, rows - r), TILE
        if not prepare_rows(kind, desc, row + r, count, here, scratch, r):
            at_once, exact = 1, True  # by rows, some of which need float64
        for j in range(first, last, STRETCH):
            end, sums = min(last, j + STRETCH), scratch + SUMS + (8 * (j - first) if together < GROUP else 0)
            rows_gradients(kind, desc, at_once, count, j, end, here, scratch, sums, r, dw, db, dw_first)
            if want_sums and r + together >= rows:
                add_sums(kind, exact, j, end, tensors, scratch, sums, rows, pad, dw, db, dw_first)
