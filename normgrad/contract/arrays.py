"""Arrays of other libraries: seen as views with no copy, and made for results."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from normgrad.contract import dlpack
from normgrad.contract.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT32, UINT8, DType, from_numpy_dtype, numpy_dtype
from normgrad.contract.view import Memory, Shape, View


class NotAnArray(TypeError):
    """An argument that cannot be seen as a view; the text says what it is and why not."""


class Kind(Protocol):
    """A library's arrays: how results of that kind are made."""

    def empty(self, shape: Shape, dtype: DType, like: Any) -> Any:
        """A fresh array; where ``like`` is an array of the same shape, in its memory order."""

    def finish(self, array: Any) -> Any:
        """The fresh array, now written, as the user gets it."""


def as_view(array: Any) -> View:
    """The view that an array is: NumPy, PyTorch, anything with ``__dlpack__``, or a view already."""
    if isinstance(array, np.ndarray):
        return _view_numpy(array)
    if _is_torch(array):
        return _view_torch(array)
    if isinstance(array, View):
        return array
    if hasattr(array, "__dlpack__"):
        return dlpack.as_view(array)
    raise NotAnArray(
        f"is of type {type(array).__name__}, and must be a NumPy array, a PyTorch tensor or have __dlpack__"
    )


def kind_of(array: Any) -> Kind:
    """The kind of an array that :func:`as_view` takes."""
    if isinstance(array, np.ndarray | View):
        return _NUMPY
    if _is_torch(array):
        return _TorchKind(array.device)
    return _DLPackKind(array)


def as_numpy(view: View) -> np.ndarray:
    """A NumPy array over the view's memory, which lies on the host."""
    dtype = numpy_dtype(view.dtype)
    strides = tuple(stride * dtype.itemsize for stride in view.strides)
    if view.numel == 0:
        return np.empty(view.shape, dtype)
    reach = view.reach
    return np.ndarray(view.shape, dtype, bytes_at(reach), view.address - reach.address, strides)


def bytes_at(memory: Memory) -> memoryview:
    """The bytes of host memory. The caller keeps it alive."""
    return memoryview((ctypes.c_ubyte * memory.nbytes).from_address(memory.address)).cast("B")


# NumPy


def _view_numpy(array: np.ndarray) -> View:
    itemsize = array.dtype.itemsize or 1  # NumPy has dtypes of no bytes, which are refused by name later
    if any(stride % itemsize for stride in array.strides):
        raise NotAnArray(
            f"has strides of {array.strides} bytes, and must have strides of whole elements ({itemsize} bytes)"
        )
    holder: Any = array
    base = array.base
    while base is not None:  # down to the array that holds the memory
        if isinstance(base, np.ndarray):
            holder = base
        base = getattr(base, "base", None)
    reach = _plain_view(holder).reach
    storage = Memory(reach.address, reach.nbytes, owner=array)
    view = _plain_view(array)
    return replace(view, dtype=from_numpy_dtype(array.dtype), storage=storage, writable=array.flags.writeable)


def _plain_view(array: np.ndarray) -> View:
    itemsize = array.dtype.itemsize or 1
    strides = tuple([stride // itemsize for stride in array.strides])
    return View(array.__array_interface__["data"][0], array.shape, strides, DType("", itemsize), Memory(0, 0))


class _NumpyKind:
    def empty(self, shape: Shape, dtype: DType, like: Any) -> Any:
        if isinstance(like, np.ndarray) and like.shape == shape:
            return np.empty_like(like, numpy_dtype(dtype), subok=False)
        return np.empty(shape, numpy_dtype(dtype))

    def finish(self, array: Any) -> Any:
        return array


_NUMPY = _NumpyKind()


# PyTorch, only ever met where the user has imported it


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _torch_dtypes() -> dict[Any, DType]:
    torch = sys.modules["torch"]
    return {
        torch.float32: FLOAT32,
        torch.float16: FLOAT16,
        torch.bfloat16: BFLOAT16,
        torch.int32: INT32,
        torch.uint8: UINT8,
    }


def _view_torch(tensor: Any) -> View:
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        raise NotAnArray(f"is a tensor of layout {tensor.layout}, and must be strided")
    if tensor.device.type not in ("cpu", "cuda"):
        raise NotAnArray(f"is on the device {tensor.device}, and must be on the CPU or a CUDA GPU")
    dtype = _torch_dtypes().get(tensor.dtype) or DType(str(tensor.dtype).removeprefix("torch."), tensor.element_size())
    negative = tensor.is_neg()
    try:
        if negative:
            tensor = tensor.resolve_neg()
        storage = tensor.untyped_storage()
        if storage.device != tensor.device:
            raise RuntimeError("a fake tensor")
        address = tensor.data_ptr()
        memory = Memory(storage.data_ptr(), storage.nbytes(), str(tensor.device), owner=tensor)
    except RuntimeError as error:  # a tensor that only stands for one: fake, functorch, …
        raise NotAnArray(f"is a {type(tensor).__name__} without memory of its own") from error
    # A negated tensor is read through a copy; written, it would keep what it had.
    return View(address, tuple(tensor.shape), tensor.stride(), dtype, memory, writable=not negative)


@dataclass(frozen=True)
class _TorchKind:
    device: Any

    def empty(self, shape: Shape, dtype: DType, like: Any) -> Any:
        torch = sys.modules["torch"]
        ours = {ours: theirs for theirs, ours in _torch_dtypes().items()}[dtype]
        if _is_torch(like) and like.shape == shape:
            return torch.empty_like(like, dtype=ours, device=self.device, requires_grad=False)
        return torch.empty(shape, dtype=ours, device=self.device)

    def finish(self, array: Any) -> Any:
        return array


# Anything with __dlpack__: computed into NumPy or PyTorch memory, then handed over


@dataclass(frozen=True)
class _DLPackKind:
    array: Any

    def empty(self, shape: Shape, dtype: DType, like: Any) -> Any:
        device = dlpack.as_view(self.array).device
        if device == "cpu":
            return _NUMPY.empty(shape, dtype, None)
        import torch

        return _TorchKind(torch.device(device)).empty(shape, dtype, None)

    def finish(self, array: Any) -> Any:
        namespace = getattr(self.array, "__array_namespace__", None)
        if namespace is None:
            return array
        if isinstance(array, np.ndarray):
            return namespace().asarray(array)
        return namespace().from_dlpack(array)
