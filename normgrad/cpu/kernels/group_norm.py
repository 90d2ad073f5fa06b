"""GroupNorm's kernels, called by any number of threads with the same descriptor.

A thread takes a unit (rows: a sample's group; columns: a sample), makes its sums, and makes the results of the unit
before in turns with them: the reads of one overlap the writes of the other. Units that would not stay in a core's
cache, or too few of them, are taken apart: the sums of all chunks, then all records, then the results of all chunks.
"""

import numpy as np

from normgrad.cpu.compile.jit import device, in_place, kernel
from normgrad.cpu.fields.channel import (
    APART,
    BIAS,
    CHANNELS,
    CHANNELS_AT_ONCE,
    CHUNKS,
    EPS,
    FIRST,
    FOURTH,
    GRAIN,
    GROUPS,
    ONE_RUN,
    OUT_0,
    OUT_1,
    PARTIALS,
    PITCH,
    PLANES,
    RECORDS,
    RESULT,
    SAMPLES,
    SECOND,
    SLOT,
    SLOTS,
    SPARE,
    STAT_CHANNEL,
    TABLES,
    THIRD,
    UNIT_CHUNKS,
    UNITS,
    UNITS_AT_ONCE,
    WEIGHT,
    WEIGHTS,
    ZEROTH,
)
from normgrad.cpu.intrinsics.memory import fetch_add, load_f64, start_of, take
from normgrad.cpu.kernels.batch_norm_partials import spread
from normgrad.cpu.kernels.channel.access import choose, finish_phase, in_columns, is_first, places_of, quotient
from normgrad.cpu.kernels.channel.coefficients import put_vector
from normgrad.cpu.kernels.channel.columns import (
    add_moments,
    add_places,
    add_run,
    clear_sums,
    gradient_places,
    normalise_places,
    settle_moments,
)
from normgrad.cpu.kernels.channel.rows import gradient_rows, moments_rows, normalise_group_rows, sum_rows
from normgrad.cpu.kernels.group_norm_partials import (
    group_gradients,
    group_statistics,
    merge_chunks,
    spread_sum_coefficients,
    sum_coefficients,
    total_samples,
)
from normgrad.cpu.kernels.layer_norm.rows import lane_of_column
from normgrad.cpu.tags import BACKWARD, FORWARD

_TURN = 16  # places of a column chunk that are worked on in turn


def _begin(kind, layout, direction, desc, unit, table):
    """What the sums of a unit need in its table."""


def _work(kind, layout, direction, desc, unit, chunk, table, old_unit, old_chunk, old_table):
    """The sums of a chunk of a unit, and in turns with them the results of a chunk of another; unit -1: none."""


def _settle(kind, layout, direction, desc, unit, table):
    """A unit's records and table from its sums."""


def _conclude(kind, layout, direction, desc, p):
    """What comes of all sums: the small outputs."""


@device
def _biases(desc):
    """Where the biases are: behind the weights."""
    return desc[WEIGHTS] + 4 * (desc[PITCH] + SPARE)


@device
def _order_vectors(kind, layout, desc, p):
    """Weight and bias, in the order of lanes."""
    mine, columns = is_first(p, ZEROTH), in_columns(layout)
    if mine:
        spread(kind, columns, desc, np.int64(WEIGHT), 1.0, desc[WEIGHTS])
        spread(kind, columns, desc, np.int64(BIAS), 0.0, _biases(desc))
    finish_phase(p, ZEROTH, mine, 1)


@device
def _no_begin(kind, layout, direction, desc, unit, table):
    return


@device
def _spread(kind, layout, direction, desc, unit, table):
    spread_sum_coefficients(kind, desc, unit, table)


@device
def _rows_of(desc, unit, chunk):
    """Sample, first and last channel and part of the rows, of a chunk of a unit of rows."""
    n, block = quotient(unit, desc[GROUPS]), quotient(chunk, desc[CHUNKS])
    group = (unit - n * desc[GROUPS]) * desc[STAT_CHANNEL]
    first = group + block * desc[CHANNELS_AT_ONCE]
    return n, first, min(first + desc[CHANNELS_AT_ONCE], group + desc[STAT_CHANNEL]), chunk - block * desc[CHUNKS]


@device
def _rows_backward(kind, layout, direction, desc, unit, chunk, table, old_unit, old_chunk, old_table):
    if unit >= 0:
        n, first, last, part = _rows_of(desc, unit, chunk)
        scale, shift = sum_coefficients(desc, n, quotient(first, desc[STAT_CHANNEL]))
        sum_rows(kind, desc, n, first, last, part, scale, shift, 0)
    if old_unit >= 0:
        n, first, last, part = _rows_of(desc, old_unit, old_chunk)
        gradient_rows(kind, desc, n, first, last, part, old_table)


@device
def _rows_forward(kind, layout, direction, desc, unit, chunk, table, old_unit, old_chunk, old_table):
    if unit >= 0:
        n, first, last, part = _rows_of(desc, unit, chunk)
        moments_rows(kind, desc, n, first, last, part)
    if old_unit >= 0:
        n, first, last, part = _rows_of(desc, old_unit, old_chunk)
        normalise_group_rows(kind, desc, n, first, last, part, old_table, desc[WEIGHTS], _biases(desc))


@device
def _columns_backward(kind, layout, direction, desc, unit, chunk, table, old_unit, old_chunk, old_table):
    places = places_of(desc, chunk) if unit >= 0 else 0
    old_places = places_of(desc, old_chunk) if old_unit >= 0 else 0
    if unit >= 0:
        clear_sums(desc, unit, chunk)
    for first in range(0, max(places, old_places), _TURN):
        if first < places:
            add_places(kind, desc, unit, chunk, first, min(first + _TURN, places), table)
        if first < old_places:
            gradient_places(kind, desc, old_unit, old_chunk, first, min(first + _TURN, old_places), old_table)


@device
def _columns_forward(kind, layout, direction, desc, unit, chunk, table, old_unit, old_chunk, old_table):
    places = places_of(desc, chunk) if unit >= 0 else 0
    old_places = places_of(desc, old_chunk) if old_unit >= 0 else 0
    if unit >= 0 and desc[ONE_RUN]:
        add_run(kind, desc, unit, chunk)
        places = 0
    elif unit >= 0:
        clear_sums(desc, unit, chunk)
    for first in range(0, max(places, old_places), _TURN):
        if first < places:
            add_moments(kind, desc, unit, chunk, first, min(first + _TURN, places))
        if first < old_places:
            normalise_places(kind, desc, old_unit, old_chunk, first, min(first + _TURN, old_places), old_table)
    if places > 0:
        settle_moments(kind, desc, unit, chunk)


@device
def _settle_rows_backward(kind, layout, direction, desc, unit, table):
    group_gradients(kind, False, desc, unit // desc[GROUPS], unit % desc[GROUPS], table, desc[WEIGHTS])


@device
def _settle_rows_forward(kind, layout, direction, desc, unit, table):
    eps = load_f64(start_of(desc), EPS)
    n, q = unit // desc[GROUPS], unit % desc[GROUPS]
    group_statistics(kind, False, desc, n, q, table, eps, desc[WEIGHTS], _biases(desc))


@device
def _settle_columns_backward(kind, layout, direction, desc, unit, table):
    for q in range(desc[GROUPS]):
        group_gradients(kind, True, desc, unit, q, table, desc[WEIGHTS])


@device
def _settle_columns_forward(kind, layout, direction, desc, unit, table):
    eps, biases = load_f64(start_of(desc), EPS), _biases(desc)
    if not desc[ONE_RUN]:
        merge_chunks(desc, unit)
    for q in range(desc[GROUPS]):
        group_statistics(kind, True, desc, unit, q, table, eps, desc[WEIGHTS], biases)


@device
def _put_gradients(desc, p, kind, columns):
    """grad_weight and grad_bias, 32 channels at a time."""
    blocks = desc[PITCH] // 32 if desc[OUT_0] != 0 or desc[OUT_1] != 0 else 0
    mine = 0
    while True:
        block = fetch_add(p, FOURTH, 1)
        if block >= blocks:
            break
        total_samples(desc, block)
        for c in range(32 * block, min(desc[CHANNELS], 32 * (block + 1))):
            lane = lane_of_column(kind, c) if columns else c
            put_vector(desc, OUT_0, c, load_f64(desc[PARTIALS], desc[PITCH] + lane))
            put_vector(desc, OUT_1, c, load_f64(desc[PARTIALS], lane))
        mine += 1
    finish_phase(p, FOURTH, mine, blocks)


@device
def _conclude_rows_backward(kind, layout, direction, desc, p):
    _put_gradients(desc, p, kind, False)


@device
def _conclude_columns_backward(kind, layout, direction, desc, p):
    _put_gradients(desc, p, kind, True)


@device
def _conclude_forward(kind, layout, direction, desc, p):
    """mean and rstd: once all input is read, since they may lie on it."""
    mine = is_first(p, FOURTH)
    if mine:
        for statistic in range(desc[SAMPLES] * desc[GROUPS]):
            put_vector(desc, OUT_0, statistic, load_f64(desc[RECORDS], 2 * statistic))
            put_vector(desc, OUT_1, statistic, load_f64(desc[RECORDS], 2 * statistic + 1))
    finish_phase(p, FOURTH, mine, 1)


choose(
    _begin,
    rows_backward=_no_begin.py_func,
    rows_forward=_no_begin.py_func,
    columns_backward=_spread.py_func,
    columns_forward=_no_begin.py_func,
)
choose(
    _work,
    rows_backward=_rows_backward.py_func,
    rows_forward=_rows_forward.py_func,
    columns_backward=_columns_backward.py_func,
    columns_forward=_columns_forward.py_func,
)
choose(
    _settle,
    rows_backward=_settle_rows_backward.py_func,
    rows_forward=_settle_rows_forward.py_func,
    columns_backward=_settle_columns_backward.py_func,
    columns_forward=_settle_columns_forward.py_func,
)
choose(
    _conclude,
    rows_backward=_conclude_rows_backward.py_func,
    rows_forward=_conclude_forward.py_func,
    columns_backward=_conclude_columns_backward.py_func,
    columns_forward=_conclude_forward.py_func,
)


@device
def _table(desc, number):
    return desc[TABLES] + 4 * (PLANES * desc[PITCH] + SPARE) * number


@in_place
def _unit_by_unit(kind, layout, direction, desc, p, slot):
    old, turn, mine, total = -1, 0, 0, desc[UNITS]
    following, last, at_once = 0, 0, desc[UNITS_AT_ONCE]
    while True:
        if following >= last:
            following = at_once * take(p, FIRST, (total + at_once - 1) // at_once, slot)
            last = min(following + at_once, total)
        unit, following = following if following < total else -1, following + 1
        if unit < 0 and old < 0:
            break
        table, old_table = _table(desc, 2 * slot + turn), _table(desc, 2 * slot + 1 - turn)
        if unit >= 0:
            _begin(kind, layout, direction, desc, unit, table)
        for chunk in range(desc[UNIT_CHUNKS]):
            _work(kind, layout, direction, desc, unit, chunk, table, old, chunk, old_table)
        if unit >= 0:
            _settle(kind, layout, direction, desc, unit, table)
            mine += 1
        old, turn = unit if desc[RESULT] != 0 else -1, 1 - turn
    finish_phase(p, FIRST, mine, total)


@in_place
def _phase_by_phase(kind, layout, direction, desc, p, slot):
    chunks, grain, total = desc[UNIT_CHUNKS], desc[GRAIN], desc[UNITS] * desc[UNIT_CHUNKS]
    items, table, unit = (total + grain - 1) // grain, _table(desc, desc[SAMPLES] + slot), -1
    mine = 0
    while True:
        item = take(p, FIRST, items, slot)
        if item >= items:
            break
        for i in range(item * grain, min(total, (item + 1) * grain)):
            if i // chunks != unit:
                unit = i // chunks
                _begin(kind, layout, direction, desc, unit, table)
            _work(kind, layout, direction, desc, unit, i % chunks, table, -1, 0, table)
        mine += 1
    finish_phase(p, FIRST, mine, items)
    units, per_sample = desc[UNITS], desc[UNITS] // desc[SAMPLES]
    mine = 0
    while True:
        unit = fetch_add(p, SECOND, 1)
        if unit >= units:
            break
        _settle(kind, layout, direction, desc, unit, _table(desc, unit // per_sample))
        mine += 1
    finish_phase(p, SECOND, mine, units)
    items = items if desc[RESULT] != 0 else 0
    mine = 0
    while True:
        item = take(p, THIRD, items, slot)
        if item >= items:
            break
        for i in range(item * grain, min(total, (item + 1) * grain)):
            unit = i // chunks
            old_table = _table(desc, unit // per_sample)
            _work(kind, layout, direction, desc, -1, 0, table, unit, i % chunks, old_table)
        mine += 1
    finish_phase(p, THIRD, mine, items)


@in_place
def _run(kind, layout, direction, desc):
    p = start_of(desc)
    slot = fetch_add(p, SLOT, 1)
    if slot >= desc[SLOTS]:
        return
    _order_vectors(kind, layout, desc, p)
    if desc[APART]:
        _phase_by_phase(kind, layout, direction, desc, p, slot)
    else:
        _unit_by_unit(kind, layout, direction, desc, p, slot)
    _conclude(kind, layout, direction, desc, p)


@kernel
def group_norm_backward(desc, kind, layout):
    _run(kind, layout, BACKWARD, desc)


@kernel
def group_norm(desc, kind, layout):
    _run(kind, layout, FORWARD, desc)
