"""Tensors as kernels see them: strides over the kernel's own dimensions, alignment, and packing of 16-bit elements.

Host-side and pure: the launches of every operator family call these functions before they choose tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from normgrad.contract.dtypes import BFLOAT16, FLOAT16, INT32
from normgrad.contract.view import Shape, View, contiguous_strides, merge_axes, reshaped_strides
from normgrad.cuda.chip import VECTOR_BYTES
from normgrad.cuda.device.pack16 import BF16X2, FP16X2, UNPACKED
from normgrad.cuda.launch import Argument, Given, Scratch

_PACKING = {BFLOAT16: BF16X2.value, FLOAT16: FP16X2.value}


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of a kernel: its address (None if the tensor is absent), strides in words, and alignment in bytes.

    A word is an element, or a pair of 16-bit elements (see ``pack_operands``).
    """

    pointer: Given | Scratch | None
    strides: Shape
    alignment: int = VECTOR_BYTES


def present(operands: Sequence[Operand]) -> list[Operand]:
    """Return the operands that are not absent."""
    return [operand for operand in operands if operand.pointer is not None]


def alignment(address: int) -> int:
    """Return the largest power of two, up to a vector's bytes, that divides an address."""
    return math.gcd(address, VECTOR_BYTES)


def all_vector_aligned(operands: Sequence[Operand]) -> bool:
    """Return whether all tensors begin at a multiple of a vector's bytes."""
    return all(operand.alignment == VECTOR_BYTES for operand in operands)


def grid_strides(view: View, sizes: Shape) -> Shape | None:
    """Return the strides with which a view, reshaped to these sizes, can be read in place; None if it cannot."""
    return reshaped_strides(view, sizes, contiguous_strides(sizes))


def pack_operands(operands: Sequence[Operand], contiguous: int, axis: int = -1) -> tuple[int, list[Operand]]:
    """Return the PACKING of ``device.pack16`` that all tensors allow, and the operands with strides in words.

    16-bit elements are packed in pairs along an axis if all tensors have the same dtype, the number of ``contiguous``
    elements is even and not 0, and every tensor has stride 1 there and even strides elsewhere, and begins at a multiple
    of 4 bytes. Then every row begins with a whole pair, and a row is summed in the same order in whatever batch it is.
    """
    tensors = present(operands)
    packings = {_PACKING.get(tensor.pointer.dtype, UNPACKED.value) for tensor in tensors if tensor.pointer}
    packing = packings.pop() if len(packings) == 1 else UNPACKED.value
    even = all(
        stride == 1 if dimension == axis % len(tensor.strides) else stride % 2 == 0
        for tensor in tensors
        for dimension, stride in enumerate(tensor.strides)
    )
    if (
        packing == UNPACKED.value
        or contiguous == 0
        or contiguous % 2
        or not (even and all(tensor.alignment >= INT32.itemsize for tensor in tensors))
    ):
        return UNPACKED.value, list(operands)
    return packing, [_packed(operand) for operand in operands]


def _packed(operand: Operand) -> Operand:
    pointer = None if operand.pointer is None else replace(operand.pointer, dtype=INT32)
    strides = tuple(stride if stride == 1 else stride // 2 for stride in operand.strides)
    return replace(operand, pointer=pointer, strides=strides)


def pack_vector(vector: Argument, packing: int) -> Argument:
    """Return a contiguous 16-bit vector as packed words, beside packed data, where its alignment allows it."""
    if packing == UNPACKED.value or not isinstance(vector, Given | Scratch) or vector.dtype not in _PACKING:
        return vector
    aligned = isinstance(vector, Scratch) or vector.aligned
    return replace(vector, dtype=INT32) if aligned else vector


def merge_rows(sizes: Shape, operands: Sequence[Operand]) -> tuple[Shape, list[Operand]]:
    """Merge the outer dimensions of [*outer, columns] into as few as all tensors allow; rows are read in place.

    Return the merged outer sizes and the operands with strides over them.
    """
    grid, strides = merge_axes(sizes[:-1], [tensor.strides[:-1] for tensor in present(operands)])
    if not grid:
        return (1,), [replace(operand, strides=(sizes[-1], operand.strides[-1])) for operand in operands]
    merged, absent = iter(strides), (1,) * len(grid)
    return grid, [
        replace(operand, strides=(*(absent if operand.pointer is None else next(merged)), operand.strides[-1]))
        for operand in operands
    ]


def row_vector(columns: int, packing: int, operands: Sequence[Operand]) -> int:
    """Return the words of the largest vector that divides the columns and the row strides of all tensors.

    Their columns are contiguous. The kernels tell the compiler so: of an argument it sees only whether 16 divides it.
    """
    tensors = present(operands)
    words = columns if packing == UNPACKED.value else columns // 2
    itemsize = max(tensor.pointer.dtype.itemsize for tensor in tensors if tensor.pointer is not None)
    first_words = (tensor.alignment // itemsize for tensor in tensors)
    return math.gcd(words, *first_words, *(stride for tensor in tensors for stride in tensor.strides[:-1]))


def strides_in_vectors(operands: Sequence[Operand], vector: int) -> list[Shape]:
    """Return the operands' strides, those of rows counted in vectors."""
    return [(*(stride // vector for stride in operand.strides[:-1]), operand.strides[-1]) for operand in operands]
