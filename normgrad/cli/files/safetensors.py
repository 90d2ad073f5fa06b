"""``.safetensors``: tensors, and attributes as JSON values in the metadata."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from normgrad.cli.errors import BadInput

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_LENGTH_BYTES = 8
_WRITTEN_BY = "format"  # other tools note here which library wrote the file


def require() -> None:
    """Raise BadInput where safetensors is not installed."""
    if importlib.util.find_spec("safetensors") is None:
        raise BadInput(".safetensors files need the package safetensors: pip install 'normgrad[files]'")


def load(stream: BinaryIO, accept: Any) -> dict[str, Any]:
    """The tensors, and the values in the metadata."""
    from safetensors import deserialize

    content = stream.read()
    tensors = {name: _array(name, tensor) for name, tensor in deserialize(content)}
    attributes = _attributes(content)
    twice = sorted(set(tensors) & set(attributes))
    if twice:
        raise BadInput(f"holds {', '.join(twice)} both as a tensor and in the metadata")
    return tensors | attributes


def _array(name: str, tensor: dict[str, Any]) -> np.ndarray:
    dtype = _DTYPES.get(tensor["dtype"])
    if dtype is None:
        raise BadInput(f"{name} is of type {tensor['dtype']}, and must be one of {', '.join(_DTYPES)}")
    little_endian = np.frombuffer(tensor["data"], np.dtype(dtype).newbyteorder("<"))
    return little_endian.astype(dtype).reshape(tensor["shape"])


def _attributes(content: bytes) -> dict[str, Any]:
    """The metadata of a file that the library has found sound."""
    end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    metadata = json.loads(content[_LENGTH_BYTES:end]).get("__metadata__") or {}
    return {name: _value(name, text) for name, text in metadata.items() if name != _WRITTEN_BY}


def _value(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise BadInput(f"{name} is {text!r} in the metadata, and must be a JSON value such as 1e-5 or [4, 8]") from None


def save(stream: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """Write tensors."""
    from safetensors import numpy

    stream.write(numpy.save({name: np.asarray(array, order="C") for name, array in arrays.items()}))
