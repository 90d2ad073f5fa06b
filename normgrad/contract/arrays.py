"""Arrays of other libraries: seen as views with no copy, and made for results."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol

import numpy as np

from normgrad.contract import dlpack
from normgrad.contract.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT32, UINT8, DType, from_numpy_dtype, numpy_dtype
from normgrad.contract.status import shown_error
from normgrad.contract.view import Memory, Shape, View, contiguous_strides


class NotAnArray(TypeError):
    """An argument that cannot be seen as a view; the text says what it is and why not."""


Make = Callable[[], Any]


class Kind(Protocol):
    """A library's arrays: how results of that kind are made."""

    def maker(self, shape: Shape, dtype: DType, like: Any) -> Make:
        """A function that makes fresh arrays, in the memory order of ``like`` where that has the same shape."""

    def finish(self, array: Any) -> Any:
        """The fresh array, now written, as the user gets it."""


def as_view(array: Any) -> View:
    """The view that an array is: NumPy, PyTorch, anything with ``__dlpack__``, or a view already.

    What the array's own code raises becomes :class:`NotAnArray`.
    """
    try:
        return _view(array)
    except NotAnArray:
        raise
    except Exception as error:
        raise NotAnArray(f"cannot be read: {shown_error(error)}") from error


def _view(array: Any) -> View:
    if isinstance(array, type):
        raise NotAnArray(f"is the class {array.__name__}, and must be an array")
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


def _view_numpy(given: np.ndarray) -> View:
    array = _as_ndarray(given)
    itemsize = array.dtype.itemsize or 1  # NumPy has dtypes of no bytes, which are refused by name later
    if any(stride % itemsize for stride in array.strides):
        raise NotAnArray(
            f"has strides of {array.strides} bytes, and must have strides of whole elements ({itemsize} bytes)"
        )
    reach = _plain_view(_as_ndarray(_holder(given))).reach
    storage = Memory(reach.address, reach.nbytes, owner=given)
    view = _plain_view(array)
    return replace(view, dtype=from_numpy_dtype(array.dtype), storage=storage, writable=array.flags.writeable)


def _as_ndarray(array: np.ndarray) -> np.ndarray:
    """The same array without the attributes of a subclass, which may say anything."""
    return array if type(array) is np.ndarray else np.ndarray.view(array, np.ndarray)


#: What as_strided puts between its result and the array that it was given.
_Strided: Any = type(np.lib.stride_tricks.as_strided(np.zeros(1)).base)


def _holder(array: np.ndarray) -> np.ndarray:
    """The array at the end of the bases, which holds the memory. What the base of another's object is says nothing."""
    seen = {id(array)}
    while True:
        base: Any = np.ndarray.base.__get__(array)
        if isinstance(base, _Strided):
            base = base.base
        if not isinstance(base, np.ndarray) or id(base) in seen:
            return array
        seen.add(id(base))
        array = base


def holds_objects(array: Any) -> bool:
    """Whether an array has pointers to Python's objects in its memory."""
    return isinstance(array, np.ndarray) and _as_ndarray(array).dtype.hasobject


def _slow_address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


_pointer_at = ctypes.c_void_p.from_address
_HEAD = object.__basicsize__


def _fast_address(array: np.ndarray) -> int:
    # NumPy's binary interface: the pointer to the data comes right after an object's head.
    return _pointer_at(id(array) + _HEAD).value or 0


def _choose_address() -> Callable[[np.ndarray], int]:
    probe = np.zeros(2, np.float32)
    interpreter_agrees = sys.implementation.name == "cpython" and _fast_address(probe) == _slow_address(probe)
    return _fast_address if interpreter_agrees else _slow_address


#: The address of an array's first element; the fast way takes 0.2 µs, the slow one 1.2.
numpy_address = _choose_address()


def _plain_view(array: np.ndarray) -> View:
    itemsize = array.dtype.itemsize or 1
    strides = tuple([stride // itemsize for stride in array.strides])
    return View(numpy_address(array), array.shape, strides, DType("", itemsize), Memory(0, 0))


_ALIGNED_FROM = 1 << 16  # bytes: below, it takes longer than it saves


def aligned_empty(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """A fresh array at a multiple of 64 bytes, as PyTorch's are: no store then meets two cache lines."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -numpy_address(raw) % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _ordered_maker(like: np.ndarray, dtype: np.dtype) -> Make:
    """A function that makes what ``np.empty_like`` would."""
    strides = np.empty_like(like, dtype, subok=False).strides
    outermost_first = sorted(range(like.ndim), key=lambda axis: (-strides[axis], axis))
    shape = tuple(like.shape[axis] for axis in outermost_first)
    axes = tuple(outermost_first.index(axis) for axis in range(like.ndim))
    return lambda: np.empty(shape, dtype).transpose(axes)


class _NumpyKind:
    def maker(self, shape: Shape, dtype: DType, like: Any) -> Make:
        theirs = numpy_dtype(dtype)
        if isinstance(like, np.ndarray) and like.shape == shape and not like.flags.c_contiguous:
            return _ordered_maker(like, theirs)
        return partial(np.empty if math.prod(shape) * theirs.itemsize < _ALIGNED_FROM else aligned_empty, shape, theirs)

    def finish(self, array: Any) -> Any:
        return array


_NUMPY = _NumpyKind()


# PyTorch, only ever met where the user has imported it


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


@cache
def _torch_dtypes() -> dict[Any, DType]:
    torch = sys.modules["torch"]
    return {
        torch.float32: FLOAT32,
        torch.float16: FLOAT16,
        torch.bfloat16: BFLOAT16,
        torch.int32: INT32,
        torch.uint8: UINT8,
    }


@cache
def _to_torch_dtypes() -> dict[DType, Any]:
    return {ours: theirs for theirs, ours in _torch_dtypes().items()}


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


def wants_note(array: Any) -> bool:
    """Whether the array's library keeps count of writes."""
    return _is_torch(array) and not array.is_inference()


def note_written(arrays: Sequence[Any]) -> None:
    """Let autograd know that tensors which want it have new values, as PyTorch's own in-place operators do."""
    if arrays:
        sys.modules["torch"].autograd.graph.increment_version(arrays)


def torch_maker(shape: Shape, strides: Shape, dtype: Any, device: Any) -> Make:
    """A function that makes fresh tensors of a layout."""
    return partial(sys.modules["torch"].empty_strided, shape, strides, dtype=dtype, device=device)


def quick_torch_maker(like: Any) -> Make:
    """A function that makes fresh tensors of the layout of another whose device is the current one of its kind.

    What PyTorch's compiled programs make their tensors with takes two thirds of the time of what users have.
    """
    guards = sys.modules.get("torch._C._dynamo.guards")
    layout = tuple(like.shape), like.stride(), like.dtype
    quick = getattr(guards, f"_empty_strided_{like.device.type}", None)
    return torch_maker(*layout, like.device) if quick is None else partial(quick, *layout)


@dataclass(frozen=True)
class _TorchKind:
    device: Any

    def maker(self, shape: Shape, dtype: DType, like: Any) -> Make:
        torch = sys.modules["torch"]
        theirs = _to_torch_dtypes()[dtype]
        if _is_torch(like) and like.shape == shape and like.device == self.device:
            strides = torch.empty_like(like, dtype=theirs, device="meta").stride()
        else:
            strides = contiguous_strides(shape)
        return torch_maker(shape, strides, theirs, self.device)

    def finish(self, array: Any) -> Any:
        return array


# Anything with __dlpack__: computed into NumPy or PyTorch memory, then handed over


@dataclass(frozen=True)
class _DLPackKind:
    array: Any

    def maker(self, shape: Shape, dtype: DType, like: Any) -> Make:
        device = dlpack.as_view(self.array).device
        if device == "cpu":
            return _NUMPY.maker(shape, dtype, None)
        import torch

        return _TorchKind(torch.device(device)).maker(shape, dtype, None)

    def finish(self, array: Any) -> Any:
        namespace = getattr(self.array, "__array_namespace__", None)
        if namespace is None:
            return array
        if isinstance(array, np.ndarray):
            return namespace().asarray(array)
        return namespace().from_dlpack(array)
