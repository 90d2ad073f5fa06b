"""What a call must bring about: every result in float64 by name, and the size of its terms."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from normgrad import oracle
from normgrad.contract.check import check
from normgrad.contract.parameters import Call, Role, Tensor
from normgrad.contract.products import Product
from normgrad.operators import Operator
from normgrad.oracle.float64 import Array
from normgrad.testing import terms
from normgrad.testing.host import on_host
from normgrad.testing.terms import Magnitude


def checked(operator: Operator, arguments: Mapping[str, Any], product: Product | None) -> Call:
    """The call, once it has passed the checks; its arguments are complete."""
    complete = with_defaults(operator, arguments)
    outputs = dict.fromkeys(operator.signature.output_names)
    call = check(operator.signature, {**complete, **outputs}, product, outputs_needed=False)
    arrays = {name: on_host(complete[name]) for name in call.views}
    return replace(call, arguments={**call.arguments, **arrays})


def with_defaults(operator: Operator, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with the defaults of those that are not given, None for an optional tensor."""
    parameters = {p.name for p in operator.signature.parameters} - set(operator.signature.output_names)
    absent = {t.name: None for t in operator.signature.tensors if t.optional and t.name in parameters}
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(operator).parameters.items()
        if name in parameters and parameter.default is not inspect.Parameter.empty
    }
    return {**absent, **defaults, **arguments}


def moved_in_place(operator: Operator, call: Call) -> list[str]:
    """The tensors of a call that it moves in place."""
    return [t.name for t in operator.signature.tensors if t.role is Role.IN_PLACE and t.name in call.views]


def results_of(operator: Operator, call: Call) -> list[Tensor]:
    """The results of a call: its wanted outputs, then what it moves in place."""
    moved = moved_in_place(operator, call)
    outputs = [output for output in operator.signature.outputs if output.wanted(call)]
    return outputs + [tensor for tensor in operator.signature.tensors if tensor.name in moved]


def exact_results(operator: Operator, call: Call) -> dict[str, Array]:
    """The oracle's results by name."""
    arguments = _in_float64(operator, call)
    found = as_tuple(getattr(oracle, operator.signature.name)(**arguments))
    named = dict(zip(operator.signature.output_names, found, strict=True))
    named |= {name: arguments[name] for name in moved_in_place(operator, call)}
    return {name: np.asarray(value) for name, value in named.items() if value is not None}


def magnitudes(operator: Operator, call: Call) -> dict[str, Magnitude]:
    """The terms behind them, by name."""
    found = as_tuple(getattr(terms, operator.signature.name)(**_in_float64(operator, call)))
    moved = [tensor.name for tensor in operator.signature.tensors if tensor.role is Role.IN_PLACE]
    names = [*operator.signature.output_names, *moved]
    return {name: value for name, value in zip(names, found, strict=True) if value is not None}


def _in_float64(operator: Operator, call: Call) -> dict[str, Any]:
    """The arguments as the oracle takes them; what moves in place is a copy in float64."""
    outputs = operator.signature.output_names
    arguments = {name: value for name, value in call.arguments.items() if name not in outputs} | call.attributes
    for name in moved_in_place(operator, call):
        arguments[name] = np.asarray(arguments[name]).astype(np.float64)
    return arguments


def as_tuple(results: Any) -> tuple[Any, ...]:
    """Results as a tuple even where there is one."""
    return results if isinstance(results, tuple) else (results,)
