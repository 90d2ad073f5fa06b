"""Tables of per-channel coefficients in float32, and small outputs."""

from normgrad.cpu.channel_fields import APART
from normgrad.cpu.copies import store_exact
from normgrad.cpu.jit import device, in_place
from normgrad.cpu.kinds import F32
from normgrad.cpu.memory import load
from normgrad.cpu.rows import lane_of_column
from normgrad.cpu.vectors import splat_f32, vload


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


@in_place
def splat_entry(table, pitch, plane, c):
    """A channel's coefficient in all lanes."""
    return splat_f32(load(F32, table, plane * pitch + c))


@in_place
def coefficients(table, pitch, c):
    """A channel's six coefficients, each in all lanes."""
    return (
        splat_entry(table, pitch, 0, c),
        splat_entry(table, pitch, 1, c),
        splat_entry(table, pitch, 2, c),
        splat_entry(table, pitch, 3, c),
        splat_entry(table, pitch, 4, c),
        splat_entry(table, pitch, 5, c),
    )


@in_place
def lane_coefficients(table, pitch, lane):
    """The six coefficients of 16 channels."""
    return (
        vload(F32, table, lane),
        vload(F32, table, pitch + lane),
        vload(F32, table, 2 * pitch + lane),
        vload(F32, table, 3 * pitch + lane),
        vload(F32, table, 4 * pitch + lane),
        vload(F32, table, 5 * pitch + lane),
    )


@device
def put_vector(desc, output, index, value):
    """Store an element of a small output, where it is wanted."""
    if desc[output] != 0:
        store_exact(desc[output + 2], desc[output], index * desc[output + 1], value)
