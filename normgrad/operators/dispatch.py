"""Dispatch: from the arguments of a call to its kernel, with a cache of what earlier calls have prepared.

A call goes one way::

    look up the key of the arguments
        on a miss: check the call, prepare its kernel, and store both as a cache entry
    allocate the outputs
    launch the kernel

Plain calls, ``torch.ops.normgrad``, the modules and ``override()`` all run through :class:`Dispatch`.

There is no lock. Every access to the cache is a single operation of a dict, and all other state of a call is its own:
threads, and signal handlers and finalizers that call an operator in the middle of another call, do not disturb it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from normgrad.backends import backend_for, requested_backend
from normgrad.contract.arrays import FreshArray, NotAnArray, library_of, note_written, numpy_address, wants_note
from normgrad.contract.check import Signature, check
from normgrad.contract.parameters import Broken, Call, Tensor
from normgrad.contract.plan import Backend, Kernel, Problem, launch, prepare
from normgrad.contract.products import Product
from normgrad.contract.status import RUNTIME, quote, shown_error
from normgrad.contract.view import Memory, View
from normgrad.operators.aliasing import Aliasing
from normgrad.operators.cache_key import NoKey, add_array_keys, add_attribute_keys

#: The arguments by position. After those of the operator may come its outputs, None for each that is not given.
Arguments = tuple[Any, ...]

#: Chooses the layouts of the wanted outputs that are not given, from the arguments by name.
ChooseOutputs = Callable[[Mapping[str, Any], Call, Product | None], Mapping[str, FreshArray]]

#: How many entries a cache holds. A model has tens of layouts; an entry takes some kilobytes.
MAX_ENTRIES = 1024

#: How many bytes an output may have: the address space of a process on x86-64 and AArch64. Kernels compute offsets in
#: 64 bits, and a multiple of this still fits.
_MAX_BYTES = 1 << 47

_clock = itertools.count()


class _Given(NamedTuple):
    """An array among the arguments: its position, and the range of bytes that its layout covers from its address."""

    position: int
    start: int
    end: int
    itemsize: int
    written: bool


@dataclass(slots=True)
class CacheEntry:
    """A prepared call: its kernel, and how calls with the same key run it. It refers to no array of the caller's."""

    problem: Problem
    backend: Backend
    kernel: Kernel
    given: Sequence[_Given]  # the first of the problem's views; the outputs to allocate are the others
    aliasing: Aliasing | None  # None where no given array is written
    fresh: Sequence[FreshArray]  # the outputs to allocate
    results: Sequence[int] | None  # of each output the index in [*allocated, None, *arguments]; None: all allocated
    last_used: int = field(default_factory=_clock.__next__)

    def addresses(self, arguments: Arguments) -> list[int] | None:
        """Return the addresses of the given arrays; None where the full check has to judge them.

        The key does not say whether arrays are aligned and writable, lie inside their memory, and alias each other as
        they did when the entry was prepared. RuntimeError: a tensor has no memory.
        """
        addresses = []
        for position, start, end, itemsize, written in self.given:
            array = arguments[position]
            if type(array) is np.ndarray:
                address = numpy_address(array)
                base = array.base
                if base is not None and not _is_inside(base, address + start, address + end):
                    return None
                if written and not array.flags.writeable:
                    return None
            else:
                address = array.data_ptr()
                available = array.untyped_storage().nbytes() - array.storage_offset() * itemsize
                if end and (end > available or not address):
                    return None
            if address % itemsize:
                return None
            addresses.append(address)
        return addresses if self.aliasing is None or self.aliasing.holds(addresses) else None

    def run(self, arguments: Arguments, addresses: list[int]) -> list[Any]:
        """Allocate outputs, launch the kernel on them and on the arrays at these addresses, and return all outputs."""
        try:
            allocated = [layout.allocate() for layout in self.fresh]
        except (MemoryError, RuntimeError, ValueError) as error:  # NumPy's and PyTorch's
            if type(error).__name__ == "OutOfMemoryError":  # of a GPU, which training loops catch
                raise
            text = f"there is no memory for the results: {quote(shown_error(error))}"
            raise self.problem.signature.error(None, text, RUNTIME) from error
        try:
            addresses += [layout.address(array) for layout, array in zip(self.fresh, allocated)]  # noqa: B905
        except NotAnArray as error:
            raise self.problem.signature.error(None, str(error)) from None
        launch(self.problem, addresses, self.kernel, self.backend)
        if self.aliasing is not None:
            written = [arguments[given.position] for given in self.given if given.written]
            note_written([array for array in written if wants_note(array)])
        if self.results is None:
            return allocated
        sources = [*allocated, None, *arguments]
        return [sources[index] for index in self.results]


def _is_inside(base: Any, start: int, end: int) -> bool:
    """Return whether a range of bytes lies in the memory of an array's base, where that can be told quickly."""
    if type(base) is np.ndarray:
        if not base.flags.forc or (base.base is not None and hasattr(base.base, "base")):
            return False
        address = numpy_address(base)
        return address <= start and end <= address + base.nbytes
    return not hasattr(base, "base")  # not NumPy's memory: nothing says how large it is


class Dispatch:
    """The calls of an operator."""

    def __init__(self, signature: Signature, names: Sequence[str], choose_outputs: ChooseOutputs | None = None) -> None:
        """Take the names of the arguments in their order; by default outputs are of the input's array library."""
        self._signature = signature
        self._names = (*names, *signature.output_names)
        self._choose_outputs = choose_outputs or self._outputs_like_input
        tensors = {tensor.name for tensor in signature.tensors}
        self._arrays = tuple(i for i, name in enumerate(names) if name in tensors)
        self._outputs = tuple(range(len(names), len(self._names)))
        self._attributes = tuple(i for i, name in enumerate(self._names) if name not in tensors)
        self._written = tuple(i for i, name in enumerate(self._names) if signature.is_written(name))
        self._entries: dict[Hashable, CacheEntry] = {}

    def __call__(self, arguments: Arguments, product: Product | None) -> Any:
        """Return the results of a call: one alone, several as a tuple."""
        try:
            key = self._key(arguments, product)
            entry = self._entries.get(key)
            addresses = None if entry is None else entry.addresses(arguments)
        except (NoKey, RuntimeError):  # RuntimeError: a tensor without strides or without memory
            key = entry = addresses = None
        if entry is None or addresses is None:
            return self._miss(arguments, product, key)
        entry.last_used = next(_clock)
        return packed(entry.run(arguments, addresses))

    def clear(self) -> None:
        """Empty the cache."""
        self._entries.clear()

    def _key(self, arguments: Arguments, product: Product | None) -> Hashable:
        key: list[Hashable] = [product, requested_backend()]
        add_attribute_keys(key, arguments, self._attributes)
        add_array_keys(key, arguments, self._arrays)
        if len(arguments) > self._written[0]:
            if len(arguments) == len(self._names):
                add_array_keys(key, arguments, self._outputs)
            key += self._identities(arguments)
        return tuple(key)

    def _identities(self, arguments: Arguments) -> Iterator[Hashable]:
        """For each given array that is written, yield the first argument that is the same: a call may be in place."""
        for position in self._written:
            written = arguments[position] if position < len(arguments) else None
            yield None if written is None else next(i for i, one in enumerate(arguments) if one is written)

    def _miss(self, arguments: Arguments, product: Product | None, key: Hashable) -> Any:
        """Check a call in full, prepare and run it, and store what was prepared unless the key is None."""
        named = dict(zip(self._names, arguments))  # noqa: B905 - outputs may be left out
        call = check(self._signature, named, product, outputs_needed=False)
        entry = self._prepare(named, call, product)
        results = entry.run(arguments, [view.address for view in call.views.values()])
        if key is not None and _is_repeatable(entry, call) and key == self._key_again(arguments, product):
            self._store(key, entry)
        library = library_of(named["input"])
        brought = [named.get(name) for name in self._signature.output_names]
        return packed(
            [
                library.export(result) if given is None and result is not None else result
                for result, given in zip(results, brought, strict=True)
            ]
        )

    def _key_again(self, arguments: Arguments, product: Product | None) -> Hashable:
        """Return the key of arguments that another thread or a signal handler may have changed since the check."""
        try:
            return self._key(arguments, product)
        except (NoKey, RuntimeError):
            return None

    def _store(self, key: Hashable, entry: CacheEntry) -> None:
        """Store an entry, and remove the least recently used one where there are too many."""
        self._entries[key] = entry
        if len(self._entries) > MAX_ENTRIES:
            entries = self._entries.copy()  # other threads may store theirs meanwhile
            self._entries.pop(min(entries, key=lambda one: entries[one].last_used), None)

    def _prepare(self, named: Mapping[str, Any], call: Call, product: Product | None) -> CacheEntry:
        """Choose the layouts of outputs, and prepare the kernel."""
        views = {name: view.disowned() for name, view in call.views.items()}
        backend = backend_for(Problem(self._signature, views, call.attributes))
        # Only now: on a device without a backend, no library may be there that could allocate outputs.
        fresh = self._choose_outputs(named, call, product)
        for name, layout in fresh.items():
            if math.prod(layout.shape) * layout.dtype.itemsize > _MAX_BYTES:
                text = f"has the shape {layout.shape}, and there is no memory for it"
                raise self._signature.error(name, text, RUNTIME)
        device = next(iter(call.views.values())).device
        views |= {name: _unallocated(layout, device, number) for number, (name, layout) in enumerate(fresh.items())}
        problem = Problem(self._signature, views, call.attributes)
        kernel = prepare(problem, backend)
        given = [self._given(name, view) for name, view in call.views.items()]
        written = [index for index, one in enumerate(given) if one.written]
        aliasing = Aliasing(list(call.views.values()), written) if written else None
        results = self._results(call, list(fresh))
        return CacheEntry(problem, backend, kernel, given, aliasing, list(fresh.values()), results)

    def _given(self, name: str, view: View) -> _Given:
        reach = view.reach
        start, end = reach.address - view.address, reach.end - view.address
        return _Given(self._names.index(name), start, end, view.dtype.itemsize, self._signature.is_written(name))

    def _results(self, call: Call, allocated: list[str]) -> Sequence[int] | None:
        """Return what :attr:`CacheEntry.results` says of the outputs, where those of these names are allocated."""
        names = self._signature.output_names
        if len(allocated) == len(names):
            return None
        wanted = {output.name for output in self._signature.outputs if output.wanted(call)}
        sources = [*allocated, None, *self._names]
        return [sources.index(name if name in wanted else None) for name in names]

    def _outputs_like_input(
        self, named: Mapping[str, Any], call: Call, product: Product | None
    ) -> Mapping[str, FreshArray]:
        """Choose arrays of the input's library, in the memory order of an argument of the same shape where one is."""
        library = library_of(named["input"])

        def fresh(output: Tensor) -> FreshArray:
            assert output.shape is not None
            try:
                shape = output.shape(call).shape
            except Broken as broken:
                raise self._signature.error(output.name, str(broken)) from None
            assert shape is not None
            like = next((name for name in ("input", *call.views) if call.views[name].shape == shape), "input")
            return library.fresh(shape, output.dtype(call).allowed[0], named[like])

        return {
            output.name: fresh(output)
            for output in self._signature.outputs
            if named.get(output.name) is None and output.wanted(call)
        }


def _unallocated(layout: FreshArray, device: str, number: int) -> View:
    """Return the view of an output before it is allocated, at an aligned address where no array is."""
    return View(-(number + 1) << 60, layout.shape, layout.strides, layout.dtype, Memory(0, 0, device))


def _is_repeatable(entry: CacheEntry, call: Call) -> bool:
    """Return whether calls with the same key may use an entry.

    Not where the kernel reads a copy of an argument, as of a negated tensor, nor where a written array partly overlaps
    another: how far decides what is to be copied.
    """
    in_place = all(view.storage.owner is call.arguments[name] for name, view in call.views.items())
    return in_place and (entry.aliasing is None or entry.aliasing.is_simple)


def packed(results: Sequence[Any]) -> Any:
    """Return results as users get them: one alone, several as a tuple."""
    return results[0] if len(results) == 1 else tuple(results)
