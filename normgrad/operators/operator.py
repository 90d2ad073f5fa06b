"""An operator: a callable that also plans."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from normgrad.backends import backend_for
from normgrad.contract.check import Signature, check
from normgrad.contract.parameters import DtypeRule, Parameter, Tensor
from normgrad.contract.plan import Plan, Problem
from normgrad.contract.products import Family, Product, current_product, parse_product
from normgrad.contract.status import NULLPTR, ContractError, counted
from normgrad.operators.dispatch import Dispatch


class Operator:
    """An operator of the contract. Call it for the result, or make a ``plan`` of the call and run that.

    Type checkers see each operator's own arguments and results: ``normgrad/operators/__init__.pyi``.
    """

    def __init__(self, collect: Callable[..., Any], signature: Signature) -> None:
        functools.update_wrapper(self, collect)
        self.signature = signature
        self._collect = collect
        self.__signature__ = inspect.signature(collect)
        self.__doc__ = self._doc()
        parameters = [p for p in self.__signature__.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        #: The names of the arguments that a call may give by position, and their defaults.
        self.names = tuple(parameter.name for parameter in parameters)
        self.defaults = tuple(parameter.default for parameter in parameters)
        self._required = self.defaults.count(inspect.Parameter.empty)
        self.dispatch = Dispatch(signature, self.names)
        self.plan = self._planner()

    def with_dtypes(self, **rules: DtypeRule) -> Operator:
        """Return the operator with other dtypes for some of its tensors, and a dispatch cache of its own."""
        parameters = tuple(
            replace(parameter, dtype=rules[parameter.name])
            if isinstance(parameter, Tensor) and parameter.name in rules
            else parameter
            for parameter in self.signature.parameters
        )
        return Operator(self._collect, replace(self.signature, parameters=parameters))

    def __repr__(self) -> str:
        return f"<operator {self.signature.name}>"

    def __reduce__(self) -> str:
        return self.signature.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or not self._required <= len(args) <= len(self.names):
            named, out, product = self._arguments(args, kwargs)
            arguments = (*named.values(), *(() if out is None else self._outputs(out).values()))
        else:
            arguments, product = args + self.defaults[len(args) :], current_product()
        return self.dispatch(arguments, product)

    def _doc(self) -> str | None:
        """Return the docstring under a line with the arguments, as NumPy's ufuncs have it: help() shows no other."""
        parameters = [p.replace(annotation=p.empty) for p in self.__signature__.parameters.values()]
        return self.__doc__ and f"{self.signature.name}{inspect.Signature(parameters)}\n\n    {self.__doc__}"

    def _planner(self) -> Callable[..., Plan]:
        """Return ``plan``, a function whose signature is the operator's own."""

        def plan(*args: Any, **kwargs: Any) -> Plan:
            """Check the call and make its plan: the same arguments, with every requested output in ``out``."""
            return self._plan(args, kwargs)

        signature = self.__signature__.replace(return_annotation="Plan")
        plan.__signature__ = signature  # type: ignore[attr-defined]
        return plan

    def _plan(self, args: Any, kwargs: Any) -> Plan:
        arguments, out, product = self._arguments(args, kwargs)
        try:
            call = check(self.signature, arguments | self._outputs(out), product, outputs_needed=True)
        except ContractError as error:
            if out is None and error.status == NULLPTR and self.signature.is_output(error.parameter or ""):
                names = ", ".join(self.signature.output_names)
                text = f"is null, and is a requested output: a plan needs arrays to write to, out=({names})"
                raise self.signature.error(error.parameter, text, NULLPTR) from None
            raise
        problem = Problem(self.signature, call.views, call.attributes)
        return Plan(problem, backend_for(problem))

    def _arguments(self, args: Any, kwargs: Any) -> tuple[dict[str, Any], Any, Product | None]:
        """The arguments by parameter name, the outputs brought, and the product that the call is for."""
        arguments: dict[str, Any] = self._collect(*args, **kwargs)
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
                "out", f"has {counted(len(out), 'element')}, and must have {len(names)}: {', '.join(names)}"
            )
        return dict(zip(names, out, strict=True))


def operator(
    c_name: str, family: Family, parameters: tuple[Parameter, ...]
) -> Callable[[Callable[..., Any]], Operator]:
    """Make an operator of a function that collects its arguments: ``return locals()`` is its whole body."""

    def make(collect: Callable[..., Any]) -> Operator:
        return Operator(collect, Signature(collect.__name__, c_name, family, parameters))

    return make
