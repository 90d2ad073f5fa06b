"""Tags: names whose Numba types choose what a kernel compiles to.

A kernel takes the tag of its data's dtype (``F32``, ``F16``, ``BF16``), so one source compiles once per dtype, and the
cache on disk keeps the variants apart. Nothing here imports Numba: what is on disk runs without it.
"""

from __future__ import annotations

from dataclasses import dataclass

from normgrad.contract.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT32, DType


@dataclass(frozen=True, slots=True)
class Tag:
    """One of the values of a compile-time choice."""

    name: str


F32, F16, BF16, I32 = Tag("float32"), Tag("float16"), Tag("bfloat16"), Tag("int32")
F64, I64 = Tag("float64"), Tag("int64")  # in the workspace and in descriptors
TAGS = {FLOAT32: F32, FLOAT16: F16, BFLOAT16: BF16, INT32: I32}

#: Dtypes as numbers in a descriptor, where they are looked at at run time.
CODE_F32, CODE_F16, CODE_BF16, CODE_I32 = range(4)
CODES: dict[DType, int] = {FLOAT32: CODE_F32, FLOAT16: CODE_F16, BFLOAT16: CODE_BF16, INT32: CODE_I32}

# GroupNorm and BatchNorm: positions are contiguous, or channels are.
ROWS, COLUMNS = Tag("rows"), Tag("columns")
# What a pass computes: gradients or outputs, or the sums for them.
BACKWARD, FORWARD = Tag("backward"), Tag("forward")
