"""NumPy arrays as PyTorch tensors and back, without a copy where they stay on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from normgrad.contract.dtypes import BFLOAT16, numpy_dtype

_BFLOAT16 = numpy_dtype(BFLOAT16)


def as_torch(array: np.ndarray, device: str = "cpu") -> Any:
    """The same elements in the same order in memory."""
    import torch

    if array.dtype == _BFLOAT16:  # which PyTorch does not know by NumPy's name
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def arguments_as_torch(arguments: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
    """An operator's arguments with tensors in place of arrays."""
    return {
        name: as_torch(value, device) if isinstance(value, np.ndarray) else value for name, value in arguments.items()
    }


def from_torch(tensor: Any) -> np.ndarray | None:
    """A tensor as an array on the host."""
    if tensor is None:
        return None
    import torch

    host = tensor.detach().cpu()
    if host.dtype is torch.bfloat16:
        return np.asarray(host.view(torch.int16).numpy()).view(_BFLOAT16)
    return np.asarray(host.numpy())
