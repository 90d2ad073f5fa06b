"""BatchNorm on tensors of different dtypes: in float64, an element at a time, for any strides."""

import numpy as np

from normgrad.cpu.compile.jit import device
from normgrad.cpu.fields.channel import (
    BIAS,
    CHANNELS,
    COUNTER,
    COUNTS,
    GRAD_OUT,
    INPUT,
    MEAN,
    RECORDS,
    RESULT,
    RSTD,
    SUM_DY,
    SUM_DY_XMU,
    WEIGHT,
)
from normgrad.cpu.intrinsics.memory import load_f64, store_f64
from normgrad.cpu.kernels.channel.access import vector_or, vector_value
from normgrad.cpu.kernels.copy import load_coded, store_exact


@device
def _element(desc, tensor, n, c, place):
    index = n * desc[tensor + 1] + c * desc[tensor + 2] + place * desc[tensor + 3]
    return np.float64(load_coded(desc[tensor + 4], desc[tensor], index))


@device
def _put(desc, n, c, place, value):
    index = n * desc[RESULT + 1] + c * desc[RESULT + 2] + place * desc[RESULT + 3]
    store_exact(desc[RESULT + 4], desc[RESULT], index, value)


@device
def total_count(desc):
    """The sum of all counts."""
    count = 0.0
    for i in range(desc[COUNTS]):
        count += vector_value(desc, COUNTER, i)
    return count


@device
def mixed_means(desc):
    """sum_dy/n and sum_dy_xmu/n of every channel, to the records."""
    count = total_count(desc)
    for c in range(desc[CHANNELS]):
        store_f64(desc[RECORDS], 2 * c, vector_value(desc, SUM_DY, c) / count)
        store_f64(desc[RECORDS], 2 * c + 1, vector_value(desc, SUM_DY_XMU, c) / count)


@device
def mixed_sums(desc, n, c, first, last):
    """Sum grad_out and grad_out·(x − mean) over some positions of a channel."""
    mean, total, total_x = vector_value(desc, MEAN, c), 0.0, 0.0
    for place in range(first, last):
        g = _element(desc, GRAD_OUT, n, c, place)
        total += g
        total_x += g * (_element(desc, INPUT, n, c, place) - mean)
    return total, total_x


@device
def mixed_gradient(desc, n, c, first, last):
    """grad_input at some positions of a channel."""
    mean, invstd, weight = vector_value(desc, MEAN, c), vector_value(desc, RSTD, c), vector_or(desc, WEIGHT, c, 1.0)
    mean_dy, mean_dy_xmu = load_f64(desc[RECORDS], 2 * c), load_f64(desc[RECORDS], 2 * c + 1)
    for place in range(first, last):
        g, x = _element(desc, GRAD_OUT, n, c, place), _element(desc, INPUT, n, c, place) - mean
        _put(desc, n, c, place, (g - mean_dy - x * (invstd * invstd) * mean_dy_xmu) * invstd * weight)


@device
def mixed_output(desc, n, c, first, last):
    """The output at some positions of a channel."""
    mean, invstd = vector_value(desc, MEAN, c), vector_value(desc, RSTD, c)
    weight, bias = vector_or(desc, WEIGHT, c, 1.0), vector_or(desc, BIAS, c, 0.0)
    for place in range(first, last):
        _put(desc, n, c, place, (_element(desc, INPUT, n, c, place) - mean) * invstd * weight + bias)
