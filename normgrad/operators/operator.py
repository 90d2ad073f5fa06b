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
from normgrad.operators.recipes import Glance, OffTrack, Recipe, outputs_to_make, packed, recipe_for

_MOST_KEYS = 1024
_MOST_LAYOUTS = 16  # of calls with the same key

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
        self._recipes: dict[Hashable, list[Recipe]] = {}

    def __repr__(self) -> str:
        return f"<operator {self.signature.name}>"

    def __reduce__(self) -> str:
        return self.signature.name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        arguments, out, product = self._arguments(args, kwargs)
        if out is not None:
            arguments |= self._outputs(out)
        key: Hashable = None
        try:
            layout, addresses, tensors = self._glance.at(arguments, outputs=out is not None)
            key = (*layout, product, requested_backend())
            for recipe in self._recipes.get(key, ()):
                if recipe.fits(addresses, tensors):
                    return recipe.serve(arguments, addresses)
        except OffTrack:
            pass
        return self._call_in_full(arguments, product, key)

    def _call_in_full(self, arguments: dict[str, Any], product: Product | None, key: Hashable) -> R:
        """Check and run a call, and leave a recipe for the next one with the same key."""
        call = check(self.signature, arguments, product, outputs_needed=False)
        to_make = outputs_to_make(self.signature, arguments, call)
        made = {output.name: output.make(arguments[output.like]) for output in to_make}
        views = call.views | {name: as_view(array) for name, array in made.items()}
        # Without the views' owners, which the arguments keep alive: a recipe must not.
        problem = Problem(self.signature, {name: view.disowned() for name, view in views.items()}, call.attributes)
        backend = backend_for(problem)
        kernel = backend.prepare(problem)
        launch(problem, problem.addresses, kernel, backend)
        wanted = frozenset(output.name for output in self.signature.outputs if output.wanted(call))
        if key is not None:
            names = self._glance.names(arguments)
            self._keep(key, recipe_for(problem, backend, kernel, to_make, arguments, names, wanted))
        for name in call.views:
            if self.signature.is_written(name):
                note_written(arguments[name])
        kind = kind_of(arguments["input"])
        results = {**arguments, **{name: kind.finish(array) for name, array in made.items()}}
        return packed([results[name] if name in wanted else None for name in self.signature.output_names])

    def _keep(self, key: Hashable, recipe: Recipe | None) -> None:
        if recipe is None:
            return
        if len(self._recipes) >= _MOST_KEYS:
            self._recipes.clear()
        same_key = self._recipes.setdefault(key, [])
        if len(same_key) >= _MOST_LAYOUTS:
            same_key.clear()
        same_key.append(recipe)

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
