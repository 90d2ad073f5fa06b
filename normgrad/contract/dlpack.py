"""Reads the tensor that an object exports with ``__dlpack__``, without a copy and without its library.

The structures are those of the DLPack standard, as memory lays them out: the capsule ``dltensor`` holds a
``DLManagedTensor``, ``dltensor_versioned`` (version 1 on) a ``DLManagedTensorVersioned``.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

from normgrad.contract.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT32, UINT8, DType
from normgrad.contract.view import Memory, View, contiguous_strides

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_VERSION = 1  # the major one; another may lay the structure out otherwise
_READ_ONLY = 1  # a bit of the versioned structure's flags
_MOST_DIMENSIONS = 64  # as NumPy and PyTorch have at most; more is not a shape
_ADDRESSES = 1 << 63  # the addresses that a process can have are below
_KNOWN = {(2, 32): FLOAT32, (2, 16): FLOAT16, (4, 16): BFLOAT16, (0, 32): INT32, (1, 8): UINT8}
_TYPE_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# Functions of our own: the types of those in ctypes.pythonapi are whatever a library has set last.
_OF_CAPSULE = ctypes.py_object, ctypes.c_char_p
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, *_OF_CAPSULE)(("PyCapsule_GetPointer", ctypes.pythonapi))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, *_OF_CAPSULE)(("PyCapsule_IsValid", ctypes.pythonapi))


def as_view(array: Any) -> View:
    """The view of an object with ``__dlpack__``; it keeps the exported capsule alive."""
    capsule = _export(array)
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if versioned.version[0] != _VERSION:
            raise BufferError(f"the export has version {versioned.version[0]} of DLPack, and must have {_VERSION}")
        tensor, writable = versioned.tensor, not versioned.flags & _READ_ONLY
    elif _is_valid(capsule, b"dltensor"):
        tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
        writable = not _is_immutable(array)
    else:
        raise BufferError(f"__dlpack__ returned an object of type {type(capsule).__name__}, which is no fresh dltensor")
    if not 0 <= tensor.ndim <= _MOST_DIMENSIONS or (tensor.ndim and not tensor.shape):
        raise BufferError(f"the export has {tensor.ndim} dimensions and no shape of so many")
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else contiguous_strides(shape)
    dtype = _dtype(tensor)
    address = (tensor.data or 0) + tensor.byte_offset
    # The standard tells no storage beyond the view: what the view reaches is what there is.
    reach = View(address, shape, strides, dtype, Memory(0, 0)).reach
    if not 0 <= reach.address <= reach.end <= _ADDRESSES:
        raise BufferError(f"the export reaches from {reach.address:#x} to {reach.end:#x}, where no memory can be")
    storage = Memory(reach.address, reach.nbytes, _device(tensor), owner=(array, capsule))
    return View(address, shape, strides, dtype, storage, writable=writable)


def _export(array: Any) -> Any:
    try:
        return array.__dlpack__(max_version=(_VERSION, 0))
    except TypeError:  # an exporter from before version 1
        return array.__dlpack__()


def _is_immutable(array: Any) -> bool:
    """JAX's arrays, which an export from before version 1 cannot mark."""
    return type(array).__module__.partition(".")[0] in ("jax", "jaxlib")


def _dtype(tensor: _Tensor) -> DType:
    known = _KNOWN.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    lanes = "" if tensor.lanes == 1 else f"x{tensor.lanes}"
    name = f"{_TYPE_CODES.get(tensor.code, 'unknown')}{tensor.bits}{lanes}"
    return known or DType(name, math.ceil(tensor.bits * tensor.lanes / 8))


def _device(tensor: _Tensor) -> str:
    if tensor.device_type in (_CPU, _CUDA_HOST):
        return "cpu"
    if tensor.device_type in (_CUDA, _CUDA_MANAGED):
        return f"cuda:{tensor.device_id}"
    return f"DLPack device {tensor.device_type}:{tensor.device_id}"
