"""The kernels `copy` and `fill`, and elements of a dtype that is known at run time."""

import numpy as np

from normgrad.cpu.compile.jit import device, inline, kernel
from normgrad.cpu.descriptors import COPY_RANK, Copy, Fill
from normgrad.cpu.intrinsics.memory import load, round_for, store
from normgrad.cpu.intrinsics.vectors import vload, vstore
from normgrad.cpu.kernels.common.work import finish_phase, take_next
from normgrad.cpu.tags import BF16, CODE_BF16, CODE_F16, CODE_F32, F16, F32, I32


@device
def load_by_code(code, address, index):
    """Load an element of a dtype known at run time, as float32."""
    if code == CODE_F32:
        return load(F32, address, index)
    if code == CODE_F16:
        return load(F16, address, index)
    if code == CODE_BF16:
        return load(BF16, address, index)
    return load(I32, address, index)


@device
def store_by_code(code, address, index, value):
    """Store a float32 as an element of a dtype known at run time."""
    if code == CODE_F32:
        store(F32, address, index, value)
    elif code == CODE_F16:
        store(F16, address, index, value)
    else:
        store(BF16, address, index, value)


@device
def store_rounded_once(code, address, index, value):
    """Store a float64 as an element of a dtype known at run time."""
    if code == CODE_F32:
        store(F32, address, index, np.float32(value))
    else:
        store_by_code(code, address, index, round_for(F16, value))


@inline
def _load_16(code, address, index):
    if code == CODE_F32:
        return vload(F32, address, index)
    return vload(F16, address, index) if code == CODE_F16 else vload(BF16, address, index)


@inline
def _store_16(code, address, index, values):
    if code == CODE_F32:
        vstore(F32, address, index, values)
    elif code == CODE_F16:
        vstore(F16, address, index, values)
    else:
        vstore(BF16, address, index, values)


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
        _store_16(target_code, desc.target.address, target + i, _load_16(source_code, desc.source.address, source + i))
    for i in range(whole, desc.length):
        value = load_by_code(source_code, desc.source.address, source + i * source_step)
        store_by_code(target_code, desc.target.address, target + i * target_step, value)


@kernel
def copy(desc: Copy):
    """Copy a strided tensor, with a conversion of its dtype."""
    items, done = (desc.lines + desc.lines_per_take - 1) // desc.lines_per_take, 0
    item = take_next(desc.phase)
    while item < items:
        for line in range(item * desc.lines_per_take, min(desc.lines, (item + 1) * desc.lines_per_take)):
            _copy_line(desc, line)
        done += 1
        item = take_next(desc.phase)
    finish_phase(desc.phase, done, items)


@kernel
def fill(desc: Fill):
    """Store one value in every element of a vector."""
    for i in range(desc.count):
        store_rounded_once(desc.target.dtype, desc.target.address, i * desc.target.stride, desc.value)
