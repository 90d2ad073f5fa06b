"""GroupNorm and BatchNorm in float64, an element at a time, for any strides and dtypes.

What the fast kernels turn to for NaN, Inf and numbers near the ends of float32's range, and what computes calls that
mix dtypes.
"""

import numpy as np

from normgrad.cpu.channel_fields import BATCH, BIAS, GRAD_OUT, INPUT, MEAN, RECORDS, RESULT, RSTD, WEIGHT
from normgrad.cpu.channels import statistic_of, vector_or, vector_value
from normgrad.cpu.copies import load_coded, store_exact
from normgrad.cpu.jit import device
from normgrad.cpu.memory import load_f64


@device
def element(desc, tensor, n, c, place):
    index = n * desc[tensor + 1] + c * desc[tensor + 2] + place * desc[tensor + 3]
    return np.float64(load_coded(desc[tensor + 4], desc[tensor], index))


@device
def put(desc, n, c, place, value):
    index = n * desc[RESULT + 1] + c * desc[RESULT + 2] + place * desc[RESULT + 3]
    store_exact(desc[RESULT + 4], desc[RESULT], index, value)


@device
def exact_gradient_sums(desc, n, c, first, last, weight, rstd):
    """sum(g), sum(g·(x − mean)·rstd) over places of a channel, g = weight·grad_out."""
    mean = vector_value(desc, MEAN, statistic_of(desc, n, c))
    total, total_x = 0.0, 0.0
    for place in range(first, last):
        g = weight * element(desc, GRAD_OUT, n, c, place)
        total += g
        total_x += g * ((element(desc, INPUT, n, c, place) - mean) * rstd)
    return total, total_x


@device
def exact_gradient(desc, n, c, first, last):
    """grad_input of some places of a channel; the record holds the means of g and of g·(x − mean)·rstd."""
    statistic = statistic_of(desc, n, c)
    mean, rstd = vector_value(desc, MEAN, statistic), vector_value(desc, RSTD, statistic)
    weight = vector_or(desc, WEIGHT, c, 1.0)
    mean_g, mean_gx = load_f64(desc[RECORDS], 2 * statistic), load_f64(desc[RECORDS], 2 * statistic + 1)
    for place in range(first, last):
        g, x = element(desc, GRAD_OUT, n, c, place), element(desc, INPUT, n, c, place) - mean
        if desc[BATCH]:
            put(desc, n, c, place, (g - mean_g - x * (rstd * rstd) * mean_gx) * rstd * weight)
        else:
            put(desc, n, c, place, rstd * (weight * g - mean_g - x * rstd * mean_gx))


@device
def exact_moments(desc, n, c, first, last):
    """sum(x), sum((x − their mean)²) over places of a channel."""
    total, squares = 0.0, 0.0
    for place in range(first, last):
        total += element(desc, INPUT, n, c, place)
    mean = total / (last - first)
    for place in range(first, last):
        distance = element(desc, INPUT, n, c, place) - mean
        squares += distance * distance
    return total, squares


@device
def exact_normalised(desc, n, c, first, last):
    """The output at some places of a channel; the record holds mean and rstd."""
    statistic = statistic_of(desc, n, c)
    mean, rstd = load_f64(desc[RECORDS], 2 * statistic), load_f64(desc[RECORDS], 2 * statistic + 1)
    weight, bias = vector_or(desc, WEIGHT, c, 1.0), vector_or(desc, BIAS, c, 0.0)
    for place in range(first, last):
        put(desc, n, c, place, (element(desc, INPUT, n, c, place) - mean) * rstd * weight + bias)
