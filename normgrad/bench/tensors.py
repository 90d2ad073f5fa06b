"""Arrays on either device: NumPy arrays on the CPU, PyTorch tensors on a CUDA device, and conversions between them.

The code that generates data uses only what the two array libraries have in common, and these functions for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from normgrad.contract.dtypes import BFLOAT16, numpy_dtype

_BFLOAT16 = numpy_dtype(BFLOAT16)


def as_torch(array: np.ndarray, device: str = "cpu") -> Any:
    """Return a tensor with the same elements and strides; on the CPU it shares the array's memory."""
    import torch

    if array.dtype == _BFLOAT16:  # which PyTorch does not know by NumPy's name
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def arguments_as_torch(arguments: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Return an operator's arguments with tensors in place of NumPy arrays."""
    return {
        name: as_torch(value, device) if isinstance(value, np.ndarray) else value for name, value in arguments.items()
    }


def on_device(array: np.ndarray, device: str) -> Any:
    """Return a NumPy array as the array of a device."""
    return array if device == "cpu" else as_torch(array, device)


def like(array: np.ndarray, other: Any) -> Any:
    """Return a NumPy array as an array of another's library, on its device."""
    return array if isinstance(other, np.ndarray) else as_torch(array, str(other.device))


def as_float32(array: Any) -> Any:
    """Return a float32 copy with the same strides."""
    return array.astype(np.float32) if isinstance(array, np.ndarray) else array.float().clone()


def as_float64(array: Any) -> Any:
    """Return the elements in float64."""
    return array.astype(np.float64) if isinstance(array, np.ndarray) else array.double()
