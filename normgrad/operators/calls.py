"""An operator's calls: the long way through all checks, and the short one where a call has left a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from normgrad.backends import backend_for
from normgrad.contract.arrays import as_view, kind_of, note_written, wants_note
from normgrad.contract.check import Signature, check
from normgrad.contract.parameters import Call, Tensor
from normgrad.contract.plan import Problem, launch
from normgrad.contract.products import Product
from normgrad.operators.recipes import Arguments, Made, packed
from normgrad.operators.recollection import Recipes

#: The wanted outputs that a call does not bring, from its arguments by name.
Maker = Callable[[Mapping[str, Any], Call, Product | None], Sequence[Made]]


class Calls:
    """Calls with the arguments by position: those of these names, then the outputs where the caller brings them."""

    def __init__(
        self, signature: Signature, names: Sequence[str], defaults: Sequence[Any], make: Maker | None = None
    ) -> None:
        self._signature = signature
        self._names = (*names, *signature.output_names)
        self._make = make or self._made_as_input
        self.recipes = Recipes(signature, names, defaults)
        #: Know calls, with fewer arguments too where those that miss are defaults.
        self.registers = self.recipes.registers

    def __call__(self, arguments: Arguments, product: Product | None) -> Any:
        found = self.registers[product].recall(arguments, False)
        return self.not_registered(arguments, product) if found is None else found

    def not_registered(self, arguments: Arguments, product: Product | None) -> Any:
        """The results of a call that no register knows."""
        found = self.recipes.recalled(arguments, product)
        return self.in_full(arguments, product) if found is None else found

    def in_full(self, arguments: Arguments, product: Product | None) -> Any:
        """Check and run a call, and leave a recipe for the next one of its layout."""
        signature, named = self._signature, dict(zip(self._names, arguments))  # noqa: B905 - without outputs, maybe
        call = check(signature, named, product, outputs_needed=False)
        made = self._make(named, call, product)
        views = call.views | {output.name: as_view(output.array) for output in made}
        # Without the views' owners, which the arguments keep alive: a recipe must not.
        problem = Problem(signature, {name: view.disowned() for name, view in views.items()}, call.attributes)
        backend = backend_for(problem)
        kernel = backend.prepare(problem)
        launch(problem, problem.addresses, kernel, backend)
        wanted = [output.wanted(call) for output in signature.outputs]
        self.recipes.keep(arguments, product, problem, backend, kernel, made, wanted)
        written = [named[name] for name in call.views if signature.is_written(name)]
        note_written([array for array in written if wants_note(array)])
        kind = kind_of(named["input"])
        results = named | {output.name: kind.finish(output.array) for output in made}
        chosen = zip(signature.output_names, wanted, strict=True)
        return packed([results[name] if want else None for name, want in chosen])

    def _made_as_input(self, named: Mapping[str, Any], call: Call, product: Product | None) -> Sequence[Made]:
        """Outputs of the input's kind."""
        return [
            _made(output, named, call)
            for output in self._signature.outputs
            if named.get(output.name) is None and output.wanted(call)
        ]


def _made(output: Tensor, named: Mapping[str, Any], call: Call) -> Made:
    """In the memory order of an argument of the same shape where there is one."""
    assert output.shape is not None
    shape = output.shape(call).shape
    assert shape is not None
    like = next((name for name in ("input", *call.views) if call.views[name].shape == shape), "input")
    make = kind_of(named["input"]).maker(shape, output.dtype(call).allowed[0], named[like])
    return Made(output.name, make(), make)
