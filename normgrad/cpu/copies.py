"""Copies between layouts and dtypes: small vectors to float32, awkwardly strided tensors to contiguous memory."""

from __future__ import annotations

import numpy as np

from normgrad.contract.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT32, DType
from normgrad.contract.view import View, contiguous_strides
from normgrad.cpu.axes import collapsed_together
from normgrad.cpu.jit import device, kernel
from normgrad.cpu.llvm import BF16, F16, F32, I32
from normgrad.cpu.memory import fetch_add, load, store, wait_until
from normgrad.cpu.steps import Place, Step

#: Dtypes as numbers in a descriptor, where a value is chosen at run time.
CODES: dict[DType, int] = {FLOAT32: 0, FLOAT16: 1, BFLOAT16: 2, INT32: 3}

_RANK = 8
(_TAKEN, _DONE, _SOURCE, _SOURCE_CODE, _TARGET, _TARGET_CODE, _LINES, _LENGTH, _GRAIN) = range(9)
_SIZES, _SOURCE_STRIDES, _TARGET_STRIDES = 9, 9 + _RANK, 9 + 2 * _RANK
_DESCRIPTOR_SIZE = 9 + 3 * _RANK
_SHARED_FROM = 1 << 16  # elements


@device
def load_coded(code, address, index):
    """An element of a dtype known at run time, as float32."""
    if code == 0:
        return load(F32, address, index)
    if code == 1:
        return load(F16, address, index)
    if code == 2:
        return load(BF16, address, index)
    return load(I32, address, index)


@device
def store_coded(code, address, index, value):
    """Store a float32 as an element of a dtype known at run time."""
    if code == 0:
        store(F32, address, index, value)
    elif code == 1:
        store(F16, address, index, value)
    else:
        store(BF16, address, index, value)


@device
def _copy_line(desc, line):
    """One run along the last axis; ``line`` counts through the other axes."""
    source, target, rest = 0, 0, line
    for axis in range(_RANK - 2, -1, -1):
        size = desc[_SIZES + axis]
        place = rest % size
        rest //= size
        source += place * desc[_SOURCE_STRIDES + axis]
        target += place * desc[_TARGET_STRIDES + axis]
    source_step, target_step = desc[_SOURCE_STRIDES + _RANK - 1], desc[_TARGET_STRIDES + _RANK - 1]
    source_code, target_code = desc[_SOURCE_CODE], desc[_TARGET_CODE]
    for i in range(desc[_LENGTH]):
        value = load_coded(source_code, desc[_SOURCE], source + i * source_step)
        store_coded(target_code, desc[_TARGET], target + i * target_step, value)


@kernel
def copy(desc):
    """Copy a strided tensor; threads take lines in portions."""
    counters = desc.ctypes.data
    portions = (desc[_LINES] + desc[_GRAIN] - 1) // desc[_GRAIN]
    while True:
        portion = fetch_add(counters, _TAKEN, 1)
        if portion >= portions:
            break
        for line in range(portion * desc[_GRAIN], min(desc[_LINES], (portion + 1) * desc[_GRAIN])):
            _copy_line(desc, line)
        fetch_add(counters, _DONE, 1)
    wait_until(counters, _DONE, portions)


def copy_step(view: View, place: Place, copy_place: Place, copy_dtype: DType, *, outwards: bool = False) -> Step:
    """A step that copies a view to a contiguous copy of a dtype, or the copy back out to the view."""
    sizes, (own, dense) = collapsed_together(view.shape, (view.strides, contiguous_strides(view.shape)))
    missing = _RANK - len(sizes)
    sizes, own, dense = [1] * missing + sizes, [0] * missing + own, [0] * missing + dense
    descriptor = np.zeros(_DESCRIPTOR_SIZE, np.int64)
    length = sizes[-1]
    lines = view.numel // length if length else 0
    descriptor[[_LINES, _LENGTH, _GRAIN]] = lines, length, max(1, _SHARED_FROM // max(length, 1))
    ends = [(own, CODES[view.dtype], place), (dense, CODES[copy_dtype], copy_place)]
    (source, source_code, source_place), (target, target_code, target_place) = reversed(ends) if outwards else ends
    descriptor[[_SOURCE_CODE, _TARGET_CODE]] = source_code, target_code
    descriptor[_SIZES:_SOURCE_STRIDES] = sizes
    descriptor[_SOURCE_STRIDES:_TARGET_STRIDES] = source
    descriptor[_TARGET_STRIDES:] = target
    places = ((_SOURCE, source_place), (_TARGET, target_place))
    return Step(copy, descriptor, places, shared=view.numel > _SHARED_FROM)
