"""LayerNorm backward: `layer_norm_backward(desc, kind)`, called by any number of threads with the same desc."""

from normgrad.cpu.copies import load_coded
from normgrad.cpu.jit import device, in_place, kernel
from normgrad.cpu.kinds import F32
from normgrad.cpu.layer_norm_backward_fields import (
    BLOCK_ROWS,
    BLOCKS,
    COLUMNS,
    DONE,
    DONE_SEGMENT,
    EXACT_SUMS,
    GRAD_INPUT,
    GRAD_OUT,
    INPUT,
    MEAN,
    NEXT,
    NEXT_SEGMENT,
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
    WANT_BIAS,
    WANT_INPUT,
    WANT_WEIGHT,
    WIDE,
)
from normgrad.cpu.layer_norm_tiles import EXACT, PARAMETERS, exact_row, row_parameters, tile_gradients
from normgrad.cpu.layer_norm_vectors import combine_partials, order_weight
from normgrad.cpu.memory import (
    fetch_add,
    item_size,
    load,
    load_f64,
    load_i64,
    stack_space,
    start_of,
    store_f64,
    take,
    wait_until,
)
from normgrad.cpu.row_sizes import COLUMN_CHUNK, SEGMENT, STAGED_ROWS, TILE
from normgrad.cpu.rows import gather_rows, lane_sums, row_offset, scatter_rows, segment_sums
from normgrad.cpu.vectors import hsum, splat_f64, vload_f64, vstore_f64

_lanes, _sums = stack_space(TILE * 2 * 16 * 8), stack_space(TILE * 2 * 8)


@device
def read_sums(desc, row, segments):
    """A row's sums, whose segments a first phase made."""
    s1, s2 = 0.0, 0.0
    for at in range(2 * row * segments, 2 * (row + 1) * segments, 2):
        s1, s2 = s1 + load_f64(desc[ROW_SUMS], at), s2 + load_f64(desc[ROW_SUMS], at + 1)
    return s1, s2


@device
def sum_row(kind, desc, row, segments, grad_out, x, lanes):
    """A row's sums: those of its last segment are left in lanes."""
    mean, s1, s2 = load_coded(desc[STATISTICS_CODE], desc[MEAN], row), 0.0, 0.0
    for segment in range(segments):
        first, last = segment * SEGMENT, min(desc[COLUMNS], (segment + 1) * SEGMENT)
        a, b = lane_sums(kind, grad_out, x, desc[ORDERED_WEIGHT], first, last, mean)
        if last < desc[COLUMNS]:
            s1, s2 = s1 + hsum(a), s2 + hsum(b)
        else:
            vstore_f64(lanes, 0, a)
            vstore_f64(lanes, 16, b)
    return s1, s2


@device
def sum_rows(kind, parameters, desc, row, rows, grad_out, go_pitch, x, x_pitch):
    """Row sums of a tile into its parameters; whether float32 is enough."""
    n, weight, want_input, wide = desc[COLUMNS], desc[ORDERED_WEIGHT], desc[WANT_INPUT] != 0, desc[WIDE] != 0
    lanes, sums, all_fine = _lanes(), _sums(), True
    segments = (n + SEGMENT - 1) // SEGMENT
    for r in range(rows):  # all rows first: the sum over a row's lanes would wait for its columns
        s1, s2 = 0.0, 0.0
        if want_input and wide:
            s1, s2 = read_sums(desc, row + r, segments)
        elif want_input:
            s1, s2 = sum_row(kind, desc, row + r, segments, grad_out + r * go_pitch, x + r * x_pitch, lanes + 256 * r)
        store_f64(sums, 2 * r, s1)
        store_f64(sums, 2 * r + 1, s2)
    for r in range(rows):
        mean = load_coded(desc[STATISTICS_CODE], desc[MEAN], row + r)
        rstd = load_coded(desc[STATISTICS_CODE], desc[RSTD], row + r)
        d, v = grad_out + r * go_pitch, x + r * x_pitch
        s1, s2 = load_f64(sums, 2 * r), load_f64(sums, 2 * r + 1)
        if want_input and not wide:
            s1, s2 = s1 + hsum(vload_f64(lanes, 32 * r)), s2 + hsum(vload_f64(lanes, 32 * r + 16))
        all_fine = row_parameters(kind, parameters, r, n, s1, s2, d, v, weight, mean, rstd, want_input) and all_fine
    return all_fine


@in_place
def run_tile(
    kind,
    desc,
    row,
    rows,
    first,
    last,
    grad_out,
    go_pitch,
    x,
    x_pitch,
    grad_input,
    gi_pitch,
    parameters,
    dw,
    db,
    dw_first,
    stream,
):
    weight, n = desc[ORDERED_WEIGHT], desc[COLUMNS]
    pad = weight + ((n + 31) // 32) * 128
    want_input, want_sums = desc[WANT_INPUT] != 0, (desc[WANT_WEIGHT] | desc[WANT_BIAS]) != 0
    # A tile with a row that needs float64 goes row by row: rows at a time is then 1.
    at_once = rows if sum_rows(kind, parameters, desc, row, rows, grad_out, go_pitch, x, x_pitch) else 1
    for r in range(0, rows, at_once):
        d, v, o = grad_out + r * go_pitch, x + r * x_pitch, grad_input + r * gi_pitch
        if load_i64(parameters + 256, r):
            tile_gradients(
                kind,
                at_once,
                first,
                last,
                d,
                go_pitch,
                v,
                x_pitch,
                o,
                gi_pitch,
                weight,
                pad,
                parameters + 4 * r * PARAMETERS,
                dw,
                db,
                dw_first,
                want_input,
                want_sums,
                desc[EXACT_SUMS] != 0,
                stream,
                0 if desc[WIDE] else TILE,
            )
        else:
            exact_row(
                kind,
                first,
                last,
                n,
                d,
                v,
                o,
                weight,
                load(F32, parameters, r * PARAMETERS),
                load(F32, parameters, r * PARAMETERS + 1),
                parameters + EXACT + 16 * r,
                dw,
                db,
                dw_first,
                want_input,
                want_sums,
            )


@device
def uniform_rows(desc, row, most):
    """How many rows from `row` on are equally spaced in all three tensors."""
    inner = desc[OUTER_SHAPE + 2]
    return min(most, inner - (row if row < inner else row % inner))


@device
def tensor_row(desc, tensor, row):
    return desc[tensor] + row_offset(desc, OUTER_SHAPE, tensor + 2, row)


@in_place
def run_rows(kind, desc, first_row, last_row, first, last, parameters, dw, db, dw_first):
    """Columns [first, last) of some rows: where they are, or through contiguous copies (other column strides,
    a gradient that overwrites its input)."""
    n, size, staged = desc[COLUMNS], item_size(kind), desc[STAGED] != 0
    pitch = (n * size + 63) // 64 * 64
    copies = parameters + 4096
    row = first_row
    while row < last_row:
        rows = uniform_rows(desc, row, min(STAGED_ROWS if staged else TILE, last_row - row))
        d, x, o = tensor_row(desc, GRAD_OUT, row), tensor_row(desc, INPUT, row), tensor_row(desc, GRAD_INPUT, row)
        dp, xp, op = desc[GRAD_OUT + 4], desc[INPUT + 4], desc[GRAD_INPUT + 4]
        if staged:
            gather_rows(kind, d, dp // size, desc[GRAD_OUT + 1], copies, pitch, rows, n)
            gather_rows(kind, x, xp // size, desc[INPUT + 1], copies + STAGED_ROWS * pitch, pitch, rows, n)
            d, x, o = copies, copies + STAGED_ROWS * pitch, copies + 2 * STAGED_ROWS * pitch
            dp, xp, op = pitch, pitch, pitch
        for r in range(0, rows, TILE):
            run_tile(
                kind,
                desc,
                row + r,
                min(TILE, rows - r),
                first,
                last,
                d + r * dp,
                dp,
                x + r * xp,
                xp,
                o + r * op,
                op,
                parameters,
                dw,
                db,
                dw_first,
                desc[STREAM] != 0,
            )
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
        )
        store_f64(desc[ROW_SUMS], 2 * i, s1)
        store_f64(desc[ROW_SUMS], 2 * i + 1, s2)
        fetch_add(p, DONE_SEGMENT, 1)
    wait_until(p, DONE_SEGMENT, items)


@in_place
def run_items(kind, desc, p, slot, parameters):
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
        run_rows(kind, desc, first_row, last_row, first, last, parameters, dw, db, first)
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
    parameters = desc[SCRATCH] + slot * desc[SCRATCH_SIZE]
    order_weight(kind, desc, p)
    sum_segments(kind, desc, p)
    run_items(kind, desc, p, slot, parameters)
    combine_partials(kind, desc, p)
