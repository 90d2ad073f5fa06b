"""Whether tensors of PyTorch have the layout of those before: one call of PyTorch's own for all of them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from normgrad.contract.view import View
from normgrad.operators import gathering


@cache
def _types() -> frozenset[type]:
    torch = sys.modules["torch"]
    return frozenset((torch.Tensor, torch.nn.Parameter))


def torch_types() -> frozenset[type]:
    """The types of tensors that are no more than memory; none while PyTorch is not imported."""
    return _types() if "torch" in sys.modules else frozenset()


def sequence_types() -> tuple[type, ...]:
    """What PyTorch has beside lists and tuples."""
    return (sys.modules["torch"].Size,) if "torch" in sys.modules else ()


def is_plain(tensors: Sequence[Any]) -> bool:
    """Whether the elements of tensors are what stands in their memory, and nothing watches or transforms calls.

    What PyTorch's guards see of a thread's state then says the same of a later call.
    """
    torch = sys.modules["torch"]
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or any(tensor.is_neg() for tensor in tensors)
    )


class Guard:
    """The layouts of a call's tensors, and how far each reaches: what a storage may no longer hold is refused."""

    def __init__(self, tensors: Sequence[Any], views: Sequence[View | None], counted_on: Sequence[int]) -> None:
        """Tensors without a view are not used; the others must have these bits of their address as they are."""
        from torch._C._dynamo.guards import TensorGuards

        firsts = [next(first for first, one in enumerate(tensors) if one is tensor) for tensor in tensors]
        # PyTorch's guards refuse to look at one tensor twice.
        self._again = tuple((number, first) for number, first in enumerate(firsts) if number != first)
        self._distinct = tuple(sorted(set(firsts)))
        distinct = [tensors[number] for number in self._distinct]
        self._check = TensorGuards(*distinct, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        #: Whether other tensors have the same layouts.
        self.holds: Callable[..., bool] = self._holds_again if self._again else self._check
        self.limits = tuple(map(_limits, views, counted_on))
        self._gather = gathering.gather()
        self._table = array("q", gathering.table(self.limits, [], 1, []))
        self._room = array("q", bytes(8 * (1 + len(tensors))))

    def _holds_again(self, *tensors: Any) -> bool:
        if any(tensors[number] is not tensors[first] for number, first in self._again):
            return False
        return bool(self._check(*[tensors[number] for number in self._distinct]))

    def places(self, tensors: tuple[Any, ...]) -> list[int] | None:
        """Where tensors of these layouts lie, if all are inside their storages."""
        if self._gather is None:
            return _places(tensors, self.limits)
        room = self._room[:]
        if self._gather(self._table.buffer_info()[0], id(tensors), id(()), room.buffer_info()[0]):
            return None
        return room.tolist()[1:]


def _places(tensors: tuple[Any, ...], limits: Sequence[gathering.Limits]) -> list[int] | None:
    addresses = []
    for tensor, (size, reach, odd, rest) in zip(tensors, limits, strict=True):
        address = tensor.data_ptr()
        if address & odd != rest or tensor.storage_offset() * size + reach > tensor.untyped_storage().nbytes():
            return None
        addresses.append(address)
    return addresses


def _limits(view: View | None, counted_on: int) -> gathering.Limits:
    if view is None:
        return 1, 0, 0, 0
    size = view.dtype.itemsize
    bits = size - 1 | counted_on
    return size, view.reach.end - view.address, bits, view.address & bits
