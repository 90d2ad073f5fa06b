"""From sums to what the results are made of: records in float64, tables in float32 for the fast arithmetic."""

import numpy as np

from normgrad.cpu.channel_fields import APART, CHANNELS, PITCH
from normgrad.cpu.channels import usable
from normgrad.cpu.copies import store_exact
from normgrad.cpu.jit import device
from normgrad.cpu.kinds import F32
from normgrad.cpu.memory import store
from normgrad.cpu.rows import lane_of_column

# Values about this size and larger: whatever a term loses as a subnormal number does not show.
VISIBLE = 2.0**-100


@device
def lane_of(kind, columns, c):
    """Where a channel is in partials and tables."""
    return lane_of_column(kind, c) if columns else c


@device
def whole_vectors(columns, first, last):
    """Up to which channel from the first on vectors hold no channel of another group."""
    if columns:
        return last if (first | last) % 32 == 0 else first
    return last - (last - first) % 16


@device
def filled_vectors(columns, desc, first, last):
    """As whole_vectors, of a table: a unit's own has room for a vector that goes beyond the group."""
    return whole_vectors(columns, first, last) if columns or desc[APART] else last


@device
def fill_entry(table, pitch, lane, first, second, third, fourth, fine):
    store(F32, table, lane, np.float32(first))
    store(F32, table, pitch + lane, np.float32(second))
    store(F32, table, 2 * pitch + lane, np.float32(third))
    store(F32, table, 3 * pitch + lane, np.float32(fourth))
    store(F32, table, 4 * pitch + lane, np.float32(fine))


@device
def mark_all(kind, desc, table, fine):
    """In columns one flag speaks for all channels, which share vectors; lanes without a channel are to give zeros."""
    pitch = desc[PITCH]
    for c in range(desc[CHANNELS], pitch):
        fill_entry(table, pitch, lane_of_column(kind, c), 0.0, 0.0, 0.0, 0.0, True)
    store(F32, table, 4 * pitch, np.float32(fine))


@device
def fine_gradient(mean, slope, offset):
    """Whether float32 will do for slope·(x − mean) + offset."""
    fine = usable(slope) and usable(offset) and abs(mean) <= 2.0**126
    return fine and (slope == 0.0 or abs(offset) >= VISIBLE)


@device
def put_vector(desc, output, index, value):
    """Store an element of a small output, where it is wanted."""
    if desc[output] != 0:
        store_exact(desc[output + 2], desc[output], index * desc[output + 1], value)
