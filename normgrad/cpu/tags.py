"""Tags: scalars whose types choose what a kernel compiles to.

The *kind* of an array is the type of a tag passed to the kernel (``F32``, ``F16``, ``BF16``), so one source compiles
once per kind, and the cache on disk keeps the kinds apart. Nothing here needs Numba: what is on disk runs without it.
"""

import numpy as np

from normgrad.contract.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT32, DType

F32, F16, BF16, I32 = np.float32(0), np.int16(0), np.uint16(0), np.int32(0)
TAGS = {FLOAT32: F32, FLOAT16: F16, BFLOAT16: BF16, INT32: I32}

#: Dtypes as numbers in a descriptor, where a value is chosen at run time.
CODES: dict[DType, int] = {FLOAT32: 0, FLOAT16: 1, BFLOAT16: 2, INT32: 3}

# How data lies and which way a pass goes, for GroupNorm and BatchNorm.
ROWS, COLUMNS, MIXED = np.uint8(0), np.int8(0), np.int64(0)  # mixed: any strides and dtypes
BACKWARD, FORWARD = np.uint32(0), np.uint64(0)
BACKWARD_SUMS, FORWARD_SUMS = np.int32(0), np.int64(0)  # BatchNorm's steps that make no results
