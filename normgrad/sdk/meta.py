"""Tensors, scalars, arrays and lists: what the program describes to the operators."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import Any, TypeVar

from normgrad.contract.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT32, UINT8, DType
from normgrad.contract.rules import INT64_MAX
from normgrad.contract.status import Status
from normgrad.contract.view import Memory, Shape, View
from normgrad.sdk import native
from normgrad.sdk.devices import devices
from normgrad.sdk.errors import Refused
from normgrad.sdk.exported import exported
from normgrad.sdk.handles import handles
from normgrad.sdk.memory import table

T = TypeVar("T")

_NULL, _INVALID = Status.ACLNN_ERR_PARAM_NULLPTR, Status.ACLNN_ERR_PARAM_INVALID

#: Element types by their number in the C interface: those of the contract, and those it can only name.
DTYPES = {0: FLOAT32, 1: FLOAT16, 3: INT32, 4: UINT8, 27: BFLOAT16} | {
    number: DType(name, itemsize)
    for number, name, itemsize in (
        (-1, "undefined", 1),
        (2, "int8", 1),
        (6, "int16", 2),
        (7, "uint16", 2),
        (8, "uint32", 4),
        (9, "int64", 8),
        (10, "uint64", 8),
        (11, "float64", 8),
        (12, "bool", 1),
        (13, "string", 1),
        (16, "complex64", 8),
        (17, "complex128", 16),
        (29, "int4", 1),
        (30, "uint1", 1),
        (33, "complex32", 4),
        (34, "hifloat8", 1),
        (35, "float8_e5m2", 1),
        (36, "float8_e4m3fn", 1),
        (37, "float8_e8m0", 1),
        (38, "float6_e3m2", 1),
        (39, "float6_e2m3", 1),
        (40, "float4_e2m1", 1),
        (41, "float4_e1m2", 1),
    )
}


class Placeholders:
    """Addresses that stand for memory that comes later, where no memory can lie. Every tensor gets another."""

    FIRST, END = 0x4000_0000_0000_0000, 0x7000_0000_0000_0000

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = self.FIRST

    def take(self, nbytes: int) -> int:
        """The address of so many bytes that are not there."""
        with self._lock:
            address = self._next if self._next + nbytes < self.END else self.FIRST
            self._next = address + -(-nbytes // 64) * 64
            return address

    def has(self, address: int) -> bool:
        return address >= self.FIRST


placeholders = Placeholders()


@dataclass(slots=True)
class Tensor:
    """A tensor as the program describes it, sound or not."""

    shape: Shape
    dtype: int
    strides: Shape
    offset: int
    format: int
    storage_shape: Shape
    data: int

    def view(self) -> View:
        """The tensor where it lies; one without data lies where nothing is, until a plan is given an address."""
        return self.view_at(self.data or placeholders.take(self._storage_nbytes))

    def view_at(self, data: int) -> View:
        """The tensor with its storage at an address."""
        dtype = self._dtype
        block = table.touching(data, 1)
        device = block.device if block is not None and block.device is not None else devices().device_name(0)
        storage = Memory(data, self._storage_nbytes, device)
        return View(data + self.offset * dtype.itemsize, self.shape, self.strides, dtype, storage, self.format)

    @property
    def _dtype(self) -> DType:
        return DTYPES.get(self.dtype) or DType(f"of the unknown element type {self.dtype}", 1)

    @property
    def _storage_nbytes(self) -> int:
        if any(size <= 0 for size in self.storage_shape):
            return 0
        return _product(*self.storage_shape, self._dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number: its bytes and element type."""

    value: bytes
    dtype: int


@dataclass(frozen=True, slots=True)
class _Array:
    values: tuple[Any, ...]


class IntArray(_Array):
    """Integers."""

    code = "q"


class FloatArray(_Array):
    """Floating-point numbers."""

    code = "f"


class BoolArray(_Array):
    """Truth values; any byte but 0 is true."""

    code = "B"


class _List(_Array):
    """Handles of objects that go with the list."""

    element: type = object


class TensorList(_List):
    """Tensors."""

    element = Tensor


class ScalarList(_List):
    """Scalars."""

    element = Scalar


def _dims(address: int, count: int, name: str) -> Shape:
    if count and not address:
        raise Refused(_NULL, f"{name} is null, and must have {count} elements")
    return native.read_numbers(address, count, "q")


def _product(*factors: int) -> int:
    """The product of positive numbers, INT64_MAX where it is more: the exact one of a million sizes takes hours."""
    product = 1
    for factor in factors:
        product = min(product * factor, INT64_MAX)
    return product


def _contiguous_strides(shape: Shape) -> Shape:
    """The strides of a contiguous tensor, in 64 bits also where an empty or unsound shape overflows them."""
    outwards = itertools.accumulate((max(size, 1) for size in reversed(shape[1:])), _product, initial=1)
    return tuple(outwards)[::-1] if shape else ()


@exported("aclCreateTensor")
def create_tensor(
    shape_at: int,
    rank: int,
    dtype: int,
    strides_at: int,
    offset: int,
    format: int,
    storage_at: int,
    storage_rank: int,
    data: int,
) -> int:
    """Describe a tensor; nothing is checked before it is used."""
    shape = _dims(shape_at, rank, "viewDims")
    strides = native.read_numbers(strides_at, rank, "q") if strides_at else _contiguous_strides(shape)
    storage_shape = _dims(storage_at, storage_rank, "storageDims")
    return handles.add(Tensor(shape, dtype, strides, offset, format, storage_shape, data))


@exported("aclCreateScalar")
def create_scalar(value: int, dtype: int) -> int:
    """Copy a number."""
    if not value:
        raise Refused(_NULL, "value is null, and must be given")
    if dtype not in DTYPES:
        raise Refused(_INVALID, f"dataType is {dtype}, and must be an element type")
    return handles.add(Scalar(native.read(value, DTYPES[dtype].itemsize), dtype))


def _create_array(kind: type[Any], values: int, count: int) -> int:
    if count and not values:
        raise Refused(_NULL, f"value is null, and must have {count} elements")
    return handles.add(kind(native.read_numbers(values, count, kind.code)))


def _create_list(kind: type[Any], values: int, count: int) -> int:
    if count and not values:
        raise Refused(_NULL, f"value is null, and must have {count} elements")
    elements = native.read_numbers(values, count, "Q")
    for index, element in enumerate(elements):
        if element and handles.find(element, kind.element) is None:
            name = f"acl{kind.element.__name__}"
            raise Refused(_INVALID, f"element {index} {handles.problem(element, name)}")
    return handles.add(kind(elements))


def _destroy(kind: type[Any], handle: int) -> None:
    if not handle:
        return
    found = handles.remove(handle, kind)
    if found is None:
        raise Refused(_INVALID, f"the argument {handles.problem(handle, f'acl{kind.__name__}')}")
    if isinstance(found, _List):
        for element in found.values:
            handles.remove(element, found.element)


def _size(kind: type[Any], handle: int, result: int) -> None:
    native.write(_given(result, "size"), "Q", len(found(handle, kind).values))


def _export_kind(kind: type[Any], *, create: Any = None) -> None:
    name = f"acl{{}}{kind.__name__}"
    exported(name.format("Destroy"))(lambda handle: _destroy(kind, handle))
    if create is not None:
        exported(name.format("Create"))(lambda values, count: create(kind, values, count))
        exported(f"{name.format('Get')}Size")(lambda handle, result: _size(kind, handle, result))


_export_kind(Tensor)
_export_kind(Scalar)
for _array in (IntArray, FloatArray, BoolArray):
    _export_kind(_array, create=_create_array)
for _list in (TensorList, ScalarList):
    _export_kind(_list, create=_create_list)


# Queries


def _given(pointer: int, name: str) -> int:
    if not pointer:
        raise Refused(_NULL, f"{name} is null, and must be given")
    return pointer


def found(handle: int, kind: type[T]) -> T:
    """The object of a handle, or a refusal: 161001 for null, 161002 for anything else."""
    made = handles.find(_given(handle, "the argument"), kind)
    if made is None:
        raise Refused(_INVALID, f"the argument {handles.problem(handle, f'acl{kind.__name__}')}")
    return made


def _give_array(values: Shape, array_result: int, count_result: int) -> None:
    """Write an array that the caller frees, and its length."""
    _given(array_result, "the array's pointer")
    native.write(_given(count_result, "the count's pointer"), "Q", len(values))
    native.write(array_result, "Q", native.new_array(values))


@exported("aclGetViewShape")
def get_view_shape(tensor: int, dims: int, count: int) -> None:
    """The shape of the view."""
    _give_array(found(tensor, Tensor).shape, dims, count)


@exported("aclGetStorageShape")
def get_storage_shape(tensor: int, dims: int, count: int) -> None:
    """The shape of the storage."""
    _give_array(found(tensor, Tensor).storage_shape, dims, count)


@exported("aclGetViewStrides")
def get_view_strides(tensor: int, strides: int, count: int) -> None:
    """The strides of the view, in elements."""
    _give_array(found(tensor, Tensor).strides, strides, count)


@exported("aclGetViewOffset")
def get_view_offset(tensor: int, offset: int) -> None:
    """Where the view begins in its storage, in elements."""
    native.write(_given(offset, "offset"), "q", found(tensor, Tensor).offset)


@exported("aclGetFormat")
def get_format(tensor: int, format: int) -> None:
    """The format label."""
    native.write(_given(format, "format"), "i", found(tensor, Tensor).format)


@exported("aclGetDataType")
def get_data_type(tensor: int, dtype: int) -> None:
    """The element type."""
    native.write(_given(dtype, "dataType"), "i", found(tensor, Tensor).dtype)


@exported("aclSetRawTensorAddr")
def set_raw_tensor_addr(tensor: int, address: int) -> None:
    """Put the storage at another address. Plans made before keep theirs."""
    found(tensor, Tensor).data = address


@exported("aclGetRawTensorAddr")
def get_raw_tensor_addr(tensor: int, result: int) -> None:
    """Where the storage begins."""
    native.write(_given(result, "addr"), "Q", found(tensor, Tensor).data)
