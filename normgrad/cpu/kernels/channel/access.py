"""What GroupNorm's and BatchNorm's kernels share: reading their descriptor, taking chunks, waiting for each other."""

import numpy as np
from numba.core import types
from numba.extending import overload

from normgrad.cpu.compile.jit import device
from normgrad.cpu.fields.channel import CHANNELS_AT_ONCE, CHUNK, CHUNKS, PITCH, PLACES, STAT_CHANNEL, STAT_SAMPLE
from normgrad.cpu.intrinsics.memory import fetch_add, load_i32, wait_until
from normgrad.cpu.kernels.copy import load_coded


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
def is_first(p, phase):
    """Whether this thread is the one that does what is done once; all others find it done after `finish_phase`.

    Whoever comes late, when the workspace may be another call's, writes nothing: so no thread prepares for itself.
    """
    return fetch_add(p, phase, 1) == 0


# The types of the tags that say how data lies and which way a pass goes.
_LAYOUTS = {types.uint8: "rows", types.int8: "columns", types.int64: "mixed"}
_DIRECTIONS = {
    types.uint32: "backward",
    types.uint64: "forward",
    types.int32: "backward_sums",
    types.int64: "forward_sums",
}
_OPTIONS = {"jit_options": {"nogil": True, "error_model": "numpy"}, "strict": False}


def choose(stub, **functions):
    """Let a function that kernels call with (kind, layout, direction, …) be another for each, `layout_direction`."""

    def chosen(kind, layout, direction, *others):
        return functions[f"{_LAYOUTS[layout]}_{_DIRECTIONS[direction]}"]

    overload(stub, **_OPTIONS)(chosen)


def in_columns(layout):
    """Whether channels are in the lane order of pairs."""


def _yes(layout):
    return True


def _no(layout):
    return False


@overload(in_columns, **_OPTIONS)
def _in_columns(layout):
    return _yes if _LAYOUTS[layout] == "columns" else _no
