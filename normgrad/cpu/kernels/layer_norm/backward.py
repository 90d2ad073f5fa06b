"""LayerNorm backward: `layer_norm_backward(desc, kind)`, called by any number of threads with the same desc.

LayerNorm backward on a group of rows: their sums, then their gradients.

LayerNorm backward's small vectors: the weight into the order of lanes, the weight gradients out of it.
"""

import numpy as np

from normgrad.cpu.compile.jit import device, in_place, kernel
from normgrad.cpu.fields.layer_norm_backward import (
    BLOCK_ROWS,
    BLOCKS,
    COLUMNS,
    DONE,
    DONE_COLUMNS,
    DONE_SEGMENT,
    DONE_WEIGHT,
    EXACT_SUMS,
    GRAD_BIAS,
    GRAD_CODE,
    GRAD_INPUT,
    GRAD_OUT,
    GRAD_WEIGHT,
    INPUT,
    MEAN,
    NEXT,
    NEXT_COLUMNS,
    NEXT_SEGMENT,
    NEXT_WEIGHT,
    ORDERED_WEIGHT,
    OUTER_SHAPE,
    PARTIALS,
    ROW_SUMS,
    ROWS,
    RSTD,
    SCRATCH,
    SCRATCH_SIZE,
    SLOT,
    SLOTS,
    STAGED,
    STATISTICS_CODE,
    STREAM,
    SUMS_SIZE,
    TOGETHER,
    WANT_BIAS,
    WANT_INPUT,
    WANT_WEIGHT,
    WEIGHT,
    WEIGHT_CODE,
    WEIGHT_STRIDE,
    WIDE,
)
from normgrad.cpu.fields.row_sizes import (
    COLUMN_CHUNK,
    GROUP,
    MEANS,
    MEANS_G,
    MEANS_GX,
    RSTDS,
    SEGMENT,
    STAGED_ROWS,
    STRETCH,
    SUMS,
    SUMS_G,
    SUMS_GX,
    TILE,
)
from normgrad.cpu.intrinsics.memory import (
    fetch_add,
    item_size,
    load_f64,
    stack_space,
    start_of,
    store,
    store_f64,
    take,
    wait_until,
)
from normgrad.cpu.intrinsics.pairs import load_ordered, store_ordered
from normgrad.cpu.intrinsics.vectors import hsum, narrow, splat_f64, store_sums, vload, vload_f64, vstore, vstore_f64
from normgrad.cpu.kernels.copy import load_coded, store_coded
from normgrad.cpu.kernels.layer_norm.backward_short_rows import SHORT, short_tile_gradients, sum_short_rows
from normgrad.cpu.kernels.layer_norm.backward_tile import add_sums, tile_gradients
from normgrad.cpu.kernels.layer_norm.rows import (
    gather_rows,
    lane_of_column,
    lane_sums,
    row_offset,
    scatter_rows,
    segment_sums,
)
from normgrad.cpu.tags import F32


@device
def uniform_rows(desc, row, most):
    """How many rows from `row` on are equally spaced in all three tensors."""
    inner = desc[OUTER_SHAPE + 2]
    return min(most, inner - (row if row < inner else row % inner))


@device
def tensor_row(desc, tensor, row):
    return desc[tensor] + row_offset(desc, OUTER_SHAPE, tensor + 2, row)


@in_place
def run_rows(kind, desc, first_row, last_row, first, last, scratch, dw, db, dw_first):
    """Columns [first, last) of some rows: where they are, or through contiguous copies (other column strides,
    a gradient that overwrites its input)."""
    n, size, staged = desc[COLUMNS], item_size(kind), desc[STAGED] != 0
    pitch = (n * size + 63) // 64 * 64
    copies = scratch + SUMS + desc[SUMS_SIZE]
    row = first_row
    while row < last_row:
        rows = uniform_rows(desc, row, min(STAGED_ROWS if staged else GROUP, last_row - row))
        d, x, o = tensor_row(desc, GRAD_OUT, row), tensor_row(desc, INPUT, row), tensor_row(desc, GRAD_INPUT, row)
        dp, xp, op = desc[GRAD_OUT + 4], desc[INPUT + 4], desc[GRAD_INPUT + 4]
        if staged:
            gather_rows(kind, d, dp // size, desc[GRAD_OUT + 1], copies, pitch, rows, n)
            gather_rows(kind, x, xp // size, desc[INPUT + 1], copies + STAGED_ROWS * pitch, pitch, rows, n)
            d, x, o = copies, copies + STAGED_ROWS * pitch, copies + 2 * STAGED_ROWS * pitch
            dp, xp, op = pitch, pitch, pitch
        for r in range(0, rows, GROUP):
            tensors = d + r * dp, dp, x + r * xp, xp, o + r * op, op
            run_group(kind, desc, row + r, min(GROUP, rows - r), first, last, tensors, scratch, dw, db, dw_first)
        if staged and desc[WANT_INPUT]:
            scatter_rows(
                kind,
                o,
                pitch,
                tensor_row(desc, GRAD_INPUT, row),
                desc[GRAD_INPUT + 4] // size,
                desc[GRAD_INPUT + 1],
                rows,
                n,
            )
        row += rows


@device
def zero_f64(address, count):
    for i in range(0, count, 16):
        vstore_f64(address, i, splat_f64(0.0))


@device
def sum_segments(kind, desc, p):
    """Phase 2 for few long rows: their sums, a segment at a time."""
    m, n = desc[ROWS], desc[COLUMNS]
    segments = (n + SEGMENT - 1) // SEGMENT
    items = m * segments if desc[WANT_INPUT] and desc[WIDE] else 0
    while True:
        i = fetch_add(p, NEXT_SEGMENT, 1)
        if i >= items:
            break
        row, segment = i // segments, i % segments
        s1, s2 = segment_sums(
            kind,
            tensor_row(desc, GRAD_OUT, row),
            tensor_row(desc, INPUT, row),
            desc[ORDERED_WEIGHT],
            segment * SEGMENT,
            min(n, (segment + 1) * SEGMENT),
            load_coded(desc[STATISTICS_CODE], desc[MEAN], row),
            load_coded(desc[STATISTICS_CODE], desc[RSTD], row),
        )
        store_f64(desc[ROW_SUMS], 2 * i, s1)
        store_f64(desc[ROW_SUMS], 2 * i + 1, s2)
        fetch_add(p, DONE_SEGMENT, 1)
    wait_until(p, DONE_SEGMENT, items)


@in_place
def run_items(kind, desc, p, slot, scratch):
    """Phase 3: blocks of rows, each with its own partial weight gradients; or, of long rows, chunks of columns."""
    m, n, wide = desc[ROWS], desc[COLUMNS], desc[WIDE] != 0
    padded = (n + 31) // 32 * 32
    want_sums = (desc[WANT_WEIGHT] | desc[WANT_BIAS]) != 0
    items = (n + COLUMN_CHUNK - 1) // COLUMN_CHUNK if wide else desc[BLOCKS]
    while True:
        i = take(p, NEXT, items, slot)
        if i >= items:
            break
        first_row, last_row, first, last = i * desc[BLOCK_ROWS], min(m, (i + 1) * desc[BLOCK_ROWS]), 0, n
        dw = desc[PARTIALS] + i * padded * 16
        if wide:
            first_row, last_row, first, last = 0, m, i * COLUMN_CHUNK, min(n, (i + 1) * COLUMN_CHUNK)
            dw = desc[PARTIALS] + first * 8
        db = dw + padded * 8
        if want_sums:
            zero_f64(dw, (last - first + 31) // 32 * 32)
            zero_f64(db, (last - first + 31) // 32 * 32)
        run_rows(kind, desc, first_row, last_row, first, last, scratch, dw, db, first)
        fetch_add(p, DONE, 1)
    wait_until(p, DONE, items)


@kernel
def layer_norm_backward(desc, kind):
    p = start_of(desc)
    slot = fetch_add(p, SLOT, 1)
    if slot >= desc[SLOTS]:
        return
    if desc[GRAD_INPUT] % 64 != 0:
        desc[STREAM] = 0
    scratch = desc[SCRATCH] + slot * desc[SCRATCH_SIZE]
    order_weight(kind, desc, p)
    sum_segments(kind, desc, p)
    run_items(kind, desc, p, slot, scratch)
    combine_partials(kind, desc, p)


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


_totals = stack_space(32 * 8)


@device
def order_columns(kind, desc, first, last):
    """Columns of the weight, from a multiple of 32 to another."""
    n, weight, ordered, j = desc[COLUMNS], desc[WEIGHT], desc[ORDERED_WEIGHT], first
    if weight and desc[WEIGHT_CODE] == 0 and desc[WEIGHT_STRIDE] == 1:
        while j + 32 <= min(n, last):
            w = load_ordered(kind, weight, j)
            vstore(F32, ordered, j, w[0])
            vstore(F32, ordered, j + 16, w[1])
            j += 32
    for k in range(j, last):
        value = np.float32(0)
        if k < n:
            value = load_coded(desc[WEIGHT_CODE], weight, k * desc[WEIGHT_STRIDE]) if weight else np.float32(1)
        store(F32, ordered, lane_of_column(kind, k), value)


@device
def order_weight(kind, desc, p):
    """Phase 1: the weight as float32 in lane order, padded with zeros."""
    n = desc[COLUMNS]
    padded = (n + 31) // 32 * 32
    chunks = (padded + COLUMN_CHUNK - 1) // COLUMN_CHUNK
    while True:
        c = fetch_add(p, NEXT_WEIGHT, 1)
        if c >= chunks:
            break
        order_columns(kind, desc, c * COLUMN_CHUNK, min(padded, (c + 1) * COLUMN_CHUNK))
        fetch_add(p, DONE_WEIGHT, 1)
    wait_until(p, DONE_WEIGHT, chunks)


@in_place
def column_totals(partials, count, pitch, lane):
    """The blocks' partial sums of 16 lanes, added up in order; without rows there is no block."""
    total = splat_f64(0.0)
    for b in range(count):
        total = total + vload_f64(partials + b * pitch, lane)
    return total


@device
def put_columns(kind, desc, output, first, last, partials, count, pitch):
    """Add up the blocks' partial sums of up to 32 columns, in order, and write them."""
    low, high = column_totals(partials, count, pitch, first), column_totals(partials, count, pitch, first + 16)
    if last - first == 32 and desc[GRAD_CODE] == 0 and desc[output + 1] == 1:
        store_ordered(kind, desc[output], first, narrow(low), narrow(high))
        return
    totals = _totals()
    vstore_f64(totals, 0, low)
    vstore_f64(totals, 16, high)
    for j in range(first, last):
        total = np.float32(load_f64(totals, lane_of_column(kind, j - first)))
        store_coded(desc[GRAD_CODE], desc[output], j * desc[output + 1], total)


@device
def combine_columns(kind, desc, first, last, partials, count, pitch, db_offset):
    """grad_weight and grad_bias from the blocks' partial sums."""
    for k in range(2):
        output, sums = (GRAD_WEIGHT, partials) if k == 0 else (GRAD_BIAS, partials + db_offset)
        if desc[WANT_WEIGHT + k]:
            for j in range(first, last, 32):
                put_columns(kind, desc, output, j, min(j + 32, last), sums, count, pitch)


@device
def combine_partials(kind, desc, p):
    """Phase 4: add up the partials of the blocks."""
    n, wide = desc[COLUMNS], desc[WIDE] != 0
    padded = (n + 31) // 32 * 32
    chunks = (n + 255) // 256 if desc[WANT_WEIGHT] | desc[WANT_BIAS] else 0
    while True:
        c = fetch_add(p, NEXT_COLUMNS, 1)
        if c >= chunks:
            break
        combine_columns(
            kind,
            desc,
            c * 256,
            min(n, (c + 1) * 256),
            desc[PARTIALS],
            1 if wide else desc[BLOCKS],
            padded * 16,
            padded * 8,
        )
        fetch_add(p, DONE_COLUMNS, 1)
    wait_until(p, DONE_COLUMNS, chunks)
