"""Where LayerNorm's tiles lie: their elements, the weights of their columns, the slots of their rows."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.common import SINGLE, apart, indices, int64, offsets_in, wide


@triton.jit
def times(strides, VECTOR: tl.constexpr, WIDE: tl.constexpr):
    """A tensor's strides: that of the rows comes in vectors, so that the compiler knows what divides it."""
    rows = strides[0]
    if WIDE:
        rows = int64(rows)
    return rows * VECTOR, strides[1]


@triton.jit
def known_multiple(N, VECTOR: tl.constexpr, PAIRS: tl.constexpr):
    """The number of columns, of which the compiler knows then that so many vectors of words make it up."""
    LENGTH: tl.constexpr = VECTOR if PAIRS == SINGLE else 2 * VECTOR
    return N // LENGTH * LENGTH


@triton.jit
def part_of_team(N, COLUMNS: tl.constexpr, PARTS: tl.constexpr, PAIRS: tl.constexpr):
    """A program's team and part, its columns, and which of its tile's columns and words there are."""
    program = tl.program_id(0)
    part = program % PARTS
    columns = indices(part, COLUMNS)
    in_row = (columns < N)[None, :]
    word_in_row = in_row if PAIRS == SINGLE else (indices(part, COLUMNS // 2) < N // 2)[None, :]
    return program // PARTS, part, columns, in_row, word_in_row


@triton.jit
def rows_of(tile, M, ROWS: tl.constexpr, LAG: tl.constexpr):
    """The rows of a tile, and which of them there are; with a LAG it may be a tile before the first."""
    rows = indices(tile, ROWS)
    known = rows < M
    if LAG:
        known = known & (rows >= 0)
    return rows, known


@triton.jit
def first_of(pointer, tile, part, strides, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr):
    """Where a tile begins; the compiler is told of no more alignment than every row has."""
    first = pointer + int64(tile) * ROWS * strides[0] + int64(part) * COLUMNS * strides[1]
    return tl.multiple_of(first, VECTOR * (pointer.dtype.element_ty.primitive_bitwidth // 8))


@triton.jit
def scaled_strides(strides, row_grid, VECTOR: tl.constexpr, WIDE: tl.constexpr):
    """A tensor's strides as ``tile_at`` takes them: of rows on one stride in elements, of others still in vectors."""
    if len(row_grid) == 1:
        result = times(strides, VECTOR, WIDE)
    else:
        result = strides
    return result


@triton.jit
def offsets_within(row_grid, strides, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """What of a tile's offsets is the same for all tiles: of rows on one stride all of it, else that of the columns."""
    if len(row_grid) == 1:
        result = offsets_in(strides, ROWS, COLUMNS, WIDE)
    else:
        result = offsets_in((0, strides[len(row_grid)]), 1, COLUMNS, WIDE)
    return result


@triton.jit
def tile_at(
    pointer,
    within,  # as of ``offsets_within``
    tile,
    part,
    row_grid,
    strides,  # as of ``scaled_strides``
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Pointers to a tile's elements. Rows of several outer dimensions have an offset each, made of their indices."""
    if len(row_grid) == 1:
        result = first_of(pointer, tile, part, strides, ROWS, COLUMNS, VECTOR) + within
    else:
        first = pointer + int64(part) * COLUMNS * strides[len(row_grid)]
        first = tl.multiple_of(first, VECTOR * (pointer.dtype.element_ty.primitive_bitwidth // 8))
        rest = indices(tile, ROWS)
        if not WIDE:  # there are fewer than 2³¹ rows, and a 32-bit division takes a third of the instructions
            rest = rest.to(tl.int32)
        offset = tl.zeros((ROWS,), tl.int64)
        for step in tl.static_range(len(row_grid) - 1):
            axis: tl.constexpr = len(row_grid) - 1 - step
            offset += int64(rest % row_grid[axis]) * strides[axis]
            rest = rest // row_grid[axis]
        offset += int64(rest) * strides[0]
        result = (first + offset * VECTOR)[:, None] + within
    return result


@triton.jit
def row_mask(known, in_row, MASKED: tl.constexpr):
    """Which elements of a tile there are."""
    mask = known[:, None]
    if MASKED:
        mask = mask & in_row
    return mask


@triton.jit
def of_columns(pointer, part, N, COLUMNS: tl.constexpr):
    """Weights of a part's columns, as they are kept: float32, or pairs of 16 bits in an int32."""
    if pointer.dtype.element_ty == tl.int32:
        words = indices(part, COLUMNS // 2)
        kept_so = tl.load(pointer + words, mask=words < N // 2, other=0)
    else:
        columns = indices(part, COLUMNS)
        kept_so = wide(tl.load(pointer + columns, mask=columns < N, other=0.0))
    return kept_so[None, :]


@triton.jit
def unpacked(weights, PAIRS: tl.constexpr):
    """Weights of columns in float32."""
    if weights.dtype == tl.int32:
        weights = apart(weights, PAIRS)
    return weights


@triton.jit
def slots_of(slots, rows, M, PARTS: tl.constexpr, PADDED: tl.constexpr, WORDS: tl.constexpr):
    """All slots of the rows, and which of them there are."""
    parts = tl.arange(0, PADDED)
    mask = ((rows >= 0) & (rows < M))[:, None] & (parts < PARTS)[None, :]
    return slots + (rows[:, None] * PARTS + parts[None, :]) * WORDS, mask
