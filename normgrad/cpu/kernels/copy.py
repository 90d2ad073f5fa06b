"""Copies between layouts and dtypes, and elements of a dtype that is known at run time."""

import numpy as np

from normgrad.cpu.compile.jit import device, kernel
from normgrad.cpu.fields.copy import (
    CODE,
    COUNT,
    DONE,
    GRAIN,
    LENGTH,
    LINES,
    RANK,
    SIZES,
    SOURCE,
    SOURCE_CODE,
    SOURCE_STRIDES,
    STRIDE,
    TAKEN,
    TARGET,
    TARGET_CODE,
    TARGET_STRIDES,
    VALUE,
    VECTOR,
)
from normgrad.cpu.intrinsics.memory import fetch_add, load, load_f64, round_for, start_of, store, wait_until
from normgrad.cpu.tags import BF16, F16, F32, I32


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
def store_exact(code, address, index, value):
    """Store a float64 as an element of a dtype known at run time, rounded once."""
    if code == 0:
        store(F32, address, index, np.float32(value))
    else:
        store_coded(code, address, index, round_for(F16, value))


@device
def _copy_line(desc, line):
    """One run along the last axis; ``line`` counts through the other axes."""
    source, target, rest = 0, 0, line
    for axis in range(RANK - 2, -1, -1):
        size = desc[SIZES + axis]
        place = rest % size
        rest //= size
        source += place * desc[SOURCE_STRIDES + axis]
        target += place * desc[TARGET_STRIDES + axis]
    source_step, target_step = desc[SOURCE_STRIDES + RANK - 1], desc[TARGET_STRIDES + RANK - 1]
    source_code, target_code = desc[SOURCE_CODE], desc[TARGET_CODE]
    for i in range(desc[LENGTH]):
        value = load_coded(source_code, desc[SOURCE], source + i * source_step)
        store_coded(target_code, desc[TARGET], target + i * target_step, value)


@kernel
def copy(desc):
    """Copy a strided tensor; threads take lines in portions."""
    counters = start_of(desc)
    portions = (desc[LINES] + desc[GRAIN] - 1) // desc[GRAIN]
    while True:
        portion = fetch_add(counters, TAKEN, 1)
        if portion >= portions:
            break
        for line in range(portion * desc[GRAIN], min(desc[LINES], (portion + 1) * desc[GRAIN])):
            _copy_line(desc, line)
        fetch_add(counters, DONE, 1)
    wait_until(counters, DONE, portions)


@kernel
def fill(desc):
    """Store one value in every element of a vector."""
    value = load_f64(start_of(desc), VALUE)
    for i in range(desc[COUNT]):
        store_exact(desc[CODE], desc[VECTOR], i * desc[STRIDE], value)
