"""A valid call of an operator, with its arrays in one arena and everything known that it must bring about."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import normgrad
from normgrad.testing import compare, oracle, terms
from normgrad.testing.expected import as_tuple
from support.arena import LAYOUTS, Arena, Place, as_float64
from support.dtypes import NUMPY, dtype_name
from support.values import STYLES

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Output:
    """An output as the contract has it: its shape, and its dtype where the library makes it."""

    name: str
    shape: Shape
    dtype: str
    wanted: bool


@dataclass
class Case:
    """One call: ``arguments`` by parameter name without the outputs, ``out`` in the outputs' order."""

    operator: str
    arena: Arena
    arguments: dict[str, Any]
    outputs: list[Output]
    out: list[Any]
    places: dict[str, Place]
    in_place: list[str] = field(default_factory=list)

    def call(self, **more: Any) -> tuple[Any, ...]:
        """The plain call; its results as a tuple even where there is one."""
        return as_tuple(getattr(normgrad, self.operator)(**self.arguments, out=tuple(self.out), **more))

    def plan(self, **more: Any) -> normgrad.Plan:
        """The plan of the call."""
        return getattr(normgrad, self.operator).plan(**self.arguments, out=tuple(self.out), **more)

    def exact(self) -> tuple[list[Any], list[Any]]:
        """What the oracle says now, and how large its terms are; the in-place results at the end."""
        wide = {
            name: as_float64(value) if isinstance(value, np.ndarray | torch.Tensor) else value
            for name, value in self.arguments.items()
        }
        magnitudes = getattr(terms, self.operator)(**wide)
        expected = getattr(oracle, self.operator)(**wide)
        if not isinstance(expected, tuple):
            expected, magnitudes = (expected,), (magnitudes,)
        moved = [wide[name] for name in self.in_place]
        magnitudes = [*magnitudes[: len(expected)], *filter(None, magnitudes[len(expected) :])]
        return [*expected, *moved], magnitudes

    def written_places(self) -> list[Place]:
        """Where the call may write."""
        outputs = [output.name for output in self.outputs if output.wanted and output.name in self.places]
        return [self.places[name] for name in [*outputs, *self.in_place]]

    def check_results(self, results: Sequence[Any], expected: Sequence[Any], magnitudes: Sequence[Any]) -> None:
        """Every output as asked for and within the bound; those not wanted None."""
        moved = [self.arguments[name] for name in self.in_place]
        for output, given, result in zip(self.outputs, self.out, results, strict=True):
            if not output.wanted:
                assert result is None
            elif given is not None:
                assert result is given
            else:
                kind = torch.Tensor if isinstance(self.arguments["input"], torch.Tensor) else np.ndarray
                assert isinstance(result, kind)
                assert (tuple(result.shape), dtype_name(result)) == (output.shape, output.dtype), output.name
        names = [output.name for output in self.outputs] + self.in_place
        for name, actual, exact, magnitude in zip(names, [*results, *moved], expected, magnitudes, strict=True):
            if actual is not None:
                shape = tuple(actual.shape)
                report = compare(actual, np.reshape(exact, shape), magnitude.reshaped(shape))
                assert report, f"{name}: {report.text}"


@dataclass
class _Wish:
    """A tensor of a call before it has a place."""

    shape: Shape
    dtype: str
    values: Any = None  # None for an output
    in_place: bool = False


class Builder:
    """Draws a case: what the tensors are is said by an operator's recipe, where they lie is drawn here."""

    def __init__(self, draw: Callable[[Any], Any], operator: str) -> None:
        self.draw = draw
        self.operator = operator
        self.style: str = draw(st.sampled_from(STYLES))
        self.kind: str = draw(st.sampled_from(("numpy", "torch", "mixed")))
        self.sharing: str = draw(st.sampled_from(("apart", "shifted", "same")))
        seed = draw(st.integers(0, 2**32 - 1))
        self.rng, self.random = np.random.default_rng(seed), random.Random(seed)
        self.wishes: dict[str, _Wish] = {}
        self.arguments: dict[str, Any] = {}
        self.outputs: list[Output] = []
        self.twins: dict[str, str] = {}

    def one_of(self, *options: Any) -> Any:
        """One of a few."""
        return self.draw(st.sampled_from(options))

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def shape(self, lowest: int, highest: int, elements: int = 300) -> Shape:
        """Dimensions: odd sizes, ones, now and then a zero; not many elements."""
        rank = self.draw(st.integers(lowest, highest))
        sizes = [self.random.choice((1, 2, 3, 4, 5, 7, 9, 17)) for _ in range(rank)]
        while np.prod(sizes, dtype=int) > elements:
            sizes[sizes.index(max(sizes))] = self.random.choice((1, 2, 3))
        if rank and self.random.random() < 0.1:
            sizes[self.random.randrange(rank)] = 0
        return tuple(sizes)

    def shape_with(self, elements: int, lowest: int, highest: int) -> Shape:
        """Dimensions that hold so many elements, split at random."""
        rank = self.random.randint(lowest, min(highest, lowest + 4))
        if rank == 0 and elements != 1:
            rank = 1
        if elements == 0:
            sizes = [self.random.choice((0, 1, 3)) for _ in range(rank - 1)]
            return (*sizes, 0)
        sizes = [1] * rank
        for prime in _primes(elements):
            sizes[self.random.randrange(rank)] *= prime
        return tuple(sizes)

    def tensor(self, name: str, shape: Shape, dtype: str, values: Any, *, in_place: bool = False) -> None:
        """An input."""
        self.wishes[name] = _Wish(shape, dtype, np.asarray(values), in_place)
        self.arguments[name] = None

    def absent(self, name: str) -> None:
        """An optional input that is left out."""
        self.arguments[name] = None

    def attribute(self, name: str, value: Any) -> None:
        self.arguments[name] = value

    def twin(self, name: str, other: str) -> None:
        """Let an input be the very same array as another, where they can be."""
        a, b = self.wishes[name], self.wishes[other]
        if (a.shape, a.dtype) == (b.shape, b.dtype) and self.random.random() < 0.1:
            self.twins[name] = other

    def output(self, name: str, shape: Shape, dtypes: Sequence[str], *, wanted: bool = True) -> str | None:
        """An output, given or left to the library; ``dtypes`` are those allowed, the library's own first.

        Returns the dtype of one that is given.
        """
        self.outputs.append(Output(name, shape, dtypes[0], wanted))
        if not wanted or self.flag():
            return None
        dtype = self.random.choice(dtypes)
        self.wishes[name] = _Wish(shape, dtype)
        return dtype

    def finished(self) -> Case:
        """The case, with every array in its place and every input filled."""
        places = self._places()
        arena = self._arena
        for name, wish in self.wishes.items():
            if wish.values is not None and name not in self.twins:
                arena.fill(places[name], wish.values)
        arrays = {name: arena.array(place, self._kinds[name]) for name, place in places.items()}
        for name, wish in self.wishes.items():
            if wish.values is not None:
                self.arguments[name] = arrays[name]
        out = [arrays.get(output.name, self._unwanted(output)) for output in self.outputs]
        in_place = [name for name, wish in self.wishes.items() if wish.in_place]
        return Case(self.operator, arena, self.arguments, self.outputs, out, places, in_place)

    def _unwanted(self, output: Output) -> Any:
        """What stands for an output that is not given: anything, where it is not wanted."""
        if output.wanted:
            return None
        return self.random.choice((None, "anything", np.zeros(3), object()))

    def _places(self) -> dict[str, Place]:
        arena = self._arena = Arena()
        kinds = [self.kind] if self.kind != "mixed" else ["numpy", "torch"]
        self._kinds = {name: self.random.choice(kinds) for name in self.wishes}
        places: dict[str, Place] = {}
        read = [name for name, wish in self.wishes.items() if wish.values is not None and not wish.in_place]
        written = [name for name, wish in self.wishes.items() if wish.values is None]
        for name in read:
            if name in self.twins:
                places[name], self._kinds[name] = places[self.twins[name]], self._kinds[self.twins[name]]
            else:
                places[name] = self._reserve(arena, name)
        free = [places[name] for name in read if name not in self.twins and not _shares_elements(places[name])]
        if self.sharing == "shifted":
            end, arena.size = arena.size, 8 * self.random.randrange(8, arena.size // 8 + 1)
            places.update({name: self._reserve(arena, name) for name in written})
            arena.size = max(arena.size, end)
        else:
            for name in written:
                match = self._taken_from(free, name) if self.sharing == "same" else None
                places[name] = match or self._reserve(arena, name)
        places.update({name: self._reserve(arena, name) for name, wish in self.wishes.items() if wish.in_place})
        return places

    def _taken_from(self, free: list[Place], name: str) -> Place | None:
        """The place of an input of the same shape and element size, for an output that takes it over."""
        wish = self.wishes[name]
        for place in free:
            negative = any(stride < 0 for stride in place.strides)
            fits = place.shape == wish.shape and NUMPY[place.dtype].itemsize == NUMPY[wish.dtype].itemsize
            if fits and not (negative and self._kinds[name] == "torch"):
                free.remove(place)
                return Place(place.offset, place.shape, place.strides, wish.dtype)
        return None

    def _reserve(self, arena: Arena, name: str) -> Place:
        wish = self.wishes[name]
        layout = self.draw(st.sampled_from(LAYOUTS))
        if layout == "broadcast" and (wish.values is None or wish.in_place):
            layout = "contiguous"
        if self._kinds[name] == "torch":
            layout = {"reversed": "sliced", "mixed": "permuted"}.get(layout, layout)
        return arena.reserve(wish.shape, wish.dtype, layout, self.random)


def _shares_elements(place: Place) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(place.strides, place.shape, strict=True))


def _primes(number: int) -> list[int]:
    found, prime = [], 2
    while number > 1:
        while number % prime == 0:
            found.append(prime)
            number //= prime
        prime += 1
    return found
