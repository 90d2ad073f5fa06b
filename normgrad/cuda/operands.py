"""How the numbers of rows come to a program: in vectors, in pairs, and how many a thread adds up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.view import Shape
from normgrad.cuda.chip import VECTOR_ACCESS
from normgrad.cuda.device.common import SINGLE
from normgrad.cuda.layer_norm.tiles import RowTile
from normgrad.cuda.steps import Operand

# Squares of a thread's numbers that are added up as float32.
_CHAIN = 8


def are_apart(operands: Sequence[Operand]) -> bool:
    """Whether columns of a tensor lie apart: then every thread has some of a tile's rows, and otherwise all of them."""
    return any(operand.strides[-1] != 1 for operand in operands if operand.pointer is not None)


def merged_rows(sizes: Shape, operands: Sequence[Operand]) -> tuple[Shape, list[Operand]]:
    """The outer dimensions of [*outer, columns] merged into as few as all tensors allow, and the tensors over these.

    Two neighbouring dimensions merge where in every tensor the outer stride is the inner one times the inner size.
    So rows on any strides are read in place, each at the offset that its indices give.
    """
    present = [operand for operand in operands if operand.pointer is not None]
    grid: list[int] = []
    kept: list[int] = []  # of each merged dimension the last axis, whose stride it has
    for axis, size in enumerate(sizes[:-1]):
        if size == 1:
            continue
        if kept and all(operand.strides[kept[-1]] == operand.strides[axis] * size for operand in present):
            grid[-1], kept[-1] = grid[-1] * size, axis
        else:
            grid.append(size)
            kept.append(axis)
    if not grid:
        return (1,), [replace(operand, strides=(sizes[-1], operand.strides[-1])) for operand in operands]
    merged = [replace(operand, strides=tuple(operand.strides[axis] for axis in (*kept, -1))) for operand in operands]
    return tuple(grid), merged


def row_vector(N: int, pairs: int, operands: Sequence[Operand]) -> int:
    """The words of the largest vector that divides the columns and the tensors' rows, wherever these begin.

    Of arguments the compiler sees only whether 16 divides them.
    """
    present = [operand for operand in operands if operand.pointer is not None]
    if are_apart(operands):
        return 1
    words = N if pairs == SINGLE.value else N // 2
    itemsize = max(operand.pointer.dtype.itemsize for operand in present if operand.pointer is not None)
    begins = (operand.alignment // itemsize for operand in present)
    return math.gcd(words, *begins, *(stride for operand in present for stride in operand.strides[:-1]))


def in_vectors(operands: Sequence[Operand], vector: int) -> list[Shape]:
    """The tensors' strides, those of rows in vectors."""
    return [(*(stride // vector for stride in operand.strides[:-1]), operand.strides[-1]) for operand in operands]


def fold_of(tile: RowTile, itemsize: int) -> int:
    """In how many stretches a program's columns fall, of each of which every thread has a vector.

    Up to eight numbers of a thread are added up as float32: it has no more where one stretch is enough, and two of each
    stretch where numbers come in pairs.
    """
    threads = tile.warps * 32
    if tile.columns <= _CHAIN * threads:
        return 1
    return min(tile.columns * itemsize // (threads * VECTOR_ACCESS), _CHAIN * itemsize // FLOAT32.itemsize)


def fold_apart(tile: RowTile) -> int:
    """As ``fold_of``, where columns lie apart and a thread may have many numbers of a row: one of each stretch."""
    return max(min(tile.columns // (tile.warps * 32), _CHAIN), 1)
