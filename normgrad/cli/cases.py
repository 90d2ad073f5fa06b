"""Write test inputs for an operator, one .npz file a case; the same for the same seed.

Every file is a case for `normgrad run` and `normgrad check`. A case that is there already with other values,
such as another seed's, is not replaced, since results that were computed from it would no longer fit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from normgrad.cli import files
from normgrad.cli.errors import BadInput, nonempty_path
from normgrad.cli.terminal import Console, with_progress
from normgrad.operators import OPERATORS
from normgrad.testing.cases import TestCase, kinds_of, make_cases
from normgrad.testing.values import KINDS

NAME = "cases"
HELP = "write test inputs for an operator"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The operator, the folder, and what to write."""
    parser.add_argument("operator", metavar="OPERATOR", choices=OPERATORS, help=", ".join(OPERATORS))
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        type=nonempty_path,
        required=True,
        help="the folder to write to; created if need be",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="another seed gives other values (default: 0)")
    parser.add_argument(
        "--kinds",
        metavar="KIND",
        nargs="+",
        choices=KINDS,
        help="the kinds of case, from the list below (default: all)",
    )
    parser.add_argument("--replace", action="store_true", help="replace cases that are there and have other values")
    width = max(map(len, KINDS))
    parser.epilog = "kinds:\n" + "\n".join(f"  {kind:{width}}  {text}" for kind, text in KINDS.items())


def execute(arguments: argparse.Namespace) -> int:
    """Write one file per case."""
    operator, folder = arguments.operator, arguments.output
    if arguments.seed < 0:
        raise BadInput(f"--seed is {arguments.seed}, and must not be negative")
    absent = [kind for kind in arguments.kinds or () if kind not in kinds_of(operator)]
    if absent:
        raise BadInput(
            f"{operator} has no cases of the kind {', '.join(absent)}; it has {', '.join(kinds_of(operator))}"
        )
    files.make_folder(folder)
    kinds = list(dict.fromkeys(arguments.kinds)) if arguments.kinds else None
    cases = list(make_cases(operator, arguments.seed, kinds))
    if not arguments.replace:
        for case in cases:
            _refuse_other_values(folder, case)
    for case in with_progress(cases, "Writing"):
        files.write(_path(folder, case), _content(case))
    Console().print(f"{len(cases)} cases of {operator} in {folder}")
    return 0


def _path(folder: Path, case: TestCase) -> Path:
    return folder / f"{case.name}.npz"


def _content(case: TestCase) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in case.arguments.items() if value is not None}


def _refuse_other_values(folder: Path, case: TestCase) -> None:
    """Raise BadInput where the case's file is there and does not hold the case."""
    path = _path(folder, case)
    if not path.exists():
        return
    old, new = files.read(path), _content(case)
    same = old.keys() == new.keys() and all(
        old[name].dtype == new[name].dtype
        and old[name].shape == new[name].shape
        and old[name].tobytes() == new[name].tobytes()
        for name in new
    )
    if not same:
        raise BadInput(
            f"{path}: has other values, such as those of another seed or operator; choose another folder, or --replace"
        )
