"""LayerNorm backward: `layer_norm_backward(desc, kind)`, called by any number of threads with the same desc."""

from normgrad.cpu.copies import load_coded
from normgrad.cpu.jit import device, in_place, kernel
from normgrad.cpu.layer_norm_backward_fields import (
    BLOCK_ROWS,
    BLOCKS,
    COLUMNS,
    DONE,
    DONE_SEGMENT,
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
    SUMS_SIZE,
    WANT_BIAS,
    WANT_INPUT,
    WANT_WEIGHT,
    WIDE,
)
from normgrad.cpu.layer_norm_groups import run_group
from normgrad.cpu.layer_norm_vectors import combine_partials, order_weight
from normgrad.cpu.memory import (
    fetch_add,
    item_size,
    start_of,
    store_f64,
    take,
    wait_until,
)
from normgrad.cpu.row_sizes import COLUMN_CHUNK, GROUP, SEGMENT, STAGED_ROWS, SUMS
from normgrad.cpu.rows import gather_rows, row_offset, scatter_rows, segment_sums
from normgrad.cpu.vectors import splat_f64, vstore_f64


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
