"""Reading the descriptor `Channel`, and choosing functions by tags."""

from collections import namedtuple

from llvmlite import ir
from numba.core.types import boolean
from numba.extending import overload

from normgrad.cpu.compile.jit import device
from normgrad.cpu.intrinsics.llvm import TAG, emitted
from normgrad.cpu.tags import COLUMNS

#: A chunk in rows: channels [first, last) of sample n, part `part` of their positions.
RowChunk = namedtuple("RowChunk", "n first last part")


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
def partials_of(desc, n, chunk):
    """Return the address of the first sums of a chunk, one per channel; the second ones are `padded_channels` on."""
    return desc.partials + 16 * (n * desc.chunks + chunk) * desc.padded_channels


@device
def positions_of(desc, chunk):
    """Return how many positions a chunk has."""
    return min(desc.chunk_positions, desc.positions - chunk * desc.chunk_positions)


_OPTIONS = {"jit_options": {"nogil": True, "error_model": "numpy", "forceinline": True}, "strict": False}


def choose(stub, **functions):
    """Let calls of a stub run one of these functions, by the tags of the call: the choice is made at compile time.

    A stub has the parameters (dtype, layout, direction, ...). A call of it runs the function that is given here as
    ``<layout>_<direction>``, such as ``rows_backward``, or else the one given as ``<direction>``.
    """

    def chosen(dtype, layout, direction, *others):
        name = f"{layout.tag.name}_{direction.tag.name}"
        return functions[name] if name in functions else functions[direction.tag.name]

    overload(stub, **_OPTIONS)(chosen)


@emitted(boolean, TAG)
def in_columns(builder, layout):
    """Return whether channels are contiguous, and so in the lane order of pairs."""
    return ir.Constant(ir.IntType(1), int(layout is COLUMNS))
