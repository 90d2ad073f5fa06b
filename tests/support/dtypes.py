"""The element types of the contract by name, for NumPy and for PyTorch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

F32, F16, BF16, I32 = "float32", "float16", "bfloat16", "int32"
FLOATS = (F32, F16, BF16)

NUMPY = {
    F32: np.dtype(np.float32),
    F16: np.dtype(np.float16),
    BF16: np.dtype(ml_dtypes.bfloat16),
    I32: np.dtype(np.int32),
    "float64": np.dtype(np.float64),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
}
TORCH = {
    F32: torch.float32,
    F16: torch.float16,
    BF16: torch.bfloat16,
    I32: torch.int32,
    "float64": torch.float64,
    "int64": torch.int64,
    "uint8": torch.uint8,
}


def dtype_name(array: np.ndarray | torch.Tensor) -> str:
    """The name of an array's dtype, whatever its kind."""
    return str(array.dtype).removeprefix("torch.")
