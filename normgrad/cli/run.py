"""Run an operator on the arrays and attributes in a file, by parameter name, and write the results by theirs.

Files are .npz, .safetensors or .pt by suffix. Nothing in them is ever unpickled. IN and OUT may be folders: then every
file of IN is a call, and its results are written to a file of the same name in OUT, which is created if need be. A call
that cannot be run is reported, the others are run, and the exit status is 2.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from normgrad import backends, threads
from normgrad.cli import files
from normgrad.cli.errors import BadInput, nonempty_path, one_line
from normgrad.cli.terminal import Console, with_progress
from normgrad.contract.parameters import Mask, Parameter, Role, Tensor
from normgrad.contract.products import Product, current_product, parse_product, use_product
from normgrad.contract.status import ContractError
from normgrad.operators import OPERATORS, Operator
from normgrad.testing.expected import as_tuple, checked, exact_results

NAME = "run"
HELP = "run an operator on a file, or a folder of files, and write the results"

_LONGEST_ATTRIBUTE = 64  # elements; a longer array is a tensor under the wrong name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The operator, the two files, and how to compute."""
    parser.add_argument("operator", metavar="OPERATOR", choices=OPERATORS, help=", ".join(OPERATORS))
    parser.add_argument("input", metavar="IN", type=nonempty_path, help="the file to read, or a folder of files")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=nonempty_path,
        required=True,
        help="the file to write; a folder if IN is one",
    )
    parser.add_argument(
        "--oracle", action="store_true", help="compute with the float64 oracle and write float64 (default: the kernels)"
    )
    parser.add_argument(
        "--product",
        metavar="P",
        help="check the call as this product's documents do, such as 'Atlas A2' or Ascend910B3 "
        "(default: NORMGRAD_PRODUCT, or none)",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Read, check, compute, write."""
    operator = OPERATORS[arguments.operator]
    product = product_of(arguments)
    try:
        backends.chosen("cpu")
        threads.get_num_threads()
    except ValueError as error:  # an environment variable that says nothing known
        raise BadInput(str(error)) from None
    files.check_exists(arguments.input)
    if arguments.input.is_dir():
        return _run_folder(arguments, operator, product)
    if arguments.output.is_dir():
        raise BadInput(f"{arguments.output}: is a folder, and must be a file, as IN is")
    if arguments.output.exists() and arguments.output.samefile(arguments.input):
        raise BadInput(f"{arguments.output}: is IN, which would be replaced by its results; choose another file")
    _run_file(operator, arguments.input, arguments.output, product, arguments.oracle)
    return 0


def product_of(arguments: argparse.Namespace) -> Product | None:
    """The product that ``--product`` names, or else the one in force."""
    try:
        return current_product() if arguments.product is None else parse_product(arguments.product)
    except ValueError as error:
        raise BadInput(str(error)) from None


def _run_folder(arguments: argparse.Namespace, operator: Operator, product: Product | None) -> int:
    source, target = arguments.input, arguments.output
    cases = list(files.cases_in(source).values())
    if target.exists() and not target.is_dir():
        raise BadInput(f"{target}: is a file, and must be a folder, as IN is")
    if not target.exists() and target.suffix.lower() in files.FORMATS:
        raise BadInput(f"{target}: has the name of a file, and must name a folder, as IN is one")
    if target.exists() and target.samefile(source):
        raise BadInput(f"{target}: is IN, whose files would be replaced by their results; choose another folder")
    files.make_folder(target)
    tried = [_problem(operator, path, target, product, arguments.oracle) for path in with_progress(cases, "Running")]
    problems = [problem for problem in tried if problem]
    for problem in problems:
        print(f"normgrad: {problem}", file=sys.stderr)
    run = len(cases) - len(problems)
    results = f"; the results are in {target}" if run else ""
    Console().print(f"{run} of {len(cases)} calls of {operator.signature.name} run{results}")
    return 2 if problems else 0


def _problem(operator: Operator, source: Path, folder: Path, product: Product | None, with_oracle: bool) -> str:
    """Run one call of a folder; why it cannot be run, or nothing."""
    try:
        _run_file(operator, source, folder / source.name, product, with_oracle)
    except BadInput as error:
        names_a_file = str(error).startswith((f"{source}: ", f"{folder / source.name}: "))
        return one_line(error if names_a_file else f"{source}: {error}")
    return ""


def _run_file(operator: Operator, source: Path, target: Path, product: Product | None, with_oracle: bool) -> None:
    files.check_writable(target)
    values = read_arguments(operator, source)
    compute = by_oracle if with_oracle else by_operator
    try:
        results = compute(operator, values, product)
    except ContractError as error:
        raise BadInput(f"{error} ({error.status_name}, {int(error.status)})") from None
    files.write(target, results)


def read_arguments(operator: Operator, path: Path) -> dict[str, Any]:
    """An operator's arguments by name, from a file; absent ones take their defaults."""
    parameters = {p.name: p for p in operator.signature.parameters if not _is_output(p)}

    def accept(names: Iterable[str]) -> None:
        if unknown := [name for name in names if name not in parameters]:
            raise unknown_names(operator, unknown, "parameter", list(parameters))

    content = {name: value for name, value in files.read(path, accept).items() if value is not None}
    defaults = inspect.signature(operator).parameters
    arguments: dict[str, Any] = {}
    missing = []
    for name, parameter in parameters.items():
        if name in content:
            arguments[name] = _argument(path, parameter, content[name])
        elif defaults[name].default is not inspect.Parameter.empty:
            arguments[name] = defaults[name].default
        elif isinstance(parameter, Tensor) and parameter.optional:
            arguments[name] = None
        else:
            missing.append(name)
    if missing:
        raise BadInput(f"{path}: {operator.signature.name} needs {', '.join(missing)}, which the file does not hold")
    return arguments


def unknown_names(operator: Operator, unknown: Sequence[str], what: str, known: Sequence[str]) -> BadInput:
    """The error for names that a file must not hold; those of the C interface are answered with Python's."""
    text = f"{', '.join(unknown)}: no {what} of {operator.signature.name}, whose {what}s are {', '.join(known)}"
    python_names = {_bare(name): p.name for p in operator.signature.parameters for name in (p.name, p.c_name)}
    meant = {name: python_names.get(_bare(name)) for name in unknown}
    renamed = [f"for {name} write {right}" for name, right in meant.items() if right in known]
    return BadInput("; ".join([text, *renamed]))


def _bare(name: str) -> str:
    """A name without what differs between spellings: ``gradInput`` and ``grad_input`` for ``gradInputOut``."""
    return re.sub("(?<=.)(out|optional)$", "", name.replace("_", "").lower())


def refuse_bits(path: Path, name: str, value: Any) -> None:
    """Raise BadInput for a tensor of uint16: no operator has one, and dumps hold bfloat16 so."""
    if path.suffix.lower() == ".npz" and getattr(value, "dtype", None) == np.uint16:
        raise BadInput(f"{path}: {name} is uint16; to read it as bfloat16, add the entry bfloat16=['{name}']")


def _is_output(parameter: Parameter) -> bool:
    return isinstance(parameter, Tensor) and parameter.role is Role.OUTPUT


def _argument(path: Path, parameter: Parameter, value: Any) -> Any:
    """A parameter's value as the operator takes it."""
    if isinstance(parameter, Tensor):
        refuse_bits(path, parameter.name, value)
        # What is written in place must not share memory, as tensors of one file may.
        return np.array(value) if parameter.role is Role.IN_PLACE and isinstance(value, np.ndarray) else value
    if not isinstance(value, np.ndarray):
        return value
    if value.size > _LONGEST_ATTRIBUTE:
        raise BadInput(f"{path}: {parameter.name} has {value.size} elements, and is an attribute, not a tensor")
    is_one_number = value.size == 1 and not isinstance(parameter, Mask)
    return value.item() if is_one_number else value.tolist()


def by_operator(operator: Operator, arguments: Mapping[str, Any], product: Product | None) -> dict[str, np.ndarray]:
    """The results of a call by name, running statistics among them."""
    with use_product(product):
        results = operator(**arguments)
    return _named(operator, results) | _in_place(operator, arguments)


def by_oracle(operator: Operator, arguments: Mapping[str, Any], product: Product | None) -> dict[str, np.ndarray]:
    """The same from the oracle, in float64, once the call has been checked as ever."""
    return exact_results(operator, checked(operator, arguments, product))


def _named(operator: Operator, results: Any) -> dict[str, np.ndarray]:
    """Results by name, without those that are not wanted."""
    outputs = operator.signature.outputs
    return {o.name: np.asarray(v) for o, v in zip(outputs, as_tuple(results), strict=True) if v is not None}


def _in_place(operator: Operator, arguments: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays that the call moves in place."""
    names = [tensor.name for tensor in operator.signature.tensors if tensor.role is Role.IN_PLACE]
    return {name: arguments[name] for name in names if arguments[name] is not None}
