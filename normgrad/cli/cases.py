"""Write test inputs for an operator: many kinds of case, the same for the same seed.

Every file is a case for `normgrad run` and `normgrad check`. The kinds are told by `normgrad cases --help`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from rich.progress import track

from normgrad.cli import files
from normgrad.cli.errors import BadInput, reason
from normgrad.cli.terminal import Console
from normgrad.operators import OPERATORS
from normgrad.testing.cases import kinds_of, make_cases
from normgrad.testing.values import KINDS

NAME = "cases"
HELP = "write test inputs for an operator"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The operator, the folder, and what to write."""
    parser.add_argument("operator", metavar="OPERATOR", choices=OPERATORS, help=", ".join(OPERATORS))
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="another seed, other numbers (default: 0)")
    listed = "; ".join(f"{kind}: {text}" for kind, text in KINDS.items())
    parser.add_argument(
        "--kinds", metavar="KIND", nargs="+", choices=KINDS, help=f"the kinds of case (default: all). {listed}"
    )


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
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{folder}: cannot be made: {reason(error)}") from None
    progress = Console(stderr=True)
    kinds = list(dict.fromkeys(arguments.kinds)) if arguments.kinds else None
    written = 0
    cases = make_cases(operator, arguments.seed, kinds)
    for case in track(cases, "Writing", console=progress, transient=True, disable=not progress.is_terminal):
        given = {name: np.asarray(value) for name, value in case.arguments.items() if value is not None}
        files.write(folder / f"{case.name}.npz", given)
        written += 1
    Console().print(f"{written} cases of {operator} in {folder}")
    return 0
