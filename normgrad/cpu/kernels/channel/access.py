"""Reading the descriptor `Channel`, and choosing functions by tags."""

from collections import namedtuple

from numba.extending import overload

from normgrad.cpu.compile.jit import device, inline
from normgrad.cpu.tags import COLUMNS

#: A chunk in rows: channels [first, last) of sample n, part `part` of their positions.
RowChunk = namedtuple("RowChunk", "n first last part")
#: Where tensors are read and written, and the bytes to the next position (in columns) or channel (in rows).
Cursor = namedtuple("Cursor", "grad_out grad_out_step input input_step result result_step")


@inline
def moved(at, steps):
    """Go so many positions or channels on."""
    return Cursor(
        at.grad_out + steps * at.grad_out_step,
        at.grad_out_step,
        at.input + steps * at.input_step,
        at.input_step,
        at.result + steps * at.result_step,
        at.result_step,
    )


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
    """Let a stub called with (dtype, layout, direction, ...) be a function per direction, or per layout_direction."""

    def chosen(dtype, layout, direction, *others):
        name = f"{layout.tag.name}_{direction.tag.name}"
        return functions[name] if name in functions else functions[direction.tag.name]

    overload(stub, **_OPTIONS)(chosen)


def in_columns(layout):
    """Return whether channels are contiguous, and so in the lane order of pairs."""


def _yes(layout):
    return True


def _no(layout):
    return False


@overload(in_columns, **_OPTIONS)
def _in_columns(layout):
    return _yes if layout.tag is COLUMNS else _no
