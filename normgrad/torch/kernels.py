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

from normgrad.backends import backend_for, requested_backend
from normgrad.contract.arrays import note_written
from normgrad.contract.check import check
from normgrad.contract.plan import Backend, Kernel, Problem, launch
from normgrad.contract.products import current_product
from normgrad.operators.guards import Guard
from normgrad.operators.operator import Operator
from normgrad.operators.sharing import Sharing
from normgrad.torch.outputs import Maker

Results: TypeAlias = Tensor | tuple[Tensor | None, ...]

_MOST_KEYS = 1024
_MOST_LAYOUTS = 16  # of calls with the same key


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What a layout decides. ``written`` are the numbers of the tensors that the call changes."""

    guard: Guard
    problem: Problem
    backend: Backend
    kernel: Kernel
    makers: tuple[Callable[[Sequence[Tensor]], Tensor] | None, ...]
    odd: tuple[int, ...]  # of each tensor: the bits of its address that are zero where it is aligned
    sharing: Sharing
    written: tuple[int, ...]

    def fits(self, addresses: Sequence[int]) -> bool:
        """Whether tensors of this layout, at these addresses, lie in memory as those did that were checked."""
        for address, odd in zip(addresses, self.odd):  # noqa: B905 - strict takes longer
            if address & odd:
                return False
        return not self.written or self.sharing.holds(addresses)

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
        return self._in_full(args) if found is None else found

    def recalled(self, args: Sequence[Any]) -> Results | None:
        """The results of a call whose layout is known; None where it is not."""
        key, tensors = _key(args)
        for recipe in self._recipes.get(key, ()):
            if recipe.guard.holds(tensors):
                addresses = [tensor.data_ptr() for tensor in tensors]
                if recipe.fits(addresses):
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
        if recipe.sharing.is_plain:
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
    numbers = tuple(names.index(name) for name in written)
    return _Recipe(
        Guard(tensors, [(view.reach.nbytes, view.dtype.itemsize) for view in given]),
        problem,
        backend,
        kernel,
        tuple(None if result is None else _maker(result, tensors) for result in made),
        tuple(view.dtype.itemsize - 1 for view in given),
        Sharing(given, numbers),
        numbers,
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
