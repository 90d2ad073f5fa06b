"""Write ``normgrad/operators/__init__.pyi``, the types of the nine operators, from their functions' annotations.

    PYTHONPATH=tests python -m support.stubs

An operator has ``__call__`` and ``plan``, and Python's types cannot derive both from one generic function. Of the
overloads of ``__call__``, the one for NumPy comes first, because a result may have another dtype and number of
dimensions than ``input``. With flags that choose the outputs, a result is an array or None: ``ArrayT | Any``, because
the caller knows which.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path

import normgrad.operators
from normgrad.operators import OPERATORS, Operator

FLAGS = ("output_mask", "input_g", "weight_g", "bias_g")
HEAD = """\
# Written by tests/support/stubs.py from the annotations of the operators' functions.

from collections.abc import Sequence
from typing import Any, overload

from numpy.typing import NDArray

from normgrad.contract.plan import Plan
from normgrad.contract.products import Product
from normgrad.operators.operator import Operator as Operator
from normgrad.typing import Array, ArrayT

OPERATORS: dict[str, Operator]
"""


def path() -> Path:
    """Return the path of the stub."""
    return Path(normgrad.operators.__file__).with_suffix(".pyi")


def text() -> str:
    """Return the stub."""
    return "\n".join([HEAD, *(_class(name, operator) for name, operator in OPERATORS.items())])


def _class(name: str, operator: Operator) -> str:
    signature = inspect.signature(operator)
    parameters, result = signature.parameters.values(), str(signature.return_annotation)
    calls = [(list(parameters), result)]
    if any(parameter.name in FLAGS for parameter in parameters):
        unmasked = [parameter for parameter in parameters if parameter.name not in FLAGS]
        calls = [(unmasked, result), (list(parameters), result.replace("ArrayT", "ArrayT | Any"))]
    overloads = [
        "    @overload\n" + _method("__call__", chosen, returned).replace("ArrayT", array)
        for chosen, returned in calls
        for array in ("NDArray[Any]", "ArrayT")
    ]
    plan = _method("plan", map(_needed, parameters), "Plan").replace("ArrayT", "Array")
    return "\n".join([f"class _{name}(Operator):", *overloads, plan, "", f"{name}: _{name}", ""])


def _needed(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter of ``plan``, which needs ``out``."""
    if parameter.name != "out":
        return parameter
    return parameter.replace(default=parameter.empty, annotation=parameter.annotation.removesuffix(" | None"))


def _method(name: str, parameters: Iterable[inspect.Parameter], result: str) -> str:
    lines = ["self,"]
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*," not in lines:
            lines.append("*,")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        lines.append(f"{parameter.name}: {parameter.annotation}{default},")
    return f"    def {name}(\n" + "".join(f"        {line}\n" for line in lines) + f"    ) -> {result}: ..."


if __name__ == "__main__":
    path().write_text(text(), encoding="utf-8")
