"""The two kernels of LayerNorm; ``launches`` launches them, and after the backward one ``sum_partials``."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device import cluster_exchange, mailbox
from normgrad.cuda.device.compiler_barriers import block_rematerialization, opaque_zero
from normgrad.cuda.device.formulas import divide, input_gradient, nan_where_infinite, normalize, row_moments
from normgrad.cuda.device.indexing import block_indices, float64, float64_from_bits, int64
from normgrad.cuda.device.mailbox import APPLY, FUSED, REDUCE
from normgrad.cuda.device.pack16 import UNPACKED, store_rounded, to_float32, unpack, unpack_acc_dtype, unpack_float32
from normgrad.cuda.device.pdl import pdl_launch_dependents, pdl_wait
from normgrad.cuda.device.sums import column_sums, store_partials, sum_pair
from normgrad.cuda.layer_norm import addressing


@triton.jit
def _load_tile(inputs, tile, cta, M, TILE: tl.constexpr, AHEAD: tl.constexpr):
    """Load a tile of input and grad_out [rows, words], and mean and rstd [rows] of its rows.

    ``inputs`` are (input, its layout, grad_out, its layout, mean, rstd). AHEAD: they are needed an iteration later.
    """
    input, x_layout, grad_out, dy_layout, mean_pointer, rstd_pointer = inputs
    rows = block_indices(tile, TILE.rows)
    x = addressing.load_tile(input, x_layout, tile, cta, M, TILE)
    dy = addressing.load_tile(grad_out, dy_layout, tile, cta, M, TILE)
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
    FLOAT64: tl.constexpr,  # everything is computed in float64
    WEIGHT_FLOAT64: tl.constexpr,  # the sums of grad_weight and grad_bias are, for few rows or columns
    WANT: tl.constexpr,  # steps.WantedGradients
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
    MAILBOX: tl.constexpr = TILE.parts > 1 and not TILE.cluster
    LAG: tl.constexpr = 1 if (WANT.input and MAILBOX) and PHASE == FUSED else 0
    # Equal elements of many rows, which a thread adds up one by one in float32, may all be rounded the same way.
    MANY_ROWS: tl.constexpr = ROWS >= 32 and input.dtype.element_ty != tl.float32
    N = addressing.assume_divisible(N, TILE)
    input_strides = addressing.row_grid_strides(input_strides, row_grid, TILE)
    grad_out_strides = addressing.row_grid_strides(grad_out_strides, row_grid, TILE)
    grad_input_strides = addressing.row_grid_strides(grad_input_strides, row_grid, TILE)
    cta_group, part, columns, in_row, word_in_row = addressing.cta_columns(N, TILE)
    cta = (part, word_in_row)
    reciprocal_N = 1.0 / float64(N)
    tiles = tl.cdiv(M, ROWS)
    x_layout = addressing.row_layout(input_strides, row_grid, TILE)
    dy_layout = addressing.row_layout(grad_out_strides, row_grid, TILE)
    output_layout = addressing.row_layout(grad_input_strides, row_grid, TILE)
    inputs = (input, x_layout, grad_out, dy_layout, mean, rstd)
    weight_sum = tl.zeros((COLUMNS,), tl.float64)
    bias_sum = tl.zeros((COLUMNS,), tl.float64)
    WARP_WIDTH: tl.constexpr = 32 * TILE.vector * (COLUMNS // WORDS)  # adjacent columns that a warp holds
    w = to_float32(tl.load(weight + columns, mask=columns < N, other=0.0))[None, :] if weight is not None else None
    if TILE.cluster:
        exchange = cluster_exchange.init_warp_exchange()
        iteration = 0
    if TILE.parts == 1:  # noqa: SIM102 - one is known at compile time
        if tiles <= cta_groups:  # one tile for each CTA: the next launch may start where CTAs exit early
            pdl_launch_dependents()
    if TILE.prefetch:
        ahead = _load_tile(inputs, cta_group, cta, M, TILE, True)
    if LAG:
        zeros = tl.zeros((ROWS,), tl.float32)
        previous_x = tl.zeros((ROWS, WORDS), input.dtype.element_ty)
        previous = (previous_x, tl.zeros((ROWS, WORDS), grad_out.dtype.element_ty), zeros, zeros)
        pdl_wait()
    for tile in tl.range(cta_group, tiles + LAG * cta_groups, cta_groups, num_stages=TILE.stages):
        result_tile = tile - LAG * cta_groups
        load_tile = tile + cta_groups if TILE.prefetch else tile
        loaded = _load_tile(inputs, load_tile, cta, M, TILE, TILE.prefetch)
        if TILE.prefetch:
            loaded, ahead = ahead, loaded
        x, dy, row_mean, row_rstd = loaded
        rows = block_indices(tile, ROWS)
        row_mean = to_float32(row_mean)
        row_rstd = to_float32(row_rstd)
        g = unpack(dy, TILE.packing, FLOAT64)
        x_hat = (unpack(x, TILE.packing, FLOAT64) - row_mean[:, None]) * row_rstd[:, None]
        if TILE.masked:
            x_hat = tl.where(in_row, x_hat, 0.0)  # 0·Inf must not reach the sums
        if PHASE != APPLY:
            if WANT.weight:
                product = g * x_hat
                if WEIGHT_FLOAT64:
                    dy64 = unpack_acc_dtype(dy, TILE.packing)
                    product = dy64 * ((unpack_acc_dtype(x, TILE.packing) - row_mean[:, None]) * row_rstd[:, None])
                weight_sum += column_sums(product, MANY_ROWS)
            if WANT.bias:
                bias_sum += column_sums(unpack(dy, TILE.packing, WEIGHT_FLOAT64), MANY_ROWS)
        if WANT.input:
            if PHASE != APPLY:
                if weight is not None:
                    g *= unpack(w, UNPACKED, FLOAT64)
                sum_g, sum_gx = g, g * x_hat
                if TILE.cluster:
                    sum_g, sum_gx = cluster_exchange.sum_by_warp(sum_g, sum_gx, WARP_WIDTH, TILE.warps)
                    cluster_exchange.send_from_warps(sum_g, sum_gx, exchange, part, iteration, TILE.parts)
                else:
                    sum_g, sum_gx = sum_pair(sum_g, sum_gx, 1)
                if MAILBOX:
                    if FLOAT64:
                        mailbox.publish_float64(sum_g, sum_gx, slots + (rows * TILE.parts + part) * 2, rows < M)
                    else:
                        mailbox.publish(sum_g, sum_gx, slots + rows * TILE.parts + part, rows < M)
            if PHASE != REDUCE:
                rows, row_inside = addressing.tile_rows(result_tile, M, TILE, LAG)
                if LAG:
                    current, previous = previous, (x, dy, row_mean, row_rstd)
                    x, dy, row_mean, row_rstd = current
                if MAILBOX:
                    all_g, all_gx, _ = mailbox.receive_parts(slots, rows, row_inside, PHASE == FUSED, FLOAT64, TILE)
                    mean_g = tl.sum(all_g, axis=1) * reciprocal_N
                    mean_gx = tl.sum(all_gx, axis=1) * reciprocal_N
                    if not FLOAT64:
                        mean_g = mean_g.to(tl.float32)
                        mean_gx = mean_gx.to(tl.float32)
                    mean_g = block_rematerialization(mean_g)
                    mean_gx = block_rematerialization(mean_gx)
                else:
                    if TILE.cluster:
                        sum_g, sum_gx = cluster_exchange.sum_received_from_warps(
                            exchange, iteration, ROWS, TILE.parts, TILE.warps
                        )
                        iteration += 1
                    mean_g = sum_g.to(tl.float64) * reciprocal_N
                    mean_gx = sum_gx.to(tl.float64) * reciprocal_N
                if TILE.cluster:
                    mean_g = cluster_exchange.expand_to_columns(mean_g, COLUMNS, WARP_WIDTH)
                    mean_gx = cluster_exchange.expand_to_columns(mean_gx, COLUMNS, WARP_WIDTH)
                else:
                    mean_g, mean_gx = mean_g[:, None], mean_gx[:, None]
                dy_values, x_values = unpack(dy, TILE.packing, FLOAT64), unpack(x, TILE.packing, FLOAT64)
                result = input_gradient(dy_values, x_values, row_mean[:, None], row_rstd[:, None], w, mean_g, mean_gx)
                addressing.store_tile(grad_input, output_layout, result_tile, cta, result, row_inside, TILE)
    if PHASE != APPLY:
        target = partial + int64(cta_group) * N + columns
        store_partials(target, cta_groups, N, weight_sum, bias_sum, columns < N, WANT)


@triton.jit
def _moments_from_cluster(received, N, reciprocal_N, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Merge the moments that the CTAs of a cluster have sent, of which all but the last hold COLUMNS columns."""
    last_count = float64(N - (PARTS - 1) * COLUMNS)
    last_sum, squares = cluster_exchange.received_from(PARTS - 1, received)
    sums = last_sum
    for part in tl.static_range(PARTS - 1):
        part_sum, part_squares = cluster_exchange.received_from(part, received)
        sums += part_sum
        squares += part_squares
    row_mean = divide(sums, float64(N), reciprocal_N)
    deviation = last_sum - row_mean * last_count
    squares += deviation * deviation * (1.0 / last_count)
    for part in tl.static_range(PARTS - 1):
        part_sum, _ = cluster_exchange.received_from(part, received)
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
    MAILBOX: tl.constexpr = TILE.parts > 1 and not TILE.cluster
    LAG: tl.constexpr = 1 if MAILBOX and PHASE == FUSED else 0
    N = addressing.assume_divisible(N, TILE)
    input_strides = addressing.row_grid_strides(input_strides, row_grid, TILE)
    output_strides = addressing.row_grid_strides(output_strides, row_grid, TILE)
    cta_group, part, _, in_row, word_in_row = addressing.cta_columns(N, TILE)
    cta = (part, word_in_row)
    x_layout = addressing.row_layout(input_strides, row_grid, TILE)
    output_layout = addressing.row_layout(output_strides, row_grid, TILE)
    eps = float64_from_bits(eps_bits)
    row_count, cta_count, part_counts = addressing.column_counts(N, part, TILE)
    _, reciprocal_N = row_count
    loaded_weight = addressing.load_columns(weight, part, N, TILE) if weight is not None else None
    loaded_bias = addressing.load_columns(bias, part, N, TILE) if bias is not None else None
    if LAG:
        previous_x = tl.zeros((ROWS, WORDS), input.dtype.element_ty)
        pdl_wait()
    if TILE.cluster:
        exchange = cluster_exchange.init_cta_exchange()
        iteration = 0
    if TILE.prefetch:
        next_x = addressing.load_tile(input, x_layout, cta_group, cta, M, TILE)
    for tile in tl.range(cta_group, tl.cdiv(M, ROWS) + LAG * cta_groups, cta_groups, num_stages=TILE.stages):
        result_tile = tile - LAG * cta_groups
        load_tile = tile + cta_groups if TILE.prefetch else tile
        x = addressing.load_tile(input, x_layout, load_tile, cta, M, TILE)
        if TILE.prefetch:
            x, next_x = next_x, x
        rows = block_indices(tile, ROWS)
        if PHASE != APPLY:
            values = unpack_float32(x, TILE.packing)
            if FLOAT64:
                values = values.to(tl.float64)
            total, part_mean, squares = row_moments(values, in_row, cta_count, SEGMENTS, not MAILBOX, TILE)
            if TILE.cluster:
                cluster_exchange.send_to_ctas(total, squares, exchange, part, iteration, ROWS, TILE.parts)
            elif MAILBOX:
                mailbox.publish_float64(total, squares, slots + (rows * TILE.parts + part) * 2, rows < M)
        if PHASE != REDUCE:
            rows, row_inside = addressing.tile_rows(result_tile, M, TILE, LAG)
            if LAG:
                x, previous_x = previous_x, x
            if TILE.cluster:
                received = cluster_exchange.wait_for_ctas(exchange, iteration, ROWS, TILE.parts)
                row_mean, squares = _moments_from_cluster(received, N, reciprocal_N, TILE.columns, TILE.parts)
                iteration += 1
            elif MAILBOX:
                counts = (part_counts, 1.0 / part_counts)
                row_mean, squares = mailbox.receive_moments(
                    slots, rows, row_inside, counts, row_count, PHASE == FUSED, TILE
                )
            else:
                row_mean = part_mean
            row_rstd = 1.0 / tl.sqrt(nan_where_infinite(squares) * reciprocal_N + eps)
            w = addressing.unpack_columns(loaded_weight, TILE) if weight is not None else None
            b = addressing.unpack_columns(loaded_bias, TILE) if bias is not None else None
            values = unpack_float32(x, TILE.packing)
            if FLOAT64:
                values = values.to(tl.float64)
            result = normalize(values, row_mean[:, None], row_rstd[:, None], w, b)
            addressing.store_tile(output, output_layout, result_tile, cta, result, row_inside, TILE)
            first_part = row_inside & (part == 0)
            if mean is not None:
                store_rounded(mean + rows * mean_stride, row_mean, first_part)
            if rstd is not None:
                store_rounded(rstd + rows * rstd_stride, row_rstd, first_part)
