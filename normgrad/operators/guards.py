"""Whether tensors of PyTorch have the layout of those before: one call of PyTorch's own for all of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from normgrad.contract.plan import Problem


@cache
def _types() -> frozenset[type]:
    torch = sys.modules["torch"]
    return frozenset((torch.Tensor, torch.nn.Parameter))


def torch_types() -> frozenset[type]:
    """The types of tensors that are no more than memory; none while PyTorch is not imported."""
    return _types() if "torch" in sys.modules else frozenset()


def is_negated(array: Any) -> bool:
    """Whether an array is a tensor whose elements are those in its memory with another sign."""
    return type(array) in torch_types() and bool(array.is_neg())


class _Attributes:
    """What PyTorch's guards check, for a version that has none."""

    def __init__(self, *tensors: Any) -> None:
        self._layouts = self._of(tensors)

    def check(self, *tensors: Any) -> bool:
        return self._of(tensors) == self._layouts

    @staticmethod
    def _of(tensors: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [(type(t), t.dtype, t.shape, t.stride(), t.device, t.is_neg()) for t in tensors]


def _checker(tensors: Sequence[Any]) -> Any:
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return _Attributes(*tensors)
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


class Guard:
    """The layouts of a call's tensors, and how far each reaches: what a storage may no longer hold is refused."""

    def __init__(self, tensors: Sequence[Any], reaches: Sequence[tuple[int, int]]) -> None:
        firsts = [next(first for first, one in enumerate(tensors) if one is tensor) for tensor in tensors]
        # PyTorch's guards refuse to look at one tensor twice.
        self._again = tuple((number, first) for number, first in enumerate(firsts) if number != first)
        self._distinct = tuple(sorted(set(firsts)))
        self._check = _checker([tensors[number] for number in self._distinct]).check
        self._reaches = tuple(reaches)  # of each: bytes from its first element to its end, bytes of an element

    def holds(self, tensors: Sequence[Any]) -> bool:
        """Whether other tensors have the same layouts, and lie inside their storages."""
        if not self._again:
            if not self._check(*tensors):
                return False
        elif not all(tensors[number] is tensors[first] for number, first in self._again) or not self._check(
            *[tensors[number] for number in self._distinct]
        ):
            return False
        for tensor, (reach, itemsize) in zip(tensors, self._reaches):  # noqa: B905 - strict takes longer
            if tensor.storage_offset() * itemsize + reach > tensor.untyped_storage().nbytes():
                return False
        return True


def guard_of(arguments: Mapping[str, Any], problem: Problem, names: Sequence[str]) -> Guard | None:
    """The guard of the tensors among named arguments; None where there are none."""
    tensors = [name for name in names if type(arguments[name]) in torch_types()]
    if not tensors:
        return None
    views = problem.views
    reaches = [(views[name].reach.nbytes, views[name].dtype.itemsize) if name in views else (0, 1) for name in tensors]
    return Guard([arguments[name] for name in tensors], reaches)
