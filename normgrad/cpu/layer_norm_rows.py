"""LayerNorm backward: what is done once for a row, GROUP rows at a time; and rows in float64."""

import numpy as np

from normgrad.cpu.copies import load_coded
from normgrad.cpu.jit import device, in_place
from normgrad.cpu.kinds import F32
from normgrad.cpu.memory import load, load_f64, round_for, store, store_f64
from normgrad.cpu.pairs import is_bfloat
from normgrad.cpu.row_sizes import (
    EXACT,
    FINE,
    FIRST_SUMS,
    GROUP,
    MEANS,
    OFFSETS,
    RSTDS,
    SECOND_SUMS,
    SEGMENT,
    SLOPES,
    SUMS,
)
from normgrad.cpu.rows import lane_of_column
from normgrad.cpu.vectors import (
    all_between_f64,
    magnitude,
    narrow,
    splat_f64,
    vload,
    vload_f64,
    vstore,
    vstore_f64,
    widen,
)

# Outside these a float32 intermediate may be rounded as a subnormal, or overflow where the formula does not: float64.
SMALLEST, LARGEST = 2.0**-80, 2.0**100
SMALLEST_RSTD, LARGEST_RSTD = 2.0**-60, 2.0**27
SMALLEST_SLOPE, LARGEST_SLOPE = 2.0**-110, 2.0**110


@device
def begin_scratch(scratch):
    """Numbers that pass for a row's, where there is none."""
    for at in range(0, SUMS, 64):
        vstore(F32, scratch + at, 0, narrow(splat_f64(1.0)))
    for at in range(FIRST_SUMS, FINE, 128):
        vstore_f64(scratch + at, 0, splat_f64(1.0))


@device
def load_statistics(code, means, rstds, row, rows, scratch, r):
    """mean and rstd of rows from `row` on, to the scratch from the group's row r on."""
    if code == 0 and rows == GROUP:
        vstore(F32, scratch + MEANS, r, vload(F32, means, row))
        vstore(F32, scratch + RSTDS, r, vload(F32, rstds, row))
        return
    for i in range(rows):
        store(F32, scratch + MEANS, r + i, load_coded(code, means, row + i))
        store(F32, scratch + RSTDS, r + i, load_coded(code, rstds, row + i))


@in_place
def _all_in_range(kind, s1, s2, rstd, per_column):
    """As _is_in_range, of 16 rows."""
    largest = (magnitude(s1) + magnitude(s2 * rstd)) * per_column
    fine = all_between_f64(largest, SMALLEST, LARGEST) and all_between_f64(s2 * per_column, 0.0, LARGEST)
    fine = fine and all_between_f64(largest * rstd * rstd, SMALLEST_SLOPE, LARGEST_SLOPE)
    return fine and (not is_bfloat(kind) or all_between_f64(largest * rstd, SMALLEST, np.inf))


@in_place
def _is_in_range(kind, s1, s2, rstd, per_column):
    """Whether a row's terms are neither too large nor too small for float32."""
    largest = (abs(s1) + abs(s2 * rstd)) * per_column
    fine = SMALLEST <= largest <= LARGEST and abs(s2 * per_column) <= LARGEST
    fine = fine and SMALLEST_SLOPE <= largest * rstd * rstd <= LARGEST_SLOPE
    # Results that are subnormal numbers are rounded to bfloat16 as zeros: no loss beside terms of this size.
    return fine and (not is_bfloat(kind) or abs(largest * rstd) >= SMALLEST)


@device
def parameters_of_all(kind, scratch, r, n, want_input):
    """Fill in the parameters of rows from r on, a vector of them; False where float32 is not enough for one."""
    rstd, per_column = widen(vload(F32, scratch + RSTDS, r)), splat_f64(1.0 / n)
    s1, s2 = vload_f64(scratch + FIRST_SUMS, r), vload_f64(scratch + SECOND_SUMS, r)
    fine = all_between_f64(rstd, SMALLEST_RSTD, LARGEST_RSTD)
    if not (fine and (not want_input or _all_in_range(kind, s1, s2, rstd, per_column))):
        return False
    vstore(F32, scratch + OFFSETS, r, narrow(-(s1 * per_column) * rstd))
    vstore(F32, scratch + SLOPES, r, narrow(-(s2 * rstd * per_column) * rstd * rstd))
    return True


@device
def is_zero(kind, address, n):
    """Whether a row holds zeros alone, as the gradient of a masked token does."""
    for j in range(n):
        if load(kind, address, j) != 0:
            return False
    return True


@device
def exact_segment_sums(kind, grad_out, x, weight, first, last, mean, rstd):
    s1, s2 = 0.0, 0.0
    for j in range(first, last):
        g = np.float64(load(kind, grad_out, j)) * load(F32, weight, lane_of_column(kind, j))
        s1 += g
        s2 += g * ((np.float64(load(kind, x, j)) - mean) * rstd)
    return s1, s2


@device
def parameters_of(kind, scratch, r, n, grad_out, x, weight, want_input):
    """The same for one row; where float32 is not enough its sums are made again, in float64."""
    mean, rstd = np.float64(load(F32, scratch + MEANS, r)), np.float64(load(F32, scratch + RSTDS, r))
    s1, s2, per_column = load_f64(scratch + FIRST_SUMS, r), load_f64(scratch + SECOND_SUMS, r), 1.0 / n
    fine = SMALLEST_RSTD <= abs(rstd) <= LARGEST_RSTD
    if want_input and fine and not _is_in_range(kind, s1, s2, rstd, per_column):
        fine = s1 == 0 and s2 == 0 and is_zero(kind, grad_out, n)
    if want_input and not fine:
        s1, s2 = 0.0, 0.0
        for first in range(0, n, SEGMENT):
            a, b = exact_segment_sums(kind, grad_out, x, weight, first, min(n, first + SEGMENT), mean, rstd)
            s1, s2 = s1 + a, s2 + b
        store_f64(scratch + EXACT, 2 * r, s1 * per_column)
        store_f64(scratch + EXACT, 2 * r + 1, s2 * per_column)
    store(F32, scratch + OFFSETS, r, np.float32(-(s1 * per_column) * rstd))
    store(F32, scratch + SLOPES, r, np.float32(-(s2 * rstd * per_column) * rstd * rstd))
    store_f64(scratch + FINE, r, np.float64(fine))
    return fine


@device
def exact_row(kind, first, last, grad_out, x, grad_input, weight, scratch, r, dw, db, dw_first, want_input, want_sums):
    """A row in float64, for data near the ends of float32's range, NaN and Inf."""
    m, s = np.float64(load(F32, scratch + MEANS, r)), np.float64(load(F32, scratch + RSTDS, r))
    c1, c2 = load_f64(scratch + EXACT, 2 * r), load_f64(scratch + EXACT, 2 * r + 1)
    for j in range(first, last):
        lane = lane_of_column(kind, j)
        d, h = np.float64(load(kind, grad_out, j)), (np.float64(load(kind, x, j)) - m) * s
        if want_input:
            store(kind, grad_input, j, round_for(kind, s * (d * load(F32, weight, lane) - c1 - h * c2)))
        if want_sums:
            store_f64(dw, lane - dw_first, load_f64(dw, lane - dw_first) + d * h)
            store_f64(db, lane - dw_first, load_f64(db, lane - dw_first) + d)
