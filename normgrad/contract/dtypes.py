"""The element types of the contract, and the ones it can only name in order to refuse them."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: its name and how many bytes an element takes."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


FLOAT32 = DType("float32", 4)
FLOAT16 = DType("float16", 2)
BFLOAT16 = DType("bfloat16", 2)
INT32 = DType("int32", 4)
UINT8 = DType("uint8", 1)

#: What tensors of data, statistics and parameters may be made of.
FLOATS = (FLOAT32, FLOAT16, BFLOAT16)

_TO_NUMPY: dict[DType, np.dtype] = {
    FLOAT32: np.dtype(np.float32),
    FLOAT16: np.dtype(np.float16),
    BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    INT32: np.dtype(np.int32),
    UINT8: np.dtype(np.uint8),
}
_FROM_NUMPY = {dtype: ours for ours, dtype in _TO_NUMPY.items()}


def numpy_dtype(dtype: DType) -> np.dtype:
    """The NumPy dtype of a contract dtype."""
    return _TO_NUMPY[dtype]


def from_numpy_dtype(dtype: np.dtype) -> DType:
    """The contract dtype of a NumPy dtype; one outside the contract keeps its NumPy name."""
    known = _FROM_NUMPY.get(dtype)
    if known is not None:
        return known
    name = dtype.name if dtype.isnative else f"byte-swapped {dtype.name}"
    return DType(name, dtype.itemsize)


def listed(dtypes: tuple[DType, ...]) -> str:
    """The dtypes as prose: ``float32, float16 or bfloat16``."""
    names = [str(dtype) for dtype in dtypes]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
