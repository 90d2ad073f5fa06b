"""``.pt``: a dictionary of tensors and plain values, as ``torch.save`` writes it."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Mapping
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from normgrad.cli.errors import BadInput

# How a ZIP archive and the pickles of PyTorch before 1.6 begin.
_STARTS = (b"PK\x03\x04", b"\x80")
_LONGEST_START = 4


def require() -> None:
    """Raise BadInput where PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise BadInput(".pt files need PyTorch: pip install 'normgrad[torch]'")


def load(stream: BinaryIO, accept: Any) -> dict[str, Any]:
    """The tensors as NumPy arrays, and the plain values."""
    import torch

    start = stream.read(_LONGEST_START)
    stream.seek(0)
    if not start.startswith(_STARTS):
        raise BadInput("is not a valid .pt file: it is not an archive (torch.save writes one)")
    try:
        content = torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise BadInput(
            "is not a valid .pt file, or holds objects other than tensors and plain values, and those are never loaded"
        ) from None
    except RuntimeError as error:
        if "PytorchStreamReader" in str(error):
            raise BadInput("is not a valid .pt file: its archive is damaged or incomplete") from None
        raise
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise BadInput("must hold a dictionary with parameter names as keys")
    return {name: _array(name, value) if isinstance(value, torch.Tensor) else value for name, value in content.items()}


def _array(name: str, tensor: Any) -> np.ndarray:
    import torch

    if tensor.layout is not torch.strided:
        raise BadInput(f"{name} is a tensor of layout {tensor.layout}, and must be strided")
    if tensor.is_meta:
        raise BadInput(f"{name} is a tensor on the device meta, which has no data")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype is torch.bfloat16:
        return np.asarray(tensor.view(torch.int16).numpy()).view(ml_dtypes.bfloat16)
    try:
        return np.asarray(tensor.numpy())
    except TypeError:
        raise BadInput(f"{name} is {tensor.dtype}, which has no NumPy equivalent") from None


def save(stream: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """Write tensors."""
    import torch

    torch.save({name: _tensor(array) for name, array in arrays.items()}, stream)


def _tensor(array: np.ndarray) -> Any:
    import torch

    array = np.require(array, requirements=["C", "W"])  # all that PyTorch takes
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
