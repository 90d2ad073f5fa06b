"""BatchNorm's kernels, called by any number of threads with the same descriptor: one chunk after another."""

import numpy as np

from normgrad.cpu.compile.jit import device, in_place, kernel
from normgrad.cpu.fields.channel import (
    CHANNELS,
    CHANNELS_AT_ONCE,
    CHUNK,
    CHUNKS,
    EPS,
    FIRST,
    GRAIN,
    OUT_0,
    OUT_1,
    OUT_2,
    OUT_3,
    PARTIALS,
    PITCH,
    PLACES,
    RECORDS,
    SAMPLES,
    SECOND,
    SLOT,
    SLOTS,
    TABLES,
    THIRD,
)
from normgrad.cpu.intrinsics.memory import fetch_add, item_size, load_f64, start_of, store_f64, take
from normgrad.cpu.intrinsics.vectors import vload, vload_f64, vstore_f64, widen
from normgrad.cpu.kernels.batch_norm_moments import FEW, batch_moments_columns, batch_moments_rows
from normgrad.cpu.kernels.batch_norm_partials import (
    block_statistics,
    gradient_coefficients,
    output_coefficients,
    put_lanes,
    sum_coefficients,
    total_block,
)
from normgrad.cpu.kernels.channel.access import (
    blocks_of,
    choose,
    finish_phase,
    in_columns,
    is_first,
    partial_index,
    places_of,
    quotient,
)
from normgrad.cpu.kernels.channel.column_sums_f32 import add_singles
from normgrad.cpu.kernels.channel.columns import add_places, clear_sums, gradient_places, normalise_places
from normgrad.cpu.kernels.channel.mixed_dtypes import mixed_gradient, mixed_means, mixed_output, mixed_sums
from normgrad.cpu.kernels.channel.rows import gradient_rows, normalise_rows, sum_rows
from normgrad.cpu.tags import BACKWARD, BACKWARD_SUMS, F32, FORWARD, FORWARD_SUMS

_NARROW = 64  # channels of float32 of which many places at once are as fast


def _work(kind, layout, direction, desc, i):
    """The sums or the results of chunk i."""


@device
def _rows_of(desc, i):
    """Sample, first and last channel and part of the rows, of chunk i of rows."""
    row, blocks = quotient(i, desc[CHUNKS]), blocks_of(desc, desc[CHANNELS])
    n = quotient(row, blocks)
    first = (row - n * blocks) * desc[CHANNELS_AT_ONCE]
    return n, first, min(first + desc[CHANNELS_AT_ONCE], desc[CHANNELS]), i - row * desc[CHUNKS]


def _rows_sum_backward(kind, layout, direction, desc, i):
    n, first, last, part = _rows_of(desc, i)
    sum_rows(kind, desc, n, first, last, part, np.float32(1), np.float32(0), desc[TABLES] + 4 * desc[PITCH])


def _rows_sum_forward(kind, layout, direction, desc, i):
    n, first, last, part = _rows_of(desc, i)
    batch_moments_rows(kind, desc, n, first, last, part)


def _columns_sum_backward(kind, layout, direction, desc, i):
    n, chunk = i // desc[CHUNKS], i % desc[CHUNKS]
    places = places_of(desc, chunk)
    # The sums are results themselves: of few terms, none are added in float32.
    run = 1 if desc[SAMPLES] * desc[PLACES] <= FEW else places
    clear_sums(desc, n, chunk)
    if item_size(kind) == 4 and desc[CHANNELS] > _NARROW and run > 1:
        add_singles(desc, n, chunk, desc[TABLES] + 4 * desc[PITCH])
    else:
        for first in range(0, places, run):
            add_places(kind, desc, n, chunk, first, first + run, desc[TABLES])


def _columns_sum_forward(kind, layout, direction, desc, i):
    batch_moments_columns(kind, desc, i // desc[CHUNKS], i % desc[CHUNKS])


def _mixed_sum_backward(kind, layout, direction, desc, i):
    n, first, last, part = _rows_of(desc, i)
    place, at = part * desc[CHUNK], partial_index(desc, n, part)
    for c in range(first, last):
        total, total_x = mixed_sums(desc, n, c, place, place + places_of(desc, part))
        store_f64(desc[PARTIALS], at + c, total)
        store_f64(desc[PARTIALS], at + c + desc[PITCH], total_x)


def _rows_result_backward(kind, layout, direction, desc, i):
    n, first, last, part = _rows_of(desc, i)
    gradient_rows(kind, desc, n, first, last, part, desc[TABLES])


def _rows_result_forward(kind, layout, direction, desc, i):
    n, first, last, part = _rows_of(desc, i)
    biases = desc[TABLES] + 12 * desc[PITCH]
    normalise_rows(kind, desc, n, first, last, part, desc[TABLES], biases + 4 * desc[PITCH], biases)


def _columns_result_backward(kind, layout, direction, desc, i):
    chunk = i % desc[CHUNKS]
    gradient_places(kind, desc, i // desc[CHUNKS], chunk, 0, places_of(desc, chunk), desc[TABLES])


def _columns_result_forward(kind, layout, direction, desc, i):
    chunk = i % desc[CHUNKS]
    normalise_places(kind, desc, i // desc[CHUNKS], chunk, 0, places_of(desc, chunk), desc[TABLES])


def _mixed_result_backward(kind, layout, direction, desc, i):
    n, first, last, part = _rows_of(desc, i)
    place = part * desc[CHUNK]
    for c in range(first, last):
        mixed_gradient(desc, n, c, place, place + places_of(desc, part))


def _mixed_result_forward(kind, layout, direction, desc, i):
    n, first, last, part = _rows_of(desc, i)
    place = part * desc[CHUNK]
    for c in range(first, last):
        mixed_output(desc, n, c, place, place + places_of(desc, part))


choose(
    _work,
    rows_backward_sums=_rows_sum_backward,
    rows_forward_sums=_rows_sum_forward,
    columns_backward_sums=_columns_sum_backward,
    columns_forward_sums=_columns_sum_forward,
    mixed_backward_sums=_mixed_sum_backward,
    rows_backward=_rows_result_backward,
    rows_forward=_rows_result_forward,
    columns_backward=_columns_result_backward,
    columns_forward=_columns_result_forward,
    mixed_backward=_mixed_result_backward,
    mixed_forward=_mixed_result_forward,
)


@in_place
def _work_on_all(kind, layout, direction, desc, p, slot):
    """The sums or the results of all chunks."""
    blocks = 1 if in_columns(layout) else blocks_of(desc, desc[CHANNELS])
    total, grain, mine = desc[SAMPLES] * desc[CHUNKS] * blocks, desc[GRAIN], 0
    items = (total + grain - 1) // grain
    while True:
        item = take(p, SECOND, items, slot)
        if item >= items:
            break
        for i in range(item * grain, min(total, (item + 1) * grain)):
            _work(kind, layout, direction, desc, i)
        mine += 1
    finish_phase(p, SECOND, mine, items)


@device
def _put_statistics(kind, columns, desc, p):
    """Mean and invstd of every channel, 32 at a time."""
    eps, blocks, mine = load_f64(p, EPS), desc[PITCH] // 32, 0
    while True:
        block = fetch_add(p, THIRD, 1)
        if block >= blocks:
            break
        block_statistics(desc, block, eps)
        put_lanes(kind, columns, desc, OUT_0, block, desc[RECORDS])
        put_lanes(kind, columns, desc, OUT_1, block, desc[RECORDS] + 8 * desc[PITCH])
        mine += 1
    finish_phase(p, THIRD, mine, blocks)


@device
def _weigh(desc, lane):
    """The gradients of 16 channels' weights, to the records."""
    sums_x, invstd = desc[PARTIALS] + 8 * desc[PITCH], desc[TABLES] + 8 * desc[PITCH]
    vstore_f64(desc[RECORDS], lane, vload_f64(sums_x, lane) * widen(vload(F32, invstd, lane)))


@device
def _put_sums(kind, columns, desc, p):
    """The four outputs. They may lie on the inputs, which are all read by now."""
    blocks, mine = desc[PITCH] // 32, 0
    while True:
        block = fetch_add(p, THIRD, 1)
        if block >= blocks:
            break
        total_block(desc, block)
        _weigh(desc, 32 * block)
        _weigh(desc, 32 * block + 16)
        put_lanes(kind, columns, desc, OUT_0, block, desc[PARTIALS])
        put_lanes(kind, columns, desc, OUT_1, block, desc[PARTIALS] + 8 * desc[PITCH])
        put_lanes(kind, columns, desc, OUT_2, block, desc[RECORDS])
        put_lanes(kind, columns, desc, OUT_3, block, desc[PARTIALS])
        mine += 1
    finish_phase(p, THIRD, mine, blocks)


def _fill(kind, layout, direction, desc):
    """The coefficients of the results, from the per-channel parameters."""


def _fill_gradients(kind, layout, direction, desc):
    gradient_coefficients(kind, in_columns(layout), desc, desc[TABLES])


def _fill_mixed_gradients(kind, layout, direction, desc):
    mixed_means(desc)


def _fill_outputs(kind, layout, direction, desc):
    output_coefficients(kind, in_columns(layout), desc, desc[TABLES])


def _fill_nothing(kind, layout, direction, desc):
    return


choose(
    _fill,
    rows_backward=_fill_gradients,
    columns_backward=_fill_gradients,
    mixed_backward=_fill_mixed_gradients,
    rows_forward=_fill_outputs,
    columns_forward=_fill_outputs,
    mixed_forward=_fill_nothing,
)


@in_place
def _make_results(kind, layout, direction, desc):
    p = start_of(desc)
    slot = fetch_add(p, SLOT, 1)
    if slot >= desc[SLOTS]:
        return
    mine = is_first(p, FIRST)
    if mine:
        _fill(kind, layout, direction, desc)
    finish_phase(p, FIRST, mine, 1)
    _work_on_all(kind, layout, direction, desc, p, slot)


@kernel
def batch_norm_stats(desc, kind, layout):
    p = start_of(desc)
    columns = in_columns(layout)
    slot = fetch_add(p, SLOT, 1)
    if slot >= desc[SLOTS]:
        return
    _work_on_all(kind, layout, FORWARD_SUMS, desc, p, slot)
    _put_statistics(kind, columns, desc, p)


@kernel
def batch_norm_reduce_backward(desc, kind, layout):
    p = start_of(desc)
    columns = in_columns(layout)
    slot = fetch_add(p, SLOT, 1)
    if slot >= desc[SLOTS]:
        return
    mine = is_first(p, FIRST)
    if mine:
        sum_coefficients(kind, columns, desc, desc[TABLES])
    finish_phase(p, FIRST, mine, 1)
    _work_on_all(kind, layout, BACKWARD_SUMS, desc, p, slot)
    _put_sums(kind, columns, desc, p)


@kernel
def batch_norm_elemt_backward(desc, kind, layout):
    _make_results(kind, layout, BACKWARD, desc)


@kernel
def batch_norm_elemt(desc, kind, layout):
    _make_results(kind, layout, FORWARD, desc)
