"""Lane order: small vectors into the order in which vectors of the data have them, and back.

Weights, coefficients and sums meet the data lane by lane. A pair of vectors of bfloat16 has the even elements in its
first vector and the odd ones in its second (:mod:`normgrad.cpu.intrinsics.pairs`), so arrays in the workspace that
meet such pairs (`paired`) are in the same order, 32 elements at a time. In rows of GroupNorm and BatchNorm a vector
holds positions of one channel, and channels keep their order.
"""

import numpy as np

from normgrad.cpu.compile.jit import device
from normgrad.cpu.intrinsics.memory import load, load_i32, store
from normgrad.cpu.intrinsics.pairs import code_of, is_bfloat16, load_ordered, load_pair, store_ordered, store_pair
from normgrad.cpu.intrinsics.vectors import narrow, splat_f32, vload, vstore
from normgrad.cpu.kernels.copy import load_by_code, store_rounded_once
from normgrad.cpu.tags import CODE_F32, CODE_I32, F32, F64


@device
def load_element(vector, index):
    """Return an element of a small vector, in float64."""
    if vector.dtype == CODE_I32:
        return np.float64(load_i32(vector.address, index * vector.stride))
    return np.float64(load_by_code(vector.dtype, vector.address, index * vector.stride))


@device
def store_element(vector, index, value):
    """Store an element of a small output, where it is wanted."""
    if vector.address != 0:
        store_rounded_once(vector.dtype, vector.address, index * vector.stride, value)


@device
def lane_of(dtype, paired, index):
    """Return where an element is in an array in lane order."""
    if paired and is_bfloat16(dtype):
        return (index & ~31) | ((index & 1) << 4) | ((index & 31) >> 1)
    return index


@device
def to_lanes(dtype, paired, vector, absent, target, first, last, count):
    """Store a vector, or a value where there is none, as float32 in lane order, with zeros from `count` on.

    `first` and `last` are multiples of 32.
    """
    whole, c = min(last, count & ~31), first
    if vector.address == 0:
        for lane in range(first, whole, 16):
            vstore(F32, target, lane, splat_f32(np.float32(absent)))
        c = max(first, whole)
    elif vector.stride == 1 and vector.dtype == CODE_F32:
        while c < whole:
            v = load_ordered(dtype, vector.address, c) if paired else load_pair(F32, vector.address, c)
            vstore(F32, target, c, v[0])
            vstore(F32, target, c + 16, v[1])
            c += 32
    elif vector.stride == 1 and vector.dtype == code_of(dtype) and paired:
        while c < whole:
            v = load_pair(dtype, vector.address, c)
            vstore(F32, target, c, v[0])
            vstore(F32, target, c + 16, v[1])
            c += 32
    for k in range(c, last):
        value = 0.0
        if k < count:
            value = load_element(vector, k) if vector.address != 0 else absent
        store(F32, target, lane_of(dtype, paired, k), np.float32(value))


@device
def from_lanes(dtype, paired, vector, first, last, source):
    """Store up to 32 elements of a small output, where it is wanted, from float64 in lane order.

    `first` is a multiple of 32, and `source` the address of its block of 32 lanes.
    """
    if vector.address == 0:
        return
    if vector.stride == 1 and vector.dtype == CODE_F32 and last - first == 32:
        low, high = narrow(vload(F64, source, 0)), narrow(vload(F64, source, 16))
        if paired:
            store_ordered(dtype, vector.address, first, low, high)
        else:
            store_pair(F32, vector.address, first, low, high)
        return
    for k in range(first, last):
        store_element(vector, k, load(F64, source, lane_of(dtype, paired, k - first)))
