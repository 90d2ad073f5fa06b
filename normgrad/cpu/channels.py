"""Data as samples × channels × places: the descriptor that GroupNorm's and BatchNorm's kernels share.

Work comes in chunks, whose size depends on the shape alone. In *rows* (places are neighbours in memory) a chunk is a
part of one channel of one sample, or several whole channels where they are short; in *columns* (channels are
neighbours) some places of one sample, all channels. The sums of every chunk go to the workspace and are added up in a
fixed order, so the bits do not depend on who made them.
"""

import numpy as np
from numba.core import types
from numba.extending import overload

from normgrad.cpu.copies import load_coded
from normgrad.cpu.jit import device
from normgrad.cpu.memory import fetch_add, load_i32, wait_until

# Counters of the phases: taken, done.
FIRST, SECOND, THIRD, FOURTH = 0, 2, 4, 6
SLOT, SLOTS = 8, 9
SAMPLES, CHANNELS, PLACES, GROUPS = 10, 11, 12, 13
CHUNK, CHUNKS = 14, 15  # places of a chunk, chunks along the places
UNITS, UNIT_CHUNKS = 16, 17  # what shares statistics: a sample's group (rows) or a sample (columns)
GRAIN = 18  # chunks that are taken at a time where no unit is kept together
APART = 19  # units too large or too few to be kept together: sums of all, then results of all
STAT_SAMPLE, STAT_CHANNEL = 20, 21  # statistics of (n, c) are at n·STAT_SAMPLE + c // STAT_CHANNEL
PITCH = 22  # channels in the workspace, rounded up
GRAD_OUT, INPUT, RESULT = 23, 28, 33  # each: address, strides of samples, channels, places (elements), dtype code
MEAN, RSTD, WEIGHT, BIAS = 38, 41, 44, 47  # each: address (0: absent), stride, dtype code
SUM_DY, SUM_DY_XMU, COUNTER, COUNTS = 50, 53, 56, 59
OUT_0, OUT_1, OUT_2, OUT_3 = 60, 63, 66, 69  # small outputs, as the vectors
PARTIALS = 72  # float64 [samples, chunks, 2, PITCH]
RECORDS = 73  # float64 [statistics, 2]
TABLES = 74  # float32 [.., PLANES, PITCH]
EPS, BATCH = 75, 76
SCALE_BY_RSTD = 77
STREAM = 78  # results go past the caches
CHANNELS_AT_ONCE = 79  # whole channels in a chunk of short rows
DESC_SIZE = 80

# A table's planes: what a channel's fast arithmetic needs, and whether it will do.
PLANES = 5
_MEAN, _SLOPE, _FACTOR, _OFFSET, _FINE = range(PLANES)


@device
def vector_value(desc, vector, index):
    """An element of a small vector, in float64."""
    if desc[vector + 2] == 3:
        return np.float64(load_i32(desc[vector], index * desc[vector + 1]))
    return np.float64(load_coded(desc[vector + 2], desc[vector], index * desc[vector + 1]))


@device
def vector_or(desc, vector, index, absent):
    return vector_value(desc, vector, index) if desc[vector] != 0 else absent


@device
def quotient(a, b):
    """a // b of numbers that are not negative; divisions would be a good part of the work on short rows."""
    if b == 1:
        return a
    return 0 if a < b else a // b


@device
def statistic_of(desc, n, c):
    return n * desc[STAT_SAMPLE] + quotient(c, desc[STAT_CHANNEL])


@device
def address_of(desc, tensor, size, n, c, place):
    return desc[tensor] + size * (n * desc[tensor + 1] + c * desc[tensor + 2] + place * desc[tensor + 3])


@device
def partial_index(desc, n, chunk):
    """Where the first sums of a chunk begin; the second are PITCH further."""
    return (n * desc[CHUNKS] + chunk) * 2 * desc[PITCH]


@device
def places_of(desc, chunk):
    return min(desc[CHUNK], desc[PLACES] - chunk * desc[CHUNK])


@device
def blocks_of(desc, channels):
    """How many times the channels of a chunk go into so many."""
    return (channels + desc[CHANNELS_AT_ONCE] - 1) // desc[CHANNELS_AT_ONCE]


@device
def finish_phase(p, phase, mine, total):
    """Say how much of a phase this thread has done, and wait for the others."""
    fetch_add(p, phase + 1, mine)
    wait_until(p, phase + 1, total)


@device
def usable(value):
    """Whether float32 holds a value with all its digits."""
    return value == 0.0 or 2.0**-126 <= abs(value) <= 2.0**127


# How data lies and which way a pass goes, as types: a kernel compiles for those it is called with.
ROWS, COLUMNS, MIXED = np.uint8(0), np.int8(0), np.int64(0)  # mixed: any strides and dtypes
BACKWARD, FORWARD = np.uint32(0), np.uint64(0)


_LAYOUTS = {types.uint8: "rows", types.int8: "columns", types.int64: "mixed"}
_DIRECTIONS = {types.uint32: "backward", types.uint64: "forward"}


def choose(stub, **functions):
    """Let a function that kernels call with (kind, layout, direction, …) be another for each, `layout_direction`."""

    def chosen(kind, layout, direction, *others):
        return functions[f"{_LAYOUTS[layout]}_{_DIRECTIONS[direction]}"]

    overload(stub, jit_options={"nogil": True, "error_model": "numpy"}, strict=False)(chosen)
