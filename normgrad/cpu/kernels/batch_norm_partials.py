"""BatchNorm: the partial sums of chunks, reduced to statistics; and coefficients from parameters and statistics.

32 channels at a time. Statistics are float64, coefficients float32, both in lane order. Lanes without a channel hold
zeros.
"""

import numpy as np

from normgrad.cpu.compile.jit import device
from normgrad.cpu.intrinsics.vectors import (
    narrow,
    not_below,
    power_of_two,
    saturated,
    splat_f32,
    splat_f64,
    square_roots,
    vload,
    vstore,
    vstore_f64,
    widen,
)
from normgrad.cpu.kernels.common.lanes import load_element, to_lanes
from normgrad.cpu.kernels.common.reduce import merge_partials
from normgrad.cpu.limits import SMALLEST_M2
from normgrad.cpu.tags import F32


@device
def _statistics(desc, lane):
    size = splat_f64(np.float64(desc.samples * desc.positions))
    total, squares = merge_partials(desc, 0, desc.samples, lane)
    # Where float32 squares underflow, M2 may be negative, and invstd must be finite: with eps 0 it is Inf for equal
    # elements alone. Where they overflow, it must be NaN, not 0.
    variance = not_below(squares, splat_f64(SMALLEST_M2)) / size
    variance = variance + (variance - variance)
    vstore_f64(desc.statistics, lane, total / size)
    invstd = splat_f64(1.0) / square_roots(variance + splat_f64(desc.eps))
    vstore_f64(desc.statistics, desc.padded_channels + lane, invstd)


@device
def reduce_moments(desc, block):
    """Reduce the partial moments of 32 channels to their mean and invstd: all means come first, then all invstds."""
    _statistics(desc, 32 * block)
    _statistics(desc, 32 * block + 16)


@device
def _ordered(dtype, columns, desc, vector, absent, target):
    to_lanes(dtype, columns, vector, absent, target, 0, desc.padded_channels, desc.channels)


@device
def sum_coefficients(dtype, columns, desc):
    """Store the coefficients of sums of grad_out*(x - mean): scales of 1 and the negative means; and the invstds."""
    target, pitch = desc.coefficients, desc.padded_channels
    _ordered(dtype, columns, desc, desc.mean, 0.0, target + 4 * pitch)
    _ordered(dtype, columns, desc, desc.rstd, 0.0, target + 8 * pitch)
    for lane in range(0, pitch, 16):
        vstore(F32, target, lane, splat_f32(np.float32(1)))
        vstore(F32, target, pitch + lane, -vload(F32, target, pitch + lane))


@device
def gradient_coefficients(dtype, columns, desc):
    """Store the coefficients of gradients, from the statistics and sums given."""
    target, plane, total = desc.coefficients, 4 * desc.padded_channels, 0.0
    for i in range(desc.counts):
        total += load_element(desc.counter, i)
    count = splat_f64(total)
    shifts, factors, means = target + plane, target + 2 * plane, target + 3 * plane
    scales, posts = target + 4 * plane, target + 5 * plane
    _ordered(dtype, columns, desc, desc.mean, 0.0, shifts)
    _ordered(dtype, columns, desc, desc.sum_dy_xmu, 0.0, factors)
    _ordered(dtype, columns, desc, desc.sum_dy, 0.0, means)
    _ordered(dtype, columns, desc, desc.rstd, 0.0, scales)
    _ordered(dtype, columns, desc, desc.weight, 1.0, posts)
    for lane in range(0, desc.padded_channels, 16):
        mean, invstd = widen(vload(F32, shifts, lane)), widen(vload(F32, scales, lane))
        last = widen(vload(F32, posts, lane)) * invstd
        pre = power_of_two(last, splat_f64(0.0))
        coefficient = invstd * invstd * (widen(vload(F32, factors, lane)) / count) * pre
        scale = power_of_two(coefficient, mean)
        vstore(F32, target, lane, narrow(scale))
        vstore(F32, shifts, lane, narrow(-(mean * scale)))
        vstore(F32, factors, lane, narrow(saturated(coefficient / scale)))
        vstore(F32, means, lane, narrow(widen(vload(F32, means, lane)) / count * pre))
        vstore(F32, scales, lane, narrow(pre))
        vstore(F32, posts, lane, narrow(saturated(last / pre)))


@device
def output_coefficients(dtype, columns, desc):
    """Store the coefficients of outputs, from the statistics given."""
    target, plane = desc.coefficients, 4 * desc.padded_channels
    shifts, factors = target + plane, target + 2 * plane
    _ordered(dtype, columns, desc, desc.rstd, 0.0, target)
    _ordered(dtype, columns, desc, desc.mean, 0.0, shifts)
    _ordered(dtype, columns, desc, desc.weight, 1.0, factors)
    _ordered(dtype, columns, desc, desc.bias, 0.0, target + 3 * plane)
    for lane in range(0, desc.padded_channels, 16):
        mean, coefficient = widen(vload(F32, shifts, lane)), widen(vload(F32, target, lane))
        coefficient = coefficient * widen(vload(F32, factors, lane))
        scale = power_of_two(coefficient, mean)
        vstore(F32, target, lane, narrow(scale))
        vstore(F32, shifts, lane, narrow(-(mean * scale)))
        vstore(F32, factors, lane, narrow(saturated(coefficient / scale)))
