"""Cache keys: what a checked call depends on, apart from the addresses and the elements of its arrays.

Every rule of the contract but those about memory is decided by layouts (dtype, shape, strides, device) and by the
values of the attributes. Two calls with equal keys therefore pass the same checks and run the same kernel. A key refers
to no argument.

Only arguments of known, exact types have a key: a subclass, an array given as an attribute or an object with
``__index__`` may mean something else at every call. A call with such an argument is checked in full every time.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

# GPU kernels are compiled for pointers aligned to vector accesses, of 16 bytes at most.
_ALIGNMENT_BITS = 15


class NoKey(Exception):
    """An argument whose layout or value cannot be told from a key."""


def _torch_types(*names: str) -> tuple[type, ...]:
    """Return types of PyTorch's; none where it is not imported, or its import is under way."""
    torch = sys.modules.get("torch")
    try:
        return tuple(operator.attrgetter(name)(torch) for name in names)
    except AttributeError:
        return ()


#: PyTorch's types of tensors that have a key, once one of them is met.
_TENSOR_TYPES: set[type] = set()


def add_array_keys(key: list[Hashable], arguments: Sequence[Any], positions: Iterable[int]) -> None:
    """Add the keys of the arrays at these positions to a key; None where there is none.

    One loop for all: a function call per tensor would take a fifth of the time.
    """
    for position in positions:
        array = arguments[position]
        array_type = type(array)
        if array_type in _TENSOR_TYPES:
            if array.is_cpu:
                key.append((array.dtype, array.shape, array.stride(), array.is_neg()))
            elif array.is_cuda:
                alignment = array.data_ptr() & _ALIGNMENT_BITS
                key.append((array.dtype, array.shape, array.stride(), array.is_neg(), array.get_device(), alignment))
            else:
                raise NoKey
        elif array_type is np.ndarray:
            key.append((array.dtype, array.shape, array.strides))
        elif array is None:
            key.append(None)
        elif array_type in _torch_types("Tensor", "nn.Parameter"):
            _TENSOR_TYPES.add(array_type)
            add_array_keys(key, arguments, (position,))
        else:
            raise NoKey


def _sequence_key(items: Any) -> Hashable:
    items = tuple(items)
    first = type(items[0]) if items else int
    if first is not int and first is not bool:
        raise NoKey
    for item in items:
        if type(item) is not first:
            raise NoKey
    return items if first is int else (bool, items)  # since (1, 0) == (True, False)


def _numpy_scalar_key(scalar: Any) -> Hashable:
    return type(scalar), scalar.tobytes()


_NUMPY_SCALARS = (np.bool_, np.int32, np.int64, np.float32, np.float64)

#: Equal values of different types have different keys, and so do the two zeros of float.
_ATTRIBUTES: dict[type, Callable[[Any], Hashable]] = {
    int: operator.index,
    bool: repr,
    float: float.hex,
    type(None): type,
    list: _sequence_key,
    tuple: _sequence_key,
    **dict.fromkeys(_NUMPY_SCALARS, _numpy_scalar_key),
}


def add_attribute_keys(key: list[Hashable], arguments: Sequence[Any], positions: Iterable[int]) -> None:
    """Add the keys of the attributes at these positions to a key."""
    for position in positions:
        value = arguments[position]
        function = _ATTRIBUTES.get(type(value))
        if function is None:
            if type(value) not in _torch_types("Size"):
                raise NoKey
            function = _ATTRIBUTES[type(value)] = _sequence_key
        key.append(function(value))
