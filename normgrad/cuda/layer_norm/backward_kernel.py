"""The kernel of LayerNorm backward; ``launches`` launches it, and then ``sum_partials`` for the weight gradients."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.cluster_exchange import (
    expand_to_columns,
    init_warp_exchange,
    send_from_warps,
    sum_by_warp,
    sum_received_from_warps,
)
from normgrad.cuda.device.compiler_barriers import block_rematerialization, opaque_zero
from normgrad.cuda.device.formulas import input_gradient
from normgrad.cuda.device.indexing import block_indices, float64, int64
from normgrad.cuda.device.mailbox import APPLY, FUSED, REDUCE, publish, publish_float64, receive_sums
from normgrad.cuda.device.pack16 import UNPACKED, store_elements, to_float32, unpack, unpack_acc_dtype
from normgrad.cuda.device.pdl import pdl_launch_dependents, pdl_wait
from normgrad.cuda.device.sums import column_sums, sum_pair
from normgrad.cuda.layer_norm.addressing import (
    assume_divisible,
    cta_columns,
    element_mask,
    offsets_in_tile,
    row_grid_strides,
    row_slots,
    tile_pointers,
    tile_rows,
)


@triton.jit
def _load_tile(inputs, tile, part, M, word_in_row, TILE: tl.constexpr, AHEAD: tl.constexpr):
    """Load a tile of input and grad_out [rows, words], and mean and rstd [rows] of its rows.

    ``inputs`` are (input, grad_out, mean, rstd), the first two as for ``tile_pointers``. AHEAD: they are needed an
    iteration later.
    """
    x_tensor, dy_tensor, mean_pointer, rstd_pointer = inputs
    rows = block_indices(tile, TILE.rows)
    mask = element_mask(rows < M, word_in_row, TILE)
    x = tl.load(tile_pointers(x_tensor, tile, part, TILE), mask=mask, other=0)
    dy = tl.load(tile_pointers(dy_tensor, tile, part, TILE), mask=mask, other=0)
    if AHEAD:  # ptxas would load warp-uniform addresses into uniform registers, and stall the warp an iteration early
        rows = block_indices(tile + opaque_zero(), TILE.rows)
    mean = tl.load(mean_pointer + rows, mask=rows < M, other=0.0)
    rstd = tl.load(rstd_pointer + rows, mask=rows < M, other=0.0)
    return x, dy, mean, rstd


@triton.jit
def layer_norm_backward(
    grad_out,  # [M, N]
    input,  # [M, N]
    mean,  # [M]
    rstd,  # [M]
    weight,  # [N], or None
    grad_input,  # [M, N], or None
    partial,  # float32 or float64 [outputs, cta_groups, N]: sums over a CTA group's rows, of grad_weight and grad_bias
    slots,  # mailbox: int64 [M, parts], or [M, parts, 2] for FLOAT64; None without one
    M,
    N,
    cta_groups,
    row_grid,  # sizes of the outer dimensions that cannot be merged into one; M is their product
    grad_out_strides,  # of each of these, in vectors, and of columns
    input_strides,
    grad_input_strides,
    TILE: tl.constexpr,  # tiles.RowTileSpec
    PREFETCH: tl.constexpr,  # load the next tile into registers while this one is reduced
    STAGES: tl.constexpr,  # of the software pipeline through shared memory; 1 for none
    CLUSTER: tl.constexpr,  # the CTAs that share a row are a cluster
    WARPS: tl.constexpr,  # of a CTA
    FLOAT64: tl.constexpr,  # everything is computed in float64
    WEIGHT_FLOAT64: tl.constexpr,  # the sums of grad_weight and grad_bias are, for few rows or columns
    WANT_INPUT: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    PHASE: tl.constexpr,  # of device.mailbox
):
    """Compute grad_input of all rows, and the partial sums of grad_weight and grad_bias.

    With g = dy·weight and x̂ = (x − mean)·rstd: grad_input = rstd·(g − mean(g) − x̂·mean(g·x̂)), the means over a row;
    grad_weight = Σ dy·x̂ and grad_bias = Σ dy over the rows.

    CTA group i walks over the tiles i, i + cta_groups, …, and every CTA of it keeps its columns of a tile in registers,
    so that input and grad_out are read once. Its sums of columns, for grad_weight and grad_bias, stay in registers
    (float64) until the end; it then writes one row of ``partial``, and ``sum_partials`` adds up the CTA groups.

    A row's two sums are complete within a CTA that holds whole rows. Otherwise the CTAs exchange theirs: the warps of a
    cluster through distributed shared memory, or the CTAs of a cooperative launch through the mailbox. With the mailbox
    results are computed one iteration later (LAG), so that the exchange overlaps the reduction of the next tile.

    Deterministic: the order of every sum follows from the tile alone, and exchanged sums are added up by part, not by
    arrival. A row's result does not depend on M.
    """
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    WORDS: tl.constexpr = TILE.words
    MAILBOX: tl.constexpr = TILE.parts > 1 and not CLUSTER
    LAG: tl.constexpr = 1 if (WANT_INPUT and MAILBOX) and PHASE == FUSED else 0
    # Equal elements of many rows, which a thread adds up one by one in float32, may all be rounded the same way.
    MANY_ROWS: tl.constexpr = ROWS >= 32 and input.dtype.element_ty != tl.float32
    N = assume_divisible(N, TILE)
    input_strides = row_grid_strides(input_strides, row_grid, TILE)
    grad_out_strides = row_grid_strides(grad_out_strides, row_grid, TILE)
    grad_input_strides = row_grid_strides(grad_input_strides, row_grid, TILE)
    cta_group, part, columns, in_row, word_in_row = cta_columns(N, TILE)
    reciprocal_N = 1.0 / float64(N)
    tiles = tl.cdiv(M, ROWS)
    x_tensor = (input, offsets_in_tile(row_grid, input_strides, TILE), row_grid, input_strides)
    dy_tensor = (grad_out, offsets_in_tile(row_grid, grad_out_strides, TILE), row_grid, grad_out_strides)
    inputs = (x_tensor, dy_tensor, mean, rstd)
    output_offsets = offsets_in_tile(row_grid, grad_input_strides, TILE)
    weight_sum = tl.zeros((COLUMNS,), tl.float64)
    bias_sum = tl.zeros((COLUMNS,), tl.float64)
    WARP_WIDTH: tl.constexpr = 32 * TILE.vector * (COLUMNS // WORDS)  # adjacent columns that a warp holds
    w = None
    if weight is not None:
        w = to_float32(tl.load(weight + columns, mask=columns < N, other=0.0))[None, :]
    if CLUSTER:
        exchange = init_warp_exchange()
        iteration = 0
    if TILE.parts == 1:  # noqa: SIM102 - one is known at compile time
        if tiles <= cta_groups:  # one tile for each CTA: the next launch may start where CTAs exit early
            pdl_launch_dependents()
    if PREFETCH:
        next_x, next_dy, next_mean, next_rstd = _load_tile(inputs, cta_group, part, M, word_in_row, TILE, True)
    if LAG:
        previous_x = tl.zeros((ROWS, WORDS), input.dtype.element_ty)
        previous_dy = tl.zeros((ROWS, WORDS), grad_out.dtype.element_ty)
        previous_mean = tl.zeros((ROWS,), tl.float32)
        previous_rstd = tl.zeros((ROWS,), tl.float32)
        pdl_wait()
    for tile in tl.range(cta_group, tiles + LAG * cta_groups, cta_groups, num_stages=STAGES):
        result_tile = tile - LAG * cta_groups
        load_tile = tile + cta_groups if PREFETCH else tile
        x, dy, row_mean, row_rstd = _load_tile(inputs, load_tile, part, M, word_in_row, TILE, PREFETCH)
        if PREFETCH:
            x, next_x = next_x, x
            dy, next_dy = next_dy, dy
            row_mean, next_mean = next_mean, row_mean
            row_rstd, next_rstd = next_rstd, row_rstd
        rows = block_indices(tile, ROWS)
        row_mean = to_float32(row_mean)
        row_rstd = to_float32(row_rstd)
        g = unpack(dy, TILE.packing, FLOAT64)
        x_hat = (unpack(x, TILE.packing, FLOAT64) - row_mean[:, None]) * row_rstd[:, None]
        if TILE.masked:
            x_hat = tl.where(in_row, x_hat, 0.0)  # 0·Inf must not reach the sums
        if PHASE != APPLY:
            if WANT_WEIGHT:
                product = g * x_hat
                if WEIGHT_FLOAT64:
                    dy64 = unpack_acc_dtype(dy, TILE.packing)
                    product = dy64 * ((unpack_acc_dtype(x, TILE.packing) - row_mean[:, None]) * row_rstd[:, None])
                weight_sum += column_sums(product, MANY_ROWS)
            if WANT_BIAS:
                bias_sum += column_sums(unpack(dy, TILE.packing, WEIGHT_FLOAT64), MANY_ROWS)
        if WANT_INPUT:
            if PHASE != APPLY:
                if weight is not None:
                    g *= unpack(w, UNPACKED, FLOAT64)
                sum_g, sum_gx = g, g * x_hat
                if CLUSTER:
                    sum_g, sum_gx = sum_by_warp(sum_g, sum_gx, WARP_WIDTH, WARPS)
                    send_from_warps(sum_g, sum_gx, exchange, part, iteration, TILE.parts)
                else:
                    sum_g, sum_gx = sum_pair(sum_g, sum_gx, 1)
                if MAILBOX:
                    if FLOAT64:
                        publish_float64(sum_g, sum_gx, slots + (rows * TILE.parts + part) * 2, rows < M)
                    else:
                        publish(sum_g, sum_gx, slots + rows * TILE.parts + part, rows < M)
            if PHASE != REDUCE:
                rows, row_inside = tile_rows(result_tile, M, TILE, LAG)
                if LAG:
                    x, previous_x = previous_x, x
                    dy, previous_dy = previous_dy, dy
                    row_mean, previous_mean = previous_mean, row_mean
                    row_rstd, previous_rstd = previous_rstd, row_rstd
                if CLUSTER:
                    sum_g, sum_gx = sum_received_from_warps(exchange, iteration, ROWS, TILE.parts, WARPS)
                    iteration += 1
                elif MAILBOX:
                    all_slots, slot_mask = row_slots(slots, rows, M, TILE, 2 if FLOAT64 else 1)
                    all_g, all_gx = receive_sums(all_slots, slot_mask, PHASE == FUSED, FLOAT64)
                if MAILBOX:
                    mean_g = tl.sum(all_g, axis=1) * reciprocal_N
                    mean_gx = tl.sum(all_gx, axis=1) * reciprocal_N
                    if not FLOAT64:
                        mean_g = mean_g.to(tl.float32)
                        mean_gx = mean_gx.to(tl.float32)
                else:
                    mean_g = sum_g.to(tl.float64) * reciprocal_N
                    mean_gx = sum_gx.to(tl.float64) * reciprocal_N
                if MAILBOX:
                    mean_g = block_rematerialization(mean_g, ROWS)
                    mean_gx = block_rematerialization(mean_gx, ROWS)
                if CLUSTER:
                    mean_g = expand_to_columns(mean_g, COLUMNS, WARP_WIDTH)
                    mean_gx = expand_to_columns(mean_gx, COLUMNS, WARP_WIDTH)
                else:
                    mean_g, mean_gx = mean_g[:, None], mean_gx[:, None]
                dy_values, x_values = unpack(dy, TILE.packing, FLOAT64), unpack(x, TILE.packing, FLOAT64)
                result = input_gradient(dy_values, x_values, row_mean[:, None], row_rstd[:, None], w, mean_g, mean_gx)
                output_tensor = (grad_input, output_offsets, row_grid, grad_input_strides)
                pointers = tile_pointers(output_tensor, result_tile, part, TILE)
                mask = element_mask(row_inside, word_in_row, TILE)
                store_elements(pointers, result, mask, (ROWS, WORDS, 2), TILE.packing)
    if PHASE != APPLY:
        target = partial + int64(cta_group) * N + columns
        if WANT_WEIGHT:
            tl.store(target, weight_sum, mask=columns < N)
            target += int64(cta_groups) * N
        if WANT_BIAS:
            tl.store(target, bias_sum, mask=columns < N)
