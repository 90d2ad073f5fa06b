"""The kernel of LayerNorm forward; ``launches`` launches it."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.cluster_exchange import init_cta_exchange, received_from, send_to_ctas, wait_for_ctas
from normgrad.cuda.device.compiler_barriers import block_rematerialization
from normgrad.cuda.device.formulas import divide, merge_moments, normalize, row_moments
from normgrad.cuda.device.indexing import block_indices, float64, float64_from_bits
from normgrad.cuda.device.mailbox import APPLY, FUSED, REDUCE, publish_float64, receive_float64
from normgrad.cuda.device.pack16 import store_elements, store_rounded, unpack_float32
from normgrad.cuda.device.pdl import pdl_wait
from normgrad.cuda.layer_norm.addressing import (
    assume_divisible,
    cta_columns,
    element_mask,
    load_columns,
    offsets_in_tile,
    row_grid_strides,
    row_slots,
    tile_pointers,
    tile_rows,
    unpack_columns,
)


@triton.jit
def _moments_from_cluster(received, N, reciprocal_N, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Merge the moments that the CTAs of a cluster have sent, of which all but the last hold COLUMNS columns."""
    last_count = float64(N - (PARTS - 1) * COLUMNS)
    last_sum, squares = received_from(PARTS - 1, received)
    sums = last_sum
    for part in tl.static_range(PARTS - 1):
        part_sum, part_squares = received_from(part, received)
        sums += part_sum
        squares += part_squares
    row_mean = divide(sums, float64(N), reciprocal_N)
    deviation = last_sum - row_mean * last_count
    squares += deviation * deviation * (1.0 / last_count)
    for part in tl.static_range(PARTS - 1):
        part_sum, _ = received_from(part, received)
        deviation = part_sum - row_mean * COLUMNS
        squares += deviation * deviation * (1.0 / COLUMNS)
    return row_mean, squares


@triton.jit
def layer_norm_forward(
    input,  # [M, N]
    weight,  # [N], packed in int32 [N/2], or None
    bias,  # [N], packed in int32 [N/2], or None
    output,  # [M, N]
    mean,  # [M], or None
    rstd,  # [M], or None
    slots,  # mailbox: int64 [M, parts, 2]; None without one
    M,
    N,
    eps_bits,  # of a float64
    cta_groups,
    row_grid,  # sizes of the outer dimensions that cannot be merged into one; M is their product
    input_strides,  # of each of these, in vectors, and of columns
    output_strides,
    mean_stride,
    rstd_stride,
    TILE: tl.constexpr,  # tiles.RowTileSpec
    PREFETCH: tl.constexpr,  # load the next tile into registers while this one is reduced
    STAGES: tl.constexpr,  # of the software pipeline through shared memory; 1 for none
    CLUSTER: tl.constexpr,  # the CTAs that share a row are a cluster
    SEGMENTS: tl.constexpr,  # of a CTA's columns whose squares are added up first; 1 where a thread holds few columns
    FLOAT64: tl.constexpr,  # squares in float64: for an eps so small that squares below float32's range decide rstd
    PHASE: tl.constexpr,  # of device.mailbox
):
    """Compute output = (x − mean)·rstd·weight + bias, and mean and rstd of all rows.

    CTA groups walk over the tiles as in the backward kernel, and a tile stays in registers between its two passes: the
    sum, then the squares about the mean. Where CTAs share a row, each takes the squares about the mean of its own part,
    and the moments of the parts are combined by Chan's formula; in a cluster through distributed shared memory, else
    through the mailbox and with the results one iteration later (LAG).

    Sums are float64, since an output near the mean is only as accurate as the mean is; squares are added up in float32
    in chains of eight. Deterministic: moments are combined by part, not by arrival.
    """
    ROWS: tl.constexpr = TILE.rows
    WORDS: tl.constexpr = TILE.words
    MAILBOX: tl.constexpr = TILE.parts > 1 and not CLUSTER
    LAG: tl.constexpr = 1 if MAILBOX and PHASE == FUSED else 0
    N = assume_divisible(N, TILE)
    input_strides = row_grid_strides(input_strides, row_grid, TILE)
    output_strides = row_grid_strides(output_strides, row_grid, TILE)
    cta_group, part, _, in_row, word_in_row = cta_columns(N, TILE)
    x_tensor = (input, offsets_in_tile(row_grid, input_strides, TILE), row_grid, input_strides)
    output_tensor = (output, offsets_in_tile(row_grid, output_strides, TILE), row_grid, output_strides)
    eps = float64_from_bits(eps_bits)
    N64 = float64(N)
    reciprocal_N = 1.0 / N64
    count = float64(tl.minimum(N - part * TILE.columns, TILE.columns))
    reciprocal_count = 1.0 / count
    parts = tl.arange(0, TILE.padded_parts)
    counts = tl.maximum(tl.minimum(N - parts * TILE.columns, TILE.columns), 0).to(tl.float64)[None, :]
    if weight is not None:
        loaded_weight = load_columns(weight, part, N, TILE)
    if bias is not None:
        loaded_bias = load_columns(bias, part, N, TILE)
    if LAG:
        previous_x = tl.zeros((ROWS, WORDS), input.dtype.element_ty)
        pdl_wait()
    if CLUSTER:
        exchange = init_cta_exchange()
        iteration = 0
    if PREFETCH:
        mask = element_mask(block_indices(cta_group, ROWS) < M, word_in_row, TILE)
        next_x = tl.load(tile_pointers(x_tensor, cta_group, part, TILE), mask=mask, other=0)
    for tile in tl.range(cta_group, tl.cdiv(M, ROWS) + LAG * cta_groups, cta_groups, num_stages=STAGES):
        result_tile = tile - LAG * cta_groups
        load_tile = tile + cta_groups if PREFETCH else tile
        mask = element_mask(block_indices(load_tile, ROWS) < M, word_in_row, TILE)
        x = tl.load(tile_pointers(x_tensor, load_tile, part, TILE), mask=mask, other=0)
        if PREFETCH:
            x, next_x = next_x, x
        rows = block_indices(tile, ROWS)
        if PHASE != APPLY:
            values = unpack_float32(x, TILE.packing)
            if FLOAT64:
                values = values.to(tl.float64)
            total, part_mean, squares = row_moments(
                values, in_row, count, reciprocal_count, SEGMENTS, not MAILBOX, TILE
            )
            if CLUSTER:
                send_to_ctas(total, squares, exchange, part, iteration, ROWS, TILE.parts)
            elif MAILBOX:
                publish_float64(total, squares, slots + (rows * TILE.parts + part) * 2, rows < M)
        if PHASE != REDUCE:
            rows, row_inside = tile_rows(result_tile, M, TILE, LAG)
            if LAG:
                x, previous_x = previous_x, x
            if CLUSTER:
                received = wait_for_ctas(exchange, iteration, ROWS, TILE.parts)
                row_mean, squares = _moments_from_cluster(received, N, reciprocal_N, TILE.columns, TILE.parts)
                iteration += 1
            elif MAILBOX:
                all_slots, slot_mask = row_slots(slots, rows, M, TILE, 2)
                sums, all_squares = receive_float64(all_slots, slot_mask, PHASE == FUSED)
                row_mean, squares = merge_moments(sums, all_squares, counts, 1.0 / counts, slot_mask, N64, reciprocal_N)
                row_mean = block_rematerialization(row_mean, ROWS)
                squares = block_rematerialization(squares, ROWS)
            else:
                row_mean = part_mean
            row_rstd = 1.0 / tl.sqrt(squares * reciprocal_N + eps)
            w = None
            b = None
            if weight is not None:
                w = unpack_columns(loaded_weight, TILE)
            if bias is not None:
                b = unpack_columns(loaded_bias, TILE)
            values = unpack_float32(x, TILE.packing)
            if FLOAT64:
                values = values.to(tl.float64)
            result = normalize(values, row_mean[:, None], row_rstd[:, None], w, b)
            pointers = tile_pointers(output_tensor, result_tile, part, TILE)
            store_elements(
                pointers, result, element_mask(row_inside, word_in_row, TILE), (ROWS, WORDS, 2), TILE.packing
            )
            first_part = row_inside & (part == 0)
            if mean is not None:
                store_rounded(mean + rows * mean_stride, row_mean, first_part)
            if rstd is not None:
                store_rounded(rstd + rows * rstd_stride, row_rstd, first_part)
