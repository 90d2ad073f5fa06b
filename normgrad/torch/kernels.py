"""An operator on plain tensors: the shortest way from Python to its kernel.

The layouts of a model's tensors come back step after step. What the checks and the backend made of a layout is kept in
a recipe, and PyTorch's own guards, one call for all the tensors, tell whether a call has that layout.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from normgrad.backends import backend_for, requested_backend
from normgrad.contract.arrays import note_written
from normgrad.contract.check import check
from normgrad.contract.plan import Backend, Kernel, Problem, launch
from normgrad.contract.products import current_product
from normgrad.operators.operator import Operator
from normgrad.torch.outputs import Maker

Results: TypeAlias = Tensor | tuple[Tensor | None, ...]

_MOST_KEYS = 1024
_MOST_LAYOUTS = 16  # of calls with the same key


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What a layout decides. ``written`` are the numbers of the tensors that the call changes."""

    guards: TensorGuards
    problem: Problem
    backend: Backend
    kernel: Kernel
    makers: tuple[Callable[[Sequence[Tensor]], Tensor] | None, ...]
    lies: tuple[
        tuple[int, int], ...
    ]  # of each tensor: bytes from its first element to its end, and bytes an element takes
    written: tuple[int, ...]

    def is_safe(self, tensors: Sequence[Tensor], addresses: Sequence[int]) -> bool:
        """Whether tensors of this layout, at these addresses, lie in their memory as the contract has it."""
        for tensor, address, (reach, itemsize) in zip(tensors, addresses, self.lies):  # noqa: B905 - strict takes longer
            beyond = tensor.storage_offset() * itemsize + reach > tensor.untyped_storage().nbytes()
            if beyond or address & (itemsize - 1):
                return False
        return not self.written or not self.collides(addresses)

    def collides(self, addresses: Sequence[int]) -> bool:
        """Whether a tensor that the call changes shares memory with another."""
        ranges = [(address, address + reach) for address, (reach, _) in zip(addresses, self.lies, strict=True)]
        return any(
            number != other and ranges[number][0] < ranges[other][1] and ranges[other][0] < ranges[number][1]
            for number in self.written
            for other in range(len(ranges))
        )

    def serve(self, tensors: Sequence[Tensor], addresses: list[int]) -> Results:
        """The results of a call on these tensors."""
        results: list[Tensor | None] = []
        for make in self.makers:
            result = None
            if make is not None:
                result = make(tensors)
                addresses.append(result.data_ptr())
            results.append(result)
        launch(self.problem, addresses, self.kernel, self.backend)
        for number in self.written:
            note_written(tensors[number])
        return packed(results)


class TorchKernel:
    """An operator as a function of the arguments that its PyTorch schema has, by position."""

    def __init__(self, operator: Operator[..., Any], make: Maker) -> None:
        self._signature = operator.signature
        self._make = make
        parameters = [p for p in operator.__signature__.parameters.values() if p.name not in ("out", "product")]
        self._names = [parameter.name for parameter in parameters]
        self._defaults = [parameter.default for parameter in parameters]
        self._recipes: dict[Hashable, list[_Recipe]] = {}

    def __call__(self, *args: Any) -> Results:
        found = self.recalled(args)
        if found is not None:
            return found
        apart = _each_its_own(args)  # PyTorch's guards take no tensor twice
        found = self.recalled(apart)
        return self._in_full(apart) if found is None else found

    def recalled(self, args: Sequence[Any]) -> Results | None:
        """The results of a call whose layout is known; None where it is not."""
        key, tensors = _key(args)
        for recipe in self._recipes.get(key, ()):
            if recipe.guards.check(*tensors):
                addresses = [tensor.data_ptr() for tensor in tensors]
                if recipe.is_safe(tensors, addresses):
                    return recipe.serve(tensors, addresses)
        return None

    def _in_full(self, args: Sequence[Any]) -> Results:
        """Check and run a call, and leave a recipe for the next one of its layout."""
        arguments = dict(zip(self._names, [*args, *self._defaults[len(args) :]], strict=True))
        product = current_product()
        check(self._signature, arguments, product, outputs_needed=False)
        made = self._make(*args)
        outputs = dict(zip(self._signature.output_names, made, strict=True))
        call = check(self._signature, arguments | outputs, product, outputs_needed=True)
        views = {name: view for name, view in call.views.items() if name not in outputs or outputs[name] is not None}
        # Without the views' owners, which the arguments keep alive: a recipe must not.
        problem = Problem(self._signature, {name: view.disowned() for name, view in views.items()}, call.attributes)
        backend = backend_for(problem)
        kernel = backend.prepare(problem)
        launch(problem, problem.addresses, kernel, backend)
        written = [name for name in views if self._signature.is_written(name) and name not in outputs]
        for name in written:
            note_written(arguments[name])
        key, tensors = _key(args)
        if not any(tensor.is_neg() for tensor in tensors):  # which are read through a copy
            self._keep(key, _recipe(problem, backend, kernel, tensors, made, written))
        return packed(made)

    def _keep(self, key: Hashable, recipe: _Recipe) -> None:
        if len(self._recipes) >= _MOST_KEYS:
            self._recipes.clear()
        same_key = self._recipes.setdefault(key, [])
        if len(same_key) >= _MOST_LAYOUTS:
            same_key.clear()
        if not recipe.written or not recipe.collides(recipe.problem.addresses[: len(recipe.lies)]):
            same_key.append(recipe)


def are_plain(args: Sequence[Any]) -> bool:
    """Whether the tensors among the arguments are no more than memory: nothing wraps, traces or negates them."""
    return all(
        torch._C._dispatch_keys(arg).raw_repr() == _plain_keys(arg.device) for arg in args if isinstance(arg, Tensor)
    )


@cache
def _plain_keys(device: torch.device) -> int | None:
    if device.type not in ("cpu", "cuda"):
        return None
    keys: int = torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr()
    return keys


def _each_its_own(args: Sequence[Any]) -> list[Any]:
    """The arguments with a tensor object of its own for each place, over the same memory."""
    seen: set[int] = set()
    apart: list[Any] = []
    for arg in args:
        repeated = isinstance(arg, Tensor) and id(arg) in seen
        seen.add(id(arg))
        apart.append(arg.detach() if repeated else arg)
    return apart


def _key(args: Sequence[Any]) -> tuple[Hashable, list[Tensor]]:
    """The arguments that are no tensors, which of them are, and those."""
    key: list[Hashable] = [requested_backend(), current_product()]
    tensors: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            tensors.append(arg)
            key.append(Tensor)
        else:
            key.append(tuple(arg) if type(arg) is list else arg)
    return tuple(key), tensors


def _recipe(
    problem: Problem,
    backend: Backend,
    kernel: Kernel,
    tensors: Sequence[Tensor],
    made: Sequence[Tensor | None],
    written: Sequence[str],
) -> _Recipe:
    names, views = list(problem.views), list(problem.views.values())
    given = views[: len(tensors)]
    return _Recipe(
        TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None),
        problem,
        backend,
        kernel,
        tuple(None if result is None else _maker(result, tensors) for result in made),
        tuple((view.reach.nbytes, view.dtype.itemsize) for view in given),
        tuple(names.index(name) for name in written),
    )


def _maker(result: Tensor, tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Tensor]:
    """How to make another tensor of the layout of a result: as one of the arguments where it has the same."""
    shape, strides, dtype, device = result.shape, result.stride(), result.dtype, result.device
    for number, tensor in enumerate(tensors):
        if (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) == (shape, strides, dtype, device):
            return lambda tensors: torch.empty_like(tensors[number])  # takes less time than to say all of it
    return lambda tensors: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def packed(results: Sequence[Tensor | None]) -> Results:
    """Results as a schema has them: one alone, several as a tuple."""
    return tuple(results) if len(results) > 1 else results[0]
