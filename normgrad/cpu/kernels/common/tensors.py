"""The large tensors: where rows are read and written, loads of 32 elements, and stores, past the caches too."""

from collections import namedtuple

from normgrad.cpu import limits
from normgrad.cpu.compile.jit import inline
from normgrad.cpu.intrinsics.memory import item_size
from normgrad.cpu.intrinsics.pairs import (
    load_pair,
    load_pair_first,
    store_pair,
    store_pair_first,
    stream_pair,
    stream_vector,
)

#: Where rows (LayerNorm), channels (rows of GroupNorm and BatchNorm) or positions (columns) are read and written, and
#: the bytes to the next one.
Cursor = namedtuple("Cursor", "grad_out grad_out_step input input_step result result_step")


@inline
def moved(at, steps):
    """Go so many rows, channels or positions on."""
    return Cursor(
        at.grad_out + steps * at.grad_out_step,
        at.grad_out_step,
        at.input + steps * at.input_step,
        at.input_step,
        at.result + steps * at.result_step,
        at.result_step,
    )


@inline
def load_some(dtype, address, index, count):
    """Load the first `count` of 32 elements, zeros after. Where count is the constant 32, no mask is needed."""
    if count == 32:
        return load_pair(dtype, address, index)
    return load_pair_first(dtype, address, index, count)


@inline
def for_pairs(count, process, *args):
    """Call process(*args, i, some) for every 32 of `count` elements, from i on. Only of the last ones are there fewer.

    For the others `some` is a constant, so that loads and stores have no mask.
    """
    whole = count & ~31
    for i in range(0, whole, 32):
        process(*args, i, 32)
    if whole < count:
        process(*args, whole, count - whole)


@inline
def is_streamed(is_large, address, row_bytes):
    """Return whether a row of a result is stored past the caches: in a large result, where it begins at a cache line.

    Short rows only where all of them do: one in the middle of a line shares it with the row before.
    """
    return is_large != 0 and address % 64 == 0 and (row_bytes % 64 == 0 or row_bytes >= limits.ALIGNED_ROW)


@inline
def store_result(dtype, address, index, low, high, count, stream):
    """Store the first `count` of 32 elements; with `stream` past the caches, where they fill cache lines.

    A row's last cache line is streamed as the others are: a store to it through the caches, between such stores, would
    make the processor write the lines beside it to memory in parts.
    """
    if count == 32:
        if stream:
            stream_pair(dtype, address, index, low, high)
        else:
            store_pair(dtype, address, index, low, high)
    elif stream and count == 16 and item_size(dtype) == 4:
        stream_vector(address, index, low)
    else:
        store_pair_first(dtype, address, index, low, high, count)
