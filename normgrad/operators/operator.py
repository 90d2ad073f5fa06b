"""An operator: a callable that also plans."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any, Generic, ParamSpec, TypeVar

from normgrad.backends import backend_for, requested_backend
from normgrad.contract.arrays import as_view, kind_of, note_written
from normgrad.contract.check import Signature, check
from normgrad.contract.parameters import Parameter
from normgrad.contract.plan import Plan, Problem, launch
from normgrad.contract.products import Family, Product, current_product, parse_product
from normgrad.operators.recipes import Glance, OffTrack, Recipe, outputs_to_make, packed

_MOST_RECIPES = 1024

P = ParamSpec("P")
R = TypeVar("R")


class Operator(Generic[P, R]):
    """An operator of the contract. Call it for the result, or :meth:`plan` it and run the plan."""

    def __init__(self, gather: Callable[P, R], signature: Signature) -> None:
        functools.update_wrapper(self, gather)
        self.signature = signature
        self._gather: Callable[..., Any] = gather
        self.__signature__ = inspect.signature(gather)
        self._glance = Glance(signature)
        self._recipes: dict[Hashable, Recipe] = {}

    def __repr__(self) -> str:
        return f"<operator {self.signature.name}>"

    def __reduce__(self) -> str:
        return self.signature.name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        arguments, out, product = self._arguments(args, kwargs)
        key: Hashable = None
        if out is None:
            try:
                layout, addresses = self._glance.at(arguments)
                key = (*layout, product, requested_backend())
                recipe = self._recipes.get(key)
                if recipe is not None:
                    return recipe.serve(arguments, addresses)
            except OffTrack:
                pass
        return self._call_in_full(arguments | self._outputs(out), product, key)

    def _call_in_full(self, arguments: dict[str, Any], product: Product | None, key: Hashable) -> R:
        """Check and run a call, and leave a recipe for the next one with the same key."""
        call = check(self.signature, arguments, product, outputs_needed=False)
        to_make = outputs_to_make(self.signature, arguments, call)
        made = {output.name: output.make(arguments[output.like]) for output in to_make}
        views = call.views | {name: as_view(array) for name, array in made.items()}
        # Without the views' owners, which the arguments keep alive: a recipe must not.
        problem = Problem(self.signature, {name: view.disowned() for name, view in views.items()}, call.attributes)
        backend = backend_for(problem)
        recipe = Recipe(problem, backend, backend.prepare(problem), to_make)
        launch(problem, problem.addresses, recipe.kernel, backend)
        if key is not None:
            if len(self._recipes) >= _MOST_RECIPES:
                self._recipes.clear()
            self._recipes[key] = recipe
        for name in call.views:
            if self.signature.is_written(name):
                note_written(arguments[name])
        kind = kind_of(arguments["input"])
        brought = {output.name: arguments[output.name] for output in self.signature.outputs if output.wanted(call)}
        finished = {name: kind.finish(array) for name, array in made.items()}
        return packed([(brought | finished).get(name) for name in self.signature.output_names])

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """Check the call and make its plan: the same arguments, with every wanted output in ``out``."""
        arguments, out, product = self._arguments(args, kwargs)
        call = check(self.signature, arguments | self._outputs(out), product, outputs_needed=True)
        problem = Problem(self.signature, call.views, call.attributes)
        return Plan(problem, backend_for(problem))

    def _arguments(self, args: Any, kwargs: Any) -> tuple[dict[str, Any], Any, Product | None]:
        """The arguments by parameter name, the outputs brought, and the product that the call is for."""
        arguments: dict[str, Any] = self._gather(*args, **kwargs)
        product = arguments.pop("product", None)
        return arguments, arguments.pop("out"), current_product() if product is None else parse_product(product)

    def _outputs(self, out: Any) -> dict[str, Any]:
        names = self.signature.output_names
        if out is None:
            return dict.fromkeys(names)
        if not isinstance(out, tuple | list):
            if len(names) > 1:
                raise self.signature.error(
                    "out", f"is of type {type(out).__name__}, and must be a tuple of {len(names)} arrays or None"
                )
            out = (out,)
        if len(out) != len(names):
            raise self.signature.error(
                "out", f"has {len(out)} elements, and must have {len(names)}: {', '.join(names)}"
            )
        return dict(zip(names, out, strict=True))


def operator(
    c_name: str, family: Family, parameters: tuple[Parameter, ...]
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Make an operator of a function that gathers its arguments: ``return locals()`` is its whole body."""

    def make(gather: Callable[P, R]) -> Operator[P, R]:
        return Operator(gather, Signature(gather.__name__, c_name, family, parameters))

    return make
