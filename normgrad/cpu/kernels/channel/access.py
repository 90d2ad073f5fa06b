"""The chunks of a descriptor `Channel`: what is in one, where it is, and which function processes it."""

from collections import namedtuple

from llvmlite import ir
from numba.core.types import boolean
from numba.extending import overload

from normgrad.cpu.compile.jit import device
from normgrad.cpu.intrinsics.llvm import TAG, emitted
from normgrad.cpu.tags import COLUMNS

#: Part `part` of the positions of sample n, of channels [first, last): in columns these are all channels. The chunk's
#: sums are at the address `partials`, one per channel, the second ones `padded_channels` on; the channels' coefficients
#: are in the arrays at the address `coefficients`.
Chunk = namedtuple("Chunk", "n first last part partials coefficients")


@device
def quotient(a, b):
    """Return a // b of two values that are not negative. Divisions would be a good part of the work on short rows."""
    if b == 1:
        return a
    return 0 if a < b else a // b


@device
def address_of(tensor, size, n, c, position):
    """Return the address of an element of `size` bytes."""
    return tensor.address + size * (
        n * tensor.sample_stride + c * tensor.channel_stride + position * tensor.position_stride
    )


@device
def positions_of(desc, part):
    """Return how many positions a chunk has."""
    return min(desc.chunk_positions, desc.positions - part * desc.chunk_positions)


@emitted(boolean, TAG)
def in_columns(builder, layout):
    """Return whether channels are contiguous, and so in the lane order of pairs."""
    return ir.Constant(ir.IntType(1), int(layout is COLUMNS))


@device
def chunk_of(layout, desc, n, q, number, partials, coefficients):
    """Return chunk `number` of a sample in columns, of its unit from group q on in rows.

    The sums of the sample's first part are at the address `partials`.
    """
    part, first, last = number, 0, desc.channels
    if not in_columns(layout):
        rows, unit = quotient(number, desc.chunks), q * desc.group_channels
        part, first = number - rows * desc.chunks, unit + rows * desc.chunk_channels
        last = min(first + desc.chunk_channels, unit + desc.unit_groups * desc.group_channels)
    return Chunk(n, first, last, part, partials + 16 * part * desc.padded_channels, coefficients)


_OPTIONS = {"jit_options": {"nogil": True, "error_model": "numpy", "forceinline": True}, "strict": False}


def choose(stub, **functions):
    """Let calls of a stub run one of these functions, by the tags of the call: the choice is made at compile time.

    A stub has the parameters (dtype, layout, direction, ...), and the functions the same without the two that choose. A
    call runs the function given as ``<layout>_<direction>``, such as ``rows_backward``, or else as ``<direction>``.
    """

    def chosen(dtype, layout, direction, *others):
        name = f"{layout.tag.name}_{direction.tag.name}"
        function = functions[name] if name in functions else functions[direction.tag.name]
        return lambda dtype, layout, direction, *others: function(dtype, *others)

    overload(stub, **_OPTIONS)(chosen)
