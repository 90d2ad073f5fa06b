"""The schemas of ``torch.ops.normgrad``, derived from the operators' tables of parameters."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Iterator
from typing import Any

from normgrad.contract import rules
from normgrad.contract.parameters import Attribute, Mask, Parameter, Role, Tensor
from normgrad.operators.operator import Operator

#: PyTorch's type of an attribute, by the function that reads it. Sizes may be symbolic; a number of groups may not.
_TYPES: dict[Callable[[Any], Any], str] = {
    rules.sizes: "SymInt[]",
    rules.size: "SymInt",
    rules.positive: "int",
    rules.integer: "int",
    rules.real: "float",
    rules.flag: "bool",
}


def schema(operator: Operator) -> str:
    """Return the arguments and results of an operator in PyTorch's notation."""
    by_name = {parameter.name: parameter for parameter in operator.signature.parameters}
    aliases = iter(string.ascii_lowercase)  # each tensor that is written has its own
    arguments = [
        f"{_type(by_name[name], aliases)} {name}{_default(default)}"
        for name, default in zip(operator.names, operator.defaults, strict=True)
    ]
    outputs = ["Tensor"] * len(operator.signature.outputs)
    results = outputs[0] if len(outputs) == 1 else f"({', '.join(outputs)})"
    return f"({', '.join(arguments)}) -> {results}"


def _type(parameter: Parameter, aliases: Iterator[str]) -> str:
    match parameter:
        case Tensor():
            alias = f"({next(aliases)}!)" if parameter.role is Role.IN_PLACE else ""
            return f"Tensor{alias}{'?' if parameter.optional else ''}"
        case Mask():
            return f"bool[{parameter.length}]"
        case Attribute():
            return _TYPES[parameter.read]


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return ""
    return f"={list(value) if isinstance(value, tuple) else value}"
