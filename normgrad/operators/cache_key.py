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
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

_Functions = dict[type, Callable[[Any], Hashable]]

# GPU kernels are compiled for pointers aligned to vector accesses, of 16 bytes at most.
_ALIGNMENT_BITS = 15


class NoKey(Exception):
    """An argument whose layout or value cannot be told from a key."""


def _tensor_key(tensor: Any) -> Hashable:
    device = tensor.is_cpu or (tensor.device, tensor.data_ptr() & _ALIGNMENT_BITS)
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg(), device


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


class _KeyFunctions(_Functions):
    """Key functions by exact argument type; PyTorch's types are added when the first of them is met."""

    def __init__(self, known: _Functions, of_torch: Callable[[Any], _Functions]) -> None:
        super().__init__(known)
        self._of_torch = of_torch

    def __missing__(self, kind: type) -> Callable[[Any], Hashable]:
        try:
            found = self._of_torch(sys.modules.get("torch"))[kind]
        except (AttributeError, KeyError):  # no PyTorch, its import is under way, or another type
            raise NoKey from None
        self[kind] = found
        return found


#: For parameters that are tensors.
TENSORS = _KeyFunctions(
    {np.ndarray: operator.attrgetter("dtype", "shape", "strides"), type(None): type},
    lambda torch: {torch.Tensor: _tensor_key, torch.nn.Parameter: _tensor_key},
)

#: For attributes. Equal values of different types have different keys, and so do the two zeros of float.
ATTRIBUTES = _KeyFunctions(
    {
        int: operator.index,
        bool: repr,
        float: float.hex,
        type(None): type,
        list: _sequence_key,
        tuple: _sequence_key,
        **dict.fromkeys(_NUMPY_SCALARS, _numpy_scalar_key),
    },
    lambda torch: {torch.Size: _sequence_key},
)
