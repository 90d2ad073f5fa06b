"""Which recipe a call follows: an operator's calls by their layouts."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from normgrad.backends import requested_backend
from normgrad.contract.arrays import Make, numpy_address, quick_torch_maker, wants_note
from normgrad.contract.check import Signature
from normgrad.contract.plan import Backend, Kernel, Problem, counted_on
from normgrad.contract.products import Product
from normgrad.operators import gathering
from normgrad.operators.finishing import in_native_code, in_python
from normgrad.operators.guards import Guard, is_plain, sequence_types, torch_types
from normgrad.operators.recipes import Arguments, Made, Recipe
from normgrad.operators.register import Register
from normgrad.operators.sharing import Sharing

_NUMBERS = frozenset((int, float, bool))
_MOST_KEYS = 1024
_MOST_LAYOUTS = 16  # of calls with the same key


class OffTrack(Exception):
    """An argument that only the full checks can judge."""


class _Case:
    """The calls whose arguments have the same types."""

    def __init__(self, arguments: Arguments, written: Sequence[int]) -> None:
        plain, sequences = torch_types(), (list, tuple, *sequence_types())
        places: dict[str, list[int]] = {"arrays": [], "tensors": [], "numbers": [], "sequences": []}
        for place, argument in enumerate(arguments):
            kind = type(argument)
            if kind is np.ndarray:
                places["arrays"].append(place)
            elif kind in plain:
                places["tensors"].append(place)
            elif kind in _NUMBERS:
                places["numbers"].append(place)
            elif kind in sequences:
                places["sequences"].append(place)
            elif argument is not None:
                raise OffTrack
        self.arrays, self.tensors = places["arrays"], places["tensors"]
        self._of_numbers, self._sequences = _getter(places["numbers"]), places["sequences"]
        self._changed = [place for place in self.arrays if place in written]
        self._of_tensors = _getter(self.tensors)
        self.recipes: dict[Hashable, list[Recipe]] = {}

    def key(self, arguments: Arguments, product: Product | None, addresses: list[int]) -> tuple[Hashable, ...]:
        """A key of all but PyTorch's tensors; the addresses of NumPy's arrays are added to a list."""
        key: list[Hashable] = [requested_backend(), product, *self._of_numbers(arguments)]
        for place in self._sequences:
            items = tuple(arguments[place])
            key.append(items)
            key.append(tuple(map(type, items)))  # since 1 == 1.0
        if self.arrays:
            for place in self.arrays:
                array = arguments[place]
                address = numpy_address(array)
                key.append((array.dtype, array.shape, array.strides, address & 3))
                if array.base is not None:
                    key.append(_place_in_base(array.base, address))
                addresses.append(address)
            key += [arguments[place].flags.writeable for place in self._changed]
        return tuple(key)

    def recalled(self, arguments: Arguments, product: Product | None, differentiating: bool) -> Any:
        addresses: list[int] = []
        try:
            recipes = self.recipes.get(self.key(arguments, product, addresses), ())
        except Exception:  # an odd array, or a number that is none: the checks will say what is wrong with it
            return None
        tensors = self._of_tensors(arguments)
        for recipe in recipes:
            if not (differentiating and recipe.needs_grad):
                found = recipe.tried(arguments, addresses, tensors)
                if found is not None:
                    return found
        return None

    def parts(self, arguments: Arguments) -> tuple[list[int], tuple[Any, ...]]:
        """The addresses of NumPy's arrays among the arguments, and PyTorch's tensors."""
        return [numpy_address(arguments[place]) for place in self.arrays], self._of_tensors(arguments)


def _fewest(arguments: Arguments, defaults: Sequence[Any]) -> int:
    """How many arguments are needed: any after them are as the defaults are."""
    if len(arguments) > len(defaults):
        return len(arguments)
    count = len(arguments)
    while count and _is_same(arguments[count - 1], defaults[count - 1]):
        count -= 1
    return count


def _is_same(argument: Any, default: Any) -> bool:
    return argument is default or (type(argument) is type(default) and bool(argument == default))


def _variants(arguments: Arguments) -> Iterator[tuple[type, ...]]:
    """The types of arguments, with every type that a sequence may come in."""
    sequences = (list, tuple, *sequence_types())
    return itertools.product(
        *(sequences if isinstance(argument, list | tuple) else (type(argument),) for argument in arguments)
    )


def _getter(places: Sequence[int]) -> Callable[[Arguments], tuple[Any, ...]]:
    if len(places) > 1:
        return itemgetter(*places)
    first = places[0] if places else 0
    return itemgetter(slice(first, first + len(places)))


def _place_in_base(base: Any, address: int) -> tuple[Hashable, ...]:
    """What decides, beside its layout, whether a view stays inside the array it is a view of."""
    if type(base) is np.ndarray:
        if base.base is None:
            return address - numpy_address(base), base.nbytes
        if not hasattr(base.base, "base"):  # memory of something else: what the array reaches is what there is
            return address - numpy_address(base), base.shape, base.strides, base.itemsize
    elif not hasattr(base, "base"):
        return ()
    raise OffTrack


class Recipes:
    """An operator's recipes. Arguments come by position, those that bring outputs last or not at all."""

    def __init__(self, signature: Signature, names: Sequence[str], defaults: Sequence[Any]) -> None:
        self._signature = signature
        self._names = (*names, *signature.output_names)
        self._defaults = defaults
        #: The recipes that native code follows, by the product that calls are for.
        self.registers: defaultdict[Product | None, Register] = defaultdict(Register)
        self._written = [place for place, name in enumerate(self._names) if signature.is_written(name)]
        self._cases: dict[tuple[type, ...], _Case] = {}

    def forget(self) -> None:
        """Know no call."""
        self._cases.clear()
        for register in list(self.registers.values()):
            register.forget()

    def recalled(self, arguments: Arguments, product: Product | None, differentiating: bool = False) -> Any:
        """The results of a call whose layout is known, in Python; None where it is not.

        ``differentiating``: nor where autograd follows one of the tensors.
        """
        case = self._cases.get(tuple(map(type, arguments)))
        return None if case is None else case.recalled(arguments, product, differentiating)

    def keep(
        self,
        arguments: Arguments,
        product: Product | None,
        problem: Problem,
        backend: Backend,
        kernel: Kernel,
        made: Sequence[Made],
        wanted: Sequence[bool],
    ) -> None:
        """Leave a recipe of a call for the next one, unless its memory decides too much."""
        kinds = list(_variants(arguments))
        try:
            case = self._cases.get(kinds[0]) or _Case(arguments, self._written)
            key = case.key(arguments, product, [])
            recipe = self._recipe(case, arguments, problem, backend, kernel, made, wanted)
        except (OffTrack, ImportError):
            return
        if len(self._cases) >= _MOST_KEYS:
            self._cases.clear()
        self._cases.update(dict.fromkeys(kinds, case))
        recipes = case.recipes
        if len(recipes) >= _MOST_KEYS:
            recipes.clear()
        same_key = recipes.setdefault(key, [])
        if len(same_key) >= _MOST_LAYOUTS:
            same_key.clear()
        same_key.append(recipe)
        self._enter(self.registers[product], case, arguments, recipe, made)

    def _enter(
        self, register: Register, case: _Case, arguments: Arguments, recipe: Recipe, made: Sequence[Made]
    ) -> None:
        """Into a register, unless arrays and tensors are mixed, of which there must be some."""
        if bool(case.arrays) == bool(case.tensors):
            return
        seen = case.arrays or case.tensors
        finish = self._finish(case, recipe, [self._names[place] for place in seen], made)
        if finish is None:
            finish = in_python(lambda arguments: recipe.tried(arguments, *case.parts(arguments)))
        fewest = _fewest(arguments, self._defaults)
        register.add(arguments, self._written, fewest, seen, recipe.needs_grad, finish)

    def _finish(
        self, case: _Case, recipe: Recipe, seen: Sequence[str], made: Sequence[Made]
    ) -> Mapping[str, Any] | None:
        """The end of a call in native code; None where it needs Python."""
        step: Any = getattr(recipe.kernel, "one_step", None)
        if step is None or recipe.noted:
            return None
        makers = {output.name: output.make for output in made}
        if case.tensors:
            if gathering.gather() is None:
                return None
            makers = {output.name: quick_torch_maker(output.array) for output in made}
        outputs = [
            makers.get(name, output) if callable(output) else output
            for name, output in zip(self._signature.output_names, recipe.outputs, strict=True)
        ]
        return in_native_code(recipe, step, outputs, seen, [output.name for output in made])

    def _recipe(
        self,
        case: _Case,
        arguments: Arguments,
        problem: Problem,
        backend: Backend,
        kernel: Kernel,
        made: Sequence[Made],
        wanted: Sequence[bool],
    ) -> Recipe:
        names, views = self._names, problem.views
        tensors = [arguments[place] for place in case.tensors]
        if tensors and not is_plain(tensors):
            raise OffTrack
        seen = [names[place] for place in (*case.arrays, *case.tensors)]
        given = [name for name in views if name in seen]
        written = [name for name in given if problem.signature.is_written(name)]
        sharing = Sharing([views[name] for name in given], [given.index(name) for name in written])
        if not sharing.is_plain:
            raise OffTrack
        used, bits = [names[place] for place in case.tensors], counted_on(kernel, problem)
        return Recipe(
            any(tensor.requires_grad for tensor in tensors),
            problem,
            backend,
            kernel,
            self._outputs({output.name: output.make for output in made}, wanted),
            Guard(tensors, list(map(views.get, used)), [bits.get(name, 0) for name in used]) if tensors else None,
            None if given == seen else tuple(seen.index(name) for name in given),
            sharing if written else None,
            tuple(names.index(name) for name in written if wants_note(arguments[names.index(name)])),
        )

    def _outputs(self, made: Mapping[str, Make], wanted: Sequence[bool]) -> tuple[Make | int | None, ...]:
        """As a recipe has them."""
        return tuple(
            made.get(name, self._names.index(name)) if want else None
            for name, want in zip(self._signature.output_names, wanted, strict=True)
        )
