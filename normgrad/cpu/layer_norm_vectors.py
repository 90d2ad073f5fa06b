"""LayerNorm backward's small vectors: the weight into the order of lanes, the weight gradients out of it."""

import numpy as np

from normgrad.cpu.copies import load_coded, store_coded
from normgrad.cpu.jit import device, in_place
from normgrad.cpu.kinds import F32
from normgrad.cpu.layer_norm_backward_fields import (
    BLOCKS,
    COLUMNS,
    DONE_COLUMNS,
    DONE_WEIGHT,
    GRAD_BIAS,
    GRAD_CODE,
    GRAD_WEIGHT,
    NEXT_COLUMNS,
    NEXT_WEIGHT,
    ORDERED_WEIGHT,
    PARTIALS,
    WANT_BIAS,
    WANT_WEIGHT,
    WEIGHT,
    WEIGHT_CODE,
    WEIGHT_STRIDE,
    WIDE,
)
from normgrad.cpu.memory import fetch_add, load_f64, stack_space, store, wait_until
from normgrad.cpu.pairs import load_ordered, store_ordered
from normgrad.cpu.row_sizes import COLUMN_CHUNK
from normgrad.cpu.rows import lane_of_column
from normgrad.cpu.vectors import narrow, splat_f64, vload_f64, vstore, vstore_f64

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
