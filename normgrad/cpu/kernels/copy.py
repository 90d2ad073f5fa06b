"""The kernels `copy` and `fill`, and elements of a dtype that is known at run time."""

import numpy as np

from normgrad.cpu.compile.jit import device, inline, kernel
from normgrad.cpu.descriptors import COPY_RANK, Copy, Fill
from normgrad.cpu.intrinsics.memory import load, round_for, store
from normgrad.cpu.intrinsics.vectors import vload, vstore
from normgrad.cpu.kernels.common.work import items_of
from normgrad.cpu.tags import BF16, CODE_F16, CODE_F32, F16, F32


@inline
def load_by_code(get, code, address, index):
    """Load by `load` or `vload` as a dtype that is known at run time."""
    if code == CODE_F32:
        return get(F32, address, index)
    return get(F16, address, index) if code == CODE_F16 else get(BF16, address, index)


@inline
def store_by_code(put, code, address, index, value):
    """Store float32 by `store` or `vstore` as a dtype that is known at run time."""
    if code == CODE_F32:
        put(F32, address, index, value)
    elif code == CODE_F16:
        put(F16, address, index, value)
    else:
        put(BF16, address, index, value)


@device
def store_rounded_once(code, address, index, value):
    """Store a float64 as an element of a dtype known at run time."""
    if code == CODE_F32:
        store(F32, address, index, np.float32(value))
    else:
        store_by_code(store, code, address, index, round_for(F16, value))


@device
def _copy_line(desc, line):
    """Copy the elements along the last axis; ``line`` counts through the other axes."""
    source, target, rest = 0, 0, line
    for axis in range(COPY_RANK - 2, -1, -1):
        size = desc.sizes[axis]
        index = rest % size
        rest //= size
        source += index * desc.source.strides[axis]
        target += index * desc.target.strides[axis]
    source_step, target_step = desc.source.strides[COPY_RANK - 1], desc.target.strides[COPY_RANK - 1]
    source_code, target_code = desc.source.dtype, desc.target.dtype
    whole = desc.length & ~15 if source_step == 1 and target_step == 1 else 0
    for i in range(0, whole, 16):
        values = load_by_code(vload, source_code, desc.source.address, source + i)
        store_by_code(vstore, target_code, desc.target.address, target + i, values)
    for i in range(whole, desc.length):
        value = load_by_code(load, source_code, desc.source.address, source + i * source_step)
        store_by_code(store, target_code, desc.target.address, target + i * target_step, value)


@kernel
def copy(desc: Copy):
    """Copy a strided tensor, with a conversion of its dtype."""
    for line in items_of(desc.phase, desc.lines, desc.lines_per_take, 0):
        _copy_line(desc, line)


@kernel
def fill(desc: Fill):
    """Store one value in every element of a vector."""
    for i in range(desc.count):
        store_rounded_once(desc.target.dtype, desc.target.address, i * desc.target.stride, desc.value)
