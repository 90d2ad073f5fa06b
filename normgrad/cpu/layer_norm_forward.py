"""LayerNorm forward: `layer_norm(desc, kind)`: y, mean and rstd of blocks of rows."""

import numpy as np

from normgrad.cpu.copies import load_coded, store_coded
from normgrad.cpu.jit import device, in_place, kernel
from normgrad.cpu.kinds import F32
from normgrad.cpu.layer_norm_forward_fields import (
    BIAS,
    BIAS_STRIDE,
    BLOCK_ROWS,
    BLOCKS,
    COLUMNS,
    DONE,
    DONE_VECTORS,
    EPS_BITS,
    INPUT,
    MEAN,
    MEAN_CODE,
    NEXT,
    NEXT_VECTORS,
    ORDERED_BIAS,
    ORDERED_WEIGHT,
    OUTER_SHAPE,
    OUTPUT,
    ROWS,
    RSTD,
    RSTD_CODE,
    SCRATCH,
    SCRATCH_SIZE,
    SLOT,
    SLOTS,
    STAGED,
    STREAM,
    VECTORS_CODE,
    WEIGHT,
    WEIGHT_STRIDE,
)
from normgrad.cpu.memory import fetch_add, item_size, load, load_f64, round_for, start_of, store, wait_until
from normgrad.cpu.pairs import load_pair, store_pair, stream_pair
from normgrad.cpu.row_sizes import STAGED_ROWS
from normgrad.cpu.rows import gather_rows, lane_of_column, row_offset, scatter_rows
from normgrad.cpu.vectors import fma, hsum, scaled, splat_f32, splat_f64, vload, widen

SMALLEST, LARGEST = 2.0**-80, 2.0**100


@in_place
def _moments(kind, x, j, shift, total):
    """(total, squares) of 32 columns; the sum goes to float64 at once, since y near 0 shows every error of the mean."""
    v = load_pair(kind, x, j)
    a, b = v[0] - shift, v[1] - shift
    return total + (widen(v[0]) + widen(v[1])), fma(b, b, a * a)


@device
def shifted_moments(kind, x, n, shift):
    """sum(x - shift) in float64, sum((x - shift)^2) in float32 trees of 16 terms a lane and float64 beyond."""
    c = splat_f32(shift)
    s, q = splat_f64(0.0), splat_f64(0.0)
    j = 0
    while j + 256 <= n:
        s, b0 = _moments(kind, x, j, c, s)
        s, b1 = _moments(kind, x, j + 32, c, s)
        s, b2 = _moments(kind, x, j + 64, c, s)
        s, b3 = _moments(kind, x, j + 96, c, s)
        b = (b0 + b1) + (b2 + b3)
        s, b0 = _moments(kind, x, j + 128, c, s)
        s, b1 = _moments(kind, x, j + 160, c, s)
        s, b2 = _moments(kind, x, j + 192, c, s)
        s, b3 = _moments(kind, x, j + 224, c, s)
        q = q + widen(b + ((b0 + b1) + (b2 + b3)))
        j += 256
    while j + 32 <= n:
        s, b0 = _moments(kind, x, j, c, s)
        q = q + widen(b0)
        j += 32
    total, squares = hsum(s) - np.float64(shift) * j, hsum(q)
    for i in range(j, n):
        d = np.float64(load(kind, x, i)) - shift
        total += d
        squares += d * d
    return total, squares


@device
def exact_statistics(kind, x, n):
    total = 0.0
    for j in range(n):
        total += load(kind, x, j)
    mean = total / n
    squares = 0.0
    for j in range(n):
        d = load(kind, x, j) - mean
        squares += d * d
    return mean, squares / n


@device
def row_statistics(kind, x, n):
    """(mean, variance) in float64. One pass about a guess at the mean; again where the guess was poor."""
    head = min(n, 32)
    guess = 0.0
    if n >= 32:
        v = load_pair(kind, x, 0)
        guess = np.float64(hsum(v[0] + v[1]))
    else:
        for j in range(head):
            guess += load(kind, x, j)
    shift = np.float32(guess / head)
    for _ in range(3):
        s, q = shifted_moments(kind, x, n, shift)
        s, q = s / n, q / n
        variance = q - s * s
        if not (SMALLEST <= q <= LARGEST):
            break
        if q <= 2.0 * variance:
            return shift + s, variance
        shift = np.float32(shift + s)
    return exact_statistics(kind, x, n)


@device
def normalise_row(kind, x, y, n, weight, bias, mean, rstd, stream):
    """y = ((x - mean)*rstd + rest)*weight + bias; the rest is the mean's second part, for rows far from zero."""
    high, factor = np.float32(mean), np.float32(rstd)
    rest, low = np.float32((high - mean) * rstd), np.float32(rstd - factor)
    vh, vr, vc, vl = splat_f32(high), splat_f32(factor), splat_f32(rest), splat_f32(low)
    j = 0
    while j + 32 <= n:
        v = load_pair(kind, x, j)
        a = fma(scaled(kind, v[0] - vh, vr, vl, vc), vload(F32, weight, j), vload(F32, bias, j))
        b = fma(scaled(kind, v[1] - vh, vr, vl, vc), vload(F32, weight, j + 16), vload(F32, bias, j + 16))
        if stream:
            stream_pair(kind, y, j, a, b)
        else:
            store_pair(kind, y, j, a, b)
        j += 32
    for i in range(j, n):
        lane = lane_of_column(kind, i)
        t = scaled(kind, load(kind, x, i) - high, factor, low, rest)
        store(kind, y, i, fma(t, load(F32, weight, lane), load(F32, bias, lane)))


@device
def exact_normalise(kind, x, y, n, weight, bias, mean, rstd):
    for i in range(n):
        lane = lane_of_column(kind, i)
        t = (load(kind, x, i) - mean) * rstd
        store(kind, y, i, round_for(kind, t * load(F32, weight, lane) + load(F32, bias, lane)))


@device
def forward_row(kind, desc, row, x, y, eps):
    n = desc[COLUMNS]
    mean, variance = row_statistics(kind, x, n)
    rstd = 1.0 / np.sqrt(variance + eps)
    if desc[MEAN] != 0:
        store_coded(desc[MEAN_CODE], desc[MEAN], row, np.float32(mean))
    if desc[RSTD] != 0:
        store_coded(desc[RSTD_CODE], desc[RSTD], row, np.float32(rstd))
    if SMALLEST <= variance <= LARGEST and abs(mean) <= LARGEST:
        normalise_row(kind, x, y, n, desc[ORDERED_WEIGHT], desc[ORDERED_BIAS], mean, rstd, desc[STREAM] != 0)
    else:
        exact_normalise(kind, x, y, n, desc[ORDERED_WEIGHT], desc[ORDERED_BIAS], mean, rstd)


@device
def order_vectors(kind, desc, p):
    n = desc[COLUMNS]
    if fetch_add(p, NEXT_VECTORS, 1) == 0:
        for j in range(n):
            lane = lane_of_column(kind, j)
            w = load_coded(desc[VECTORS_CODE], desc[WEIGHT], j * desc[WEIGHT_STRIDE]) if desc[WEIGHT] else np.float32(1)
            b = load_coded(desc[VECTORS_CODE], desc[BIAS], j * desc[BIAS_STRIDE]) if desc[BIAS] else np.float32(0)
            # The pairs' rounding to bfloat16 keeps NaNs without low payload bits alone.
            store(F32, desc[ORDERED_WEIGHT], lane, w if w == w else np.float32(np.nan))
            store(F32, desc[ORDERED_BIAS], lane, b if b == b else np.float32(np.nan))
        fetch_add(p, DONE_VECTORS, 1)
    wait_until(p, DONE_VECTORS, 1)


@kernel
def layer_norm(desc, kind):
    p = start_of(desc)
    slot = fetch_add(p, SLOT, 1)
    if slot >= desc[SLOTS]:
        return
    if desc[OUTPUT] % 64 != 0:
        desc[STREAM] = 0
    scratch = desc[SCRATCH] + slot * desc[SCRATCH_SIZE]
    order_vectors(kind, desc, p)
    n, size, blocks = desc[COLUMNS], item_size(kind), desc[BLOCKS]
    eps = load_f64(p, EPS_BITS)
    pitch = (n * size + 63) // 64 * 64
    while True:
        b = fetch_add(p, NEXT, 1)
        if b >= blocks:
            break
        row, last = b * desc[BLOCK_ROWS], min(desc[ROWS], (b + 1) * desc[BLOCK_ROWS])
        while row < last:
            inner = desc[OUTER_SHAPE + 2]
            rows = min(STAGED_ROWS, last - row, inner - row % inner)
            x = desc[INPUT] + row_offset(desc, OUTER_SHAPE, INPUT + 2, row)
            y = desc[OUTPUT] + row_offset(desc, OUTER_SHAPE, OUTPUT + 2, row)
            source, xp, yp = x, desc[INPUT + 4], desc[OUTPUT + 4]
            target = y
            if desc[STAGED]:
                gather_rows(kind, x, xp // size, desc[INPUT + 1], scratch, pitch, rows, n)
                source, xp, target, yp = scratch, pitch, scratch + STAGED_ROWS * pitch, pitch
            for r in range(rows):
                forward_row(kind, desc, row + r, source + r * xp, target + r * yp, eps)
            if desc[STAGED]:
                scatter_rows(kind, target, pitch, y, desc[OUTPUT + 4] // size, desc[OUTPUT + 1], rows, n)
            row += rows
        fetch_add(p, DONE, 1)
    wait_until(p, DONE, blocks)
