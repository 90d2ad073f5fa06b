"""Judge someone's results, an NPU's dump say, against the oracle on the same inputs.

INPUTS and ACTUAL are files as `normgrad run` reads and writes them, or two folders with files of the same names, one
pair per case. The status is 1 where a result is not good enough.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from normgrad.cli import files
from normgrad.cli.errors import BadInput, one_line, printable, reason
from normgrad.cli.run import read_arguments
from normgrad.cli.terminal import Console
from normgrad.cli.verdicts import show_case, show_summary
from normgrad.contract.products import Product, current_product, parse_product
from normgrad.contract.status import ContractError
from normgrad.operators import OPERATORS
from normgrad.testing.expected import checked, results_of
from normgrad.testing.judgement import Judgement, judge
from normgrad.testing.page import Section, page, refused, section
from normgrad.testing.standards import LEVELS, STANDARDS, STRICT

NAME = "check"
HELP = "judge results against the oracle"

_NEEDS_BASELINE = "cann-double"
_TAKES_BASELINE = (_NEEDS_BASELINE, "bitwise")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The operator, the files, the standard, and where reports go."""
    parser.add_argument("operator", metavar="OPERATOR", choices=OPERATORS, help=", ".join(OPERATORS))
    parser.add_argument("inputs", metavar="INPUTS", type=Path, help="the inputs: a file, or a folder of cases")
    parser.add_argument("actual", metavar="ACTUAL", type=Path, help="the results: a file, or a folder of them")
    parser.add_argument("--standard", choices=STANDARDS, default=STRICT, help=", ".join(STANDARDS))
    parser.add_argument("--baseline", metavar="FILE", type=Path, help="another implementation's results, likewise")
    parser.add_argument("--level", choices=LEVELS, default="L1", help="how close to the baseline, for cann-double")
    parser.add_argument("--worst", metavar="N", type=_count, default=3, help="how many of the worst elements to show")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report as JSON")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write the report as a page with plots")
    parser.add_argument("--product", metavar="P", help="check the inputs as this product's documents do")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError("must be a whole number, 0 or more")
    return int(text)


@dataclass(frozen=True)
class Files:
    """One case: its name and its files; no results where there is no such file."""

    name: str
    inputs: Path
    actual: Path | None
    baseline: Path | None


@dataclass(frozen=True)
class Outcome:
    """What became of a case; ``problem`` says why it cannot be judged."""

    name: str
    judgement: Judgement | None
    problem: str = ""

    @property
    def passed(self) -> bool:
        return self.judgement is not None and self.judgement.passed


def execute(arguments: argparse.Namespace) -> int:
    """Judge every case, show what was found, write the reports."""
    _check_options(arguments)
    console = Console()
    if not arguments.inputs.is_dir():
        case = Files(printable(arguments.inputs.name), arguments.inputs, arguments.actual, arguments.baseline)
        judgement = _judged(arguments, case, _product(arguments))
        show_case(console, case.name, judgement)
        _write(arguments, [Outcome(case.name, judgement)], [section(case.name, judgement, with_plots=True)])
        return int(not judgement.passed)
    return _folder(arguments, console)


def _folder(arguments: argparse.Namespace, console: Console) -> int:
    cases = list(_pairs(arguments))
    product = _product(arguments)
    outcomes, sections = [], []
    progress = Console(stderr=True)
    for case in track(cases, "Judging", console=progress, transient=True, disable=not progress.is_terminal):
        outcome, part = _tried(arguments, case, product)
        if outcome.judgement is not None and not outcome.passed:
            show_case(console, case.name, outcome.judgement, only_failed=True)
        sections.append(part)
        # What was measured is as large as the case: only what the reports need is kept.
        outcomes.append(
            outcome if outcome.judgement is None else Outcome(case.name, outcome.judgement.without_arrays())
        )
    show_summary(console, [(outcome.name, outcome.judgement, outcome.problem) for outcome in outcomes])
    _write(arguments, outcomes, sections)
    if any(outcome.judgement is None for outcome in outcomes):
        return 2
    return int(not all(outcome.passed for outcome in outcomes))


def _tried(arguments: argparse.Namespace, case: Files, product: Product | None) -> tuple[Outcome, Section]:
    """A case of many: one that cannot be judged does not keep the others from it."""
    try:
        judgement = _judged(arguments, case, product)
    except BadInput as error:
        problem = one_line(error)
        return Outcome(case.name, None, problem), refused(case.name, problem)
    return Outcome(case.name, judgement), section(case.name, judgement, with_plots=not judgement.passed)


def _judged(arguments: argparse.Namespace, case: Files, product: Product | None) -> Judgement:
    operator = OPERATORS[arguments.operator]
    if case.actual is None:
        raise BadInput(f"{arguments.actual}: has no results of the name {case.inputs.stem}")
    values = read_arguments(operator, case.inputs)
    try:
        known = {tensor.name for tensor in results_of(operator, checked(operator, values, product))}
    except ContractError as error:
        raise BadInput(f"{case.inputs}: {error} ({error.status_name}, {int(error.status)})") from None
    actual = _results(arguments.operator, case.actual, known)
    baseline = None if case.baseline is None else _results(arguments.operator, case.baseline, known)
    try:
        return judge(
            arguments.operator,
            values,
            actual,
            standard=arguments.standard,
            baseline=baseline,
            level=arguments.level,
            product=product,
            worst=arguments.worst,
        )
    except ValueError as error:
        raise BadInput(f"{case.actual}: {error}") from None


def _results(operator: str, path: Path, known: set[str]) -> dict[str, Any]:
    """The results in a file; one that holds anything else is no file of results."""
    every = {tensor.name for tensor in OPERATORS[operator].signature.tensors if tensor.is_written}

    def accept(names: Iterable[str]) -> None:
        unknown = [name for name in names if name not in every]
        if unknown:
            raise BadInput(f"{', '.join(unknown)}: no result of {operator}, whose results are {', '.join(known)}")

    content = files.read(path, accept)
    plain = [name for name, value in content.items() if not hasattr(value, "dtype")]
    if plain:
        raise BadInput(f"{path}: {', '.join(plain)}: must be arrays")
    return {name: value for name, value in content.items() if name in known}


def _check_options(arguments: argparse.Namespace) -> None:
    if arguments.standard == _NEEDS_BASELINE and arguments.baseline is None:
        raise BadInput(f"the standard {_NEEDS_BASELINE} needs another implementation's results: --baseline FILE")
    if arguments.baseline is not None and arguments.standard not in _TAKES_BASELINE:
        raise BadInput(f"--baseline says nothing to the standard {arguments.standard}, only to cann-double and bitwise")
    folders = {path.is_dir() for path in (arguments.inputs, arguments.actual, arguments.baseline) if path is not None}
    if len(folders) > 1:
        raise BadInput("INPUTS, ACTUAL and --baseline must all be files or all be folders")
    for path in (arguments.json, arguments.html):
        if path is not None and not path.absolute().parent.is_dir():
            raise BadInput(f"{path}: cannot be written: there is no folder {path.parent}")


def _product(arguments: argparse.Namespace) -> Product | None:
    try:
        return current_product() if arguments.product is None else parse_product(arguments.product)
    except ValueError as error:
        raise BadInput(str(error)) from None


def _pairs(arguments: argparse.Namespace) -> Iterator[Files]:
    """The cases of a folder, by name."""
    inputs = _by_stem(arguments.inputs)
    if not inputs:
        raise BadInput(f"{arguments.inputs}: holds no cases ({', '.join(files.FORMATS)})")
    actual = _by_stem(arguments.actual)
    baseline = {} if arguments.baseline is None else _by_stem(arguments.baseline)
    for stem, path in inputs.items():
        if arguments.baseline is not None and stem not in baseline:
            raise BadInput(f"{arguments.baseline}: has no results of the name {stem}")
        yield Files(printable(stem), path, actual.get(stem), baseline.get(stem))


def _by_stem(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in files.FORMATS:
            if path.stem in found:
                raise BadInput(f"{folder}: has two files of the name {path.stem}")
            found[path.stem] = path
    return found


def _write(arguments: argparse.Namespace, outcomes: list[Outcome], sections: list[Section]) -> None:
    """The reports that are asked for."""
    if arguments.json is not None:
        cases = [
            {"case": outcome.name, "problem": outcome.problem, "passed": False}
            if outcome.judgement is None
            else {"case": outcome.name, **outcome.judgement.as_json()}
            for outcome in outcomes
        ]
        passed = all(outcome.passed for outcome in outcomes)
        head = {"operator": arguments.operator, "standard": arguments.standard, "passed": passed}
        _write_text(arguments.json, json.dumps({**head, "cases": cases}, indent=2, ensure_ascii=False) + "\n")
    if arguments.html is not None:
        level = f", level {arguments.level}" if arguments.standard == _NEEDS_BASELINE else ""
        subtitle = f"{arguments.actual} against the float64 oracle on {arguments.inputs}, "
        subtitle += f"by the standard {arguments.standard}{level}"
        _write_text(arguments.html, page(arguments.operator, subtitle, sections))


def _write_text(path: Path, text: str) -> None:
    try:
        if path.exists() and not path.is_file():  # a pipe or a device
            path.write_text(text, encoding="utf-8")
            return
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {reason(error)}") from None
    with files.replaced(path) as stream:
        stream.write(text.encode())
