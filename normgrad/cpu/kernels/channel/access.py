"""The chunks of a descriptor `Channel`: what is in one, where it is, and which function processes it."""

from collections import namedtuple

from llvmlite import ir
from numba.core.types import boolean
from numba.extending import overload

from normgrad.cpu.compile.jit import device
from normgrad.cpu.intrinsics.llvm import TAG, emitted
from normgrad.cpu.tags import COLUMNS

#: Part `part` of the positions of sample n, of channels [first, last): in columns these are all channels. The channels'
#: coefficients are in the arrays at the address `coefficients`.
Chunk = namedtuple("Chunk", "n first last part coefficients")


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
def partials_of(desc, n, part):
    """Return the address of the first sums of a chunk, one per channel; the second ones are `padded_channels` on.

    The samples of a block use the same memory, one after another.
    """
    return desc.partials + 16 * (quotient(n, desc.block_samples) * desc.chunks + part) * desc.padded_channels


@device
def positions_of(desc, part):
    """Return how many positions a chunk has."""
    return min(desc.chunk_positions, desc.positions - part * desc.chunk_positions)


@emitted(boolean, TAG)
def in_columns(builder, layout):
    """Return whether channels are contiguous, and so in the lane order of pairs."""
    return ir.Constant(ir.IntType(1), int(layout is COLUMNS))


@device
def chunk_of(layout, desc, n, q, number, coefficients):
    """Return chunk `number` of a sample in columns, of its unit from group q on in rows."""
    if in_columns(layout):
        return Chunk(n, 0, desc.channels, number, coefficients)
    block, unit = quotient(number, desc.chunks), q * desc.group_channels
    first = unit + block * desc.chunk_channels
    last = min(first + desc.chunk_channels, unit + desc.unit_groups * desc.group_channels)
    return Chunk(n, first, last, number - block * desc.chunks, coefficients)


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
