"""Arrays of other libraries: seen as views with no copy, and allocated for results."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol

import numpy as np

from normgrad.contract import dlpack, huge_pages
from normgrad.contract.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT32, UINT8, DType, from_numpy_dtype, numpy_dtype
from normgrad.contract.status import let_signals_through, shown_error
from normgrad.contract.view import Memory, Shape, View, contiguous_strides


class NotAnArray(TypeError):
    """An argument that cannot be seen as a view; the text says what it is and why not."""


@dataclass(frozen=True, slots=True)
class FreshArray:
    """The layout of an output that the caller does not bring, and how to allocate one.

    ``address`` returns the address of what ``allocate`` returned, or raises :class:`NotAnArray`.
    """

    shape: Shape
    strides: Shape  # in elements
    dtype: DType
    allocate: Callable[[], Any]
    address: Callable[[Any], int]


class ArrayLibrary(Protocol):
    """The library of an array: how outputs for its users are allocated."""

    def fresh(self, shape: Shape, dtype: DType, like: Any) -> FreshArray:
        """Return the layout of an output, in the memory order of ``like`` where that has the same shape."""

    def export(self, array: Any) -> Any:
        """Return the written output as the user gets it."""


def as_view(array: Any) -> View:
    """The view that an array is: NumPy, PyTorch, anything with ``__dlpack__``, or a view already.

    What the array's own code raises becomes :class:`NotAnArray`.
    """
    try:
        return _view(array)
    except NotAnArray:
        raise
    except Exception as error:
        let_signals_through(error)
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


def library_of(array: Any) -> ArrayLibrary:
    """Return the library of an array that :func:`as_view` takes."""
    if isinstance(array, np.ndarray | View):
        return _NUMPY
    if _is_torch(array):
        return _Torch(array.device)
    return _DLPack(array)


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


_first_byte: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer


def numpy_address(array: np.ndarray) -> int:
    """Return the address of an array's first element."""
    try:
        return ctypes.addressof(_first_byte(array))  # 0.2 µs
    except (TypeError, ValueError):  # read-only, strided, empty, or a dtype unknown to the buffer protocol
        return array.__array_interface__["data"][0]  # 1.5 µs


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


def _fresh_like(like: np.ndarray, dtype: DType) -> FreshArray:
    """Return the layout that ``np.empty_like`` chooses. It allocates nothing: a broadcast array may be huge."""
    corner = like[(slice(2),) * like.ndim]  # its axes have the same order in memory
    strides = np.empty_like(corner, subok=False).strides
    outermost_first = sorted(range(like.ndim), key=lambda axis: (-strides[axis], axis))
    shape = tuple(like.shape[axis] for axis in outermost_first)
    axes = tuple(outermost_first.index(axis) for axis in range(like.ndim))
    in_order, theirs = contiguous_strides(shape), numpy_dtype(dtype)
    return FreshArray(
        like.shape,
        tuple(in_order[axis] for axis in axes),
        dtype,
        lambda: np.empty(shape, theirs).transpose(axes),
        numpy_address,
    )


class _NumPy:
    def fresh(self, shape: Shape, dtype: DType, like: Any) -> FreshArray:
        if isinstance(like, np.ndarray):
            like = _as_ndarray(like)
            if like.shape == shape and not like.flags.c_contiguous:
                return _fresh_like(like, dtype)
        theirs = numpy_dtype(dtype)
        empty = np.empty if math.prod(shape) * theirs.itemsize < _ALIGNED_FROM else aligned_empty
        return FreshArray(shape, contiguous_strides(shape), dtype, partial(empty, shape, theirs), numpy_address)

    def export(self, array: Any) -> Any:
        return array


_NUMPY = _NumPy()


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
def torch_dtypes() -> dict[DType, Any]:
    """Return PyTorch's dtypes by the contract's."""
    return {ours: theirs for theirs, ours in _torch_dtypes().items()}


def _view_torch(tensor: Any) -> View:
    torch = sys.modules["torch"]
    if tensor.is_nested:
        raise NotAnArray("is a nested tensor, and must have one shape and one set of strides")
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


def memory_of_tensor(view: View) -> tuple[Callable[[], int], Callable[[], int]] | None:
    """Return functions for the address of a tensor and for the bytes of its storage by now; None for other arrays.

    ``.data = …``, ``set_`` and ``resize_`` give a tensor other memory. NumPy's arrays cannot move while somebody holds
    them.
    """
    tensor = view.storage.owner
    return (tensor.data_ptr, tensor.untyped_storage().nbytes) if _is_torch(tensor) else None


def wants_note(array: Any) -> bool:
    """Whether the array's library keeps count of writes."""
    return _is_torch(array) and not array.is_inference()


def note_written(arrays: Sequence[Any]) -> None:
    """Let autograd know that tensors which want it have new values, as PyTorch's own in-place operators do."""
    if arrays:
        _increment_version()(arrays)


@cache
def _increment_version() -> Callable[[Sequence[Any]], None]:
    increment: Callable[[Sequence[Any]], None] = sys.modules["torch"].autograd.graph.increment_version
    return increment


def fresh_tensor(shape: Shape, strides: Shape, dtype: DType, device: Any) -> FreshArray:
    """Return the layout of a tensor to be allocated."""
    empty_strided, theirs = sys.modules["torch"].empty_strided, torch_dtypes()[dtype]
    allocate = partial(empty_strided, shape, strides, dtype=theirs, device=device)
    address, nbytes = _tensor_address(), math.prod(shape) * dtype.itemsize
    if device.type == "cpu" and nbytes >= huge_pages.REQUESTED_FROM:
        address = partial(_address_on_huge_pages, address, nbytes)
    return FreshArray(shape, strides, dtype, allocate, address)


def _address_on_huge_pages(address: Callable[[Any], int], nbytes: int, tensor: Any) -> int:
    """Return a fresh tensor's address, with huge pages requested for what will be written there."""
    found = address(tensor)
    huge_pages.request(found, nbytes)
    return found


@cache
def _tensor_address() -> Callable[[Any], int]:
    plain = sys.modules["torch"].Tensor

    def address(tensor: Any) -> int:
        try:
            found: int = tensor.data_ptr() if type(tensor) is plain else 0  # a FakeTensor warns when asked
        except RuntimeError:
            found = 0
        if found or not tensor.numel():
            return found
        raise NotAnArray(
            f"PyTorch allocated an output without memory (a {type(tensor).__name__}): a mode or a transform is "
            "active, such as FakeTensorMode or torch.func.grad; torch.ops.normgrad supports them"
        )

    return address


@dataclass(frozen=True)
class _Torch:
    device: Any

    def fresh(self, shape: Shape, dtype: DType, like: Any) -> FreshArray:
        strides = contiguous_strides(shape)
        if _is_torch(like) and like.shape == shape and like.device == self.device:
            torch = sys.modules["torch"]
            strides = torch.empty_like(torch.empty_strided(shape, like.stride(), device="meta")).stride()
        return fresh_tensor(shape, strides, dtype, self.device)

    def export(self, array: Any) -> Any:
        return array


# Anything with __dlpack__: computed into NumPy or PyTorch memory, then handed over


@dataclass(frozen=True)
class _DLPack:
    array: Any

    def fresh(self, shape: Shape, dtype: DType, like: Any) -> FreshArray:
        device = dlpack.as_view(self.array).device
        if device == "cpu":
            return _NUMPY.fresh(shape, dtype, None)
        import torch

        return _Torch(torch.device(device)).fresh(shape, dtype, None)

    def export(self, array: Any) -> Any:
        namespace = getattr(self.array, "__array_namespace__", None)
        if namespace is None:
            return array
        if isinstance(array, np.ndarray):
            return namespace().asarray(array)
        return namespace().from_dlpack(array)
