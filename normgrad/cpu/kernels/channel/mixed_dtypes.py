"""BatchNorm on tensors of different dtypes: in float64, an element at a time, for any strides."""

import numpy as np

from normgrad.cpu.compile.jit import device
from normgrad.cpu.intrinsics.memory import load_f64, store_f64
from normgrad.cpu.kernels.common.lanes import load_element, load_element_or
from normgrad.cpu.kernels.copy import load_by_code, store_rounded_once


@device
def _index(tensor, n, c, position):
    return n * tensor.sample_stride + c * tensor.channel_stride + position * tensor.position_stride


@device
def _element(tensor, n, c, position):
    return np.float64(load_by_code(tensor.dtype, tensor.address, _index(tensor, n, c, position)))


@device
def _store(tensor, n, c, position, value):
    store_rounded_once(tensor.dtype, tensor.address, _index(tensor, n, c, position), value)


@device
def total_count(desc):
    """Return the sum of all counts."""
    count = 0.0
    for i in range(desc.counts):
        count += load_element(desc.counter, i)
    return count


@device
def mixed_means(desc):
    """Store sum_dy/n and sum_dy_xmu/n of every channel as its statistics."""
    count = total_count(desc)
    for c in range(desc.channels):
        store_f64(desc.statistics, 2 * c, load_element(desc.sum_dy, c) / count)
        store_f64(desc.statistics, 2 * c + 1, load_element(desc.sum_dy_xmu, c) / count)


@device
def mixed_sums(desc, n, c, first, last):
    """Sum grad_out and grad_out*(x - mean) over some positions of a channel."""
    mean, total, total_x = load_element(desc.mean, c), 0.0, 0.0
    for position in range(first, last):
        g = _element(desc.grad_out, n, c, position)
        total += g
        total_x += g * (_element(desc.input, n, c, position) - mean)
    return total, total_x


@device
def mixed_gradient(desc, n, c, first, last):
    """Compute grad_input at some positions of a channel."""
    mean, invstd = load_element(desc.mean, c), load_element(desc.rstd, c)
    weight = load_element_or(desc.weight, c, 1.0)
    mean_dy, mean_dy_xmu = load_f64(desc.statistics, 2 * c), load_f64(desc.statistics, 2 * c + 1)
    for position in range(first, last):
        g, x = _element(desc.grad_out, n, c, position), _element(desc.input, n, c, position) - mean
        value = (g - mean_dy - x * (invstd * invstd) * mean_dy_xmu) * invstd * weight
        _store(desc.result, n, c, position, value)


@device
def mixed_output(desc, n, c, first, last):
    """Compute the output at some positions of a channel."""
    mean, invstd = load_element(desc.mean, c), load_element(desc.rstd, c)
    weight, bias = load_element_or(desc.weight, c, 1.0), load_element_or(desc.bias, c, 0.0)
    for position in range(first, last):
        value = (_element(desc.input, n, c, position) - mean) * invstd * weight + bias
        _store(desc.result, n, c, position, value)
