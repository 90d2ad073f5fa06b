"""Device functions on tiles of rows: which rows and columns a CTA holds, where they are in memory, and their masks.

Called by LayerNorm's kernels, and by GroupNorm's where a group of a sample is one contiguous row. TILE is a
``tiles.RowTileSpec``. A CTA group of TILE.parts consecutive CTAs shares each row: CTA ``part`` of the group holds the
TILE.columns columns from ``part``·TILE.columns on. A *word* is an element or a packed pair of 16-bit elements;
pointers, offsets and strides count words.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.indexing import block_indices, float64, int64, tile_offsets
from normgrad.cuda.device.pack16 import UNPACKED, store_elements, to_float32, unpack16


@triton.jit
def assume_divisible(N, TILE: tl.constexpr):
    """Return the columns N in a form that shows the compiler that vectors divide them."""
    LENGTH: tl.constexpr = TILE.vector if TILE.packing == UNPACKED else 2 * TILE.vector
    return N // LENGTH * LENGTH


@triton.jit
def cta_columns(N, TILE: tl.constexpr):
    """Return the CTA's group and part, its column indices, and masks [1, columns] and [1, words] of those below N."""
    program = tl.program_id(0)
    part = program % TILE.parts
    columns = block_indices(part, TILE.columns)
    in_row = (columns < N)[None, :]
    word_in_row = in_row if TILE.packing == UNPACKED else (block_indices(part, TILE.words) < N // 2)[None, :]
    return program // TILE.parts, part, columns, in_row, word_in_row


@triton.jit
def tile_rows(tile, M, TILE: tl.constexpr, LAG: tl.constexpr):
    """Return the row indices of a tile, and which are below M; with a LAG the tile may be one before the first."""
    rows = block_indices(tile, TILE.rows)
    inside = rows < M
    if LAG:
        inside = inside & (rows >= 0)
    return rows, inside


@triton.jit
def element_mask(row_inside, word_in_row, TILE: tl.constexpr):
    """Return the mask [rows, words], or [rows, 1] where tiles divide the row."""
    mask = row_inside[:, None]
    if TILE.masked:
        mask = mask & word_in_row
    return mask


@triton.jit
def in_words(strides, TILE: tl.constexpr):
    """Return (row stride, column stride) in words; the host passes the row stride in vectors.

    The multiplication shows the compiler that vectors divide it.
    """
    row_stride = strides[0]
    if TILE.offset64:
        row_stride = int64(row_stride)
    return row_stride * TILE.vector, strides[1]


@triton.jit
def tile_start(pointer, tile, part, strides, TILE: tl.constexpr):
    """Return the address of a tile's first word, for rows on one stride.

    The hint promises no more alignment than every row has.
    """
    start = pointer + int64(tile) * TILE.rows * strides[0] + int64(part) * TILE.words * strides[1]
    return tl.multiple_of(start, TILE.vector * (pointer.dtype.element_ty.primitive_bitwidth // 8))


# Rows may have several outer dimensions (``row_grid``) that cannot be merged into one, e.g. those of a tensor that was
# transposed. Then each row of a tile has an offset of its own, computed from its index along each dimension.


@triton.jit
def row_grid_strides(strides, row_grid, TILE: tl.constexpr):
    """Return a tensor's strides as ``row_layout`` takes them: over one outer dimension in words, else in vectors."""
    if len(row_grid) == 1:
        strides = in_words(strides, TILE)
    return strides


@triton.jit
def row_layout(strides, row_grid, TILE: tl.constexpr):
    """Return the layout of a tensor, (offsets, row_grid, strides), as the functions below take it.

    The offsets are those that are the same for all tiles: of rows and columns, or of columns with several row dims.
    """
    if len(row_grid) == 1:
        offsets = tile_offsets(strides, TILE.rows, TILE.words, TILE.offset64)
    else:
        offsets = tile_offsets((0, strides[len(row_grid)]), 1, TILE.words, TILE.offset64)
    return offsets, row_grid, strides


@triton.jit
def load_tile(pointer, layout, tile, cta, M, TILE: tl.constexpr):
    """Load the CTA's part of a tile, [rows, words]; ``cta`` is (part, mask of its words)."""
    part, word_in_row = cta
    mask = element_mask(block_indices(tile, TILE.rows) < M, word_in_row, TILE)
    return tl.load(tile_pointers(pointer, layout, tile, part, TILE), mask=mask, other=0)


@triton.jit
def store_tile(pointer, layout, tile, cta, values, row_inside, TILE: tl.constexpr):
    """Store the CTA's part of a tile of results, rounded and packed as the tensor is."""
    part, word_in_row = cta
    pointers = tile_pointers(pointer, layout, tile, part, TILE)
    store_elements(pointers, values, element_mask(row_inside, word_in_row, TILE), TILE.packing)


@triton.jit
def tile_pointers(pointer, layout, tile, part, TILE: tl.constexpr):
    """Return the addresses [rows, words] of the CTA's part of a tile."""
    offsets, row_grid, strides = layout
    if len(row_grid) == 1:
        result = tile_start(pointer, tile, part, strides, TILE) + offsets
    else:
        ROWS: tl.constexpr = TILE.rows
        start = pointer + int64(part) * TILE.words * strides[len(row_grid)]
        start = tl.multiple_of(start, TILE.vector * (pointer.dtype.element_ty.primitive_bitwidth // 8))
        remaining = block_indices(tile, ROWS)
        if not TILE.offset64:  # fewer than 2³¹ rows, and a 32-bit division takes a third of the instructions
            remaining = remaining.to(tl.int32)
        row_offset = tl.zeros((ROWS,), tl.int64)
        for axis in tl.static_range(len(row_grid) - 1, 0, -1):
            row_offset += int64(remaining % row_grid[axis]) * strides[axis]
            remaining = remaining // row_grid[axis]
        row_offset += int64(remaining) * strides[0]
        result = (start + row_offset * TILE.vector)[:, None] + offsets
    return result


@triton.jit
def load_columns(pointer, part, N, TILE: tl.constexpr):
    """Load a vector's values for the CTA's columns, [1, columns] as float32 or [1, words] as packed pairs."""
    if pointer.dtype.element_ty == tl.int32:
        PACKED_WORDS: tl.constexpr = TILE.columns // 2
        words = block_indices(part, PACKED_WORDS)
        loaded = tl.load(pointer + words, mask=words < N // 2, other=0)
    else:
        columns = block_indices(part, TILE.columns)
        loaded = to_float32(tl.load(pointer + columns, mask=columns < N, other=0.0))
    return loaded[None, :]


@triton.jit
def unpack_columns(loaded, TILE: tl.constexpr):
    """Convert what ``load_columns`` returned to float32 [1, columns]."""
    if loaded.dtype == tl.int32:
        loaded = unpack16(loaded, TILE.packing)
    return loaded


@triton.jit
def column_counts(N, part, TILE: tl.constexpr):
    """Return the columns of a row and of the CTA's part, with reciprocals, and of each part, [1, padded parts].

    All as float64.
    """
    count = float64(N)
    counts = (count, 1.0 / count)
    cta_count = float64(tl.minimum(N - part * TILE.columns, TILE.columns))
    cta_counts = (cta_count, 1.0 / cta_count)
    left = N - tl.arange(0, TILE.padded_parts) * TILE.columns
    return counts, cta_counts, tl.maximum(tl.minimum(left, TILE.columns), 0).to(tl.float64)[None, :]
