"""Judge results, such as an NPU's dump, against the float64 oracle on the same inputs.

INPUTS and ACTUAL are files as `normgrad run` reads and writes them, or two folders with files of the same names, one
pair per case. The exit status is 1 if a result does not pass, 2 if a case cannot be judged.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

import normgrad
from normgrad.cli import files
from normgrad.cli.errors import BadInput, nonempty_path, one_line, printable, reason
from normgrad.cli.run import product_of, read_arguments, refuse_bits, unknown_names
from normgrad.cli.terminal import Console, waiting, with_progress
from normgrad.cli.verdicts import show_case, show_summary
from normgrad.contract.products import Product
from normgrad.contract.status import ContractError
from normgrad.operators import OPERATORS
from normgrad.testing.expected import checked, results_of
from normgrad.testing.judgement import Judgement, judge
from normgrad.testing.page import Origin, Section, not_judged, page, section
from normgrad.testing.standards import LEVELS, STRICT

NAME = "check"
HELP = "judge results against the oracle"

_NEEDS_BASELINE = "cann-double"
_TAKES_BASELINE = (_NEEDS_BASELINE, "bitwise")
_STDOUT = Path("-")

#: What passes by each standard, in a line; docs/guides/judging.md has the figures.
STANDARDS = {
    STRICT: "every element within normgrad's own error bound",
    "cann": "99 % of the elements within CANN's tolerances, and no error beyond its limit",
    "cann-mere": "mean and largest relative error below CANN's thresholds",
    "cann-double": "errors at most those of the baseline times the factors of --level (--baseline)",
    "torch": "every element within the default tolerances of torch.testing.assert_close",
    "bitwise": "every element has the bits of the exact value, rounded, or of the baseline",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The operator, the files, the standard, and where reports go."""
    parser.add_argument("operator", metavar="OPERATOR", choices=OPERATORS, help=", ".join(OPERATORS))
    parser.add_argument("inputs", metavar="INPUTS", type=nonempty_path, help="the inputs: a file, or a folder of cases")
    parser.add_argument("actual", metavar="ACTUAL", type=nonempty_path, help="the results: a file, or a folder of them")
    parser.add_argument(
        "--standard",
        metavar="S",
        choices=STANDARDS,
        default=STRICT,
        help=f"when a result passes, from the list below (default: {STRICT})",
    )
    parser.add_argument(
        "--baseline",
        metavar="FILE",
        type=nonempty_path,
        help="another implementation's results for the same inputs, or a folder of them, for cann-double and bitwise",
    )
    levels = "; ".join(
        f"{name}: max {level.largest:g}, mean {level.mean:g}, rms {level.rms:g}" for name, level in LEVELS.items()
    )
    parser.add_argument(
        "--level",
        choices=LEVELS,
        default="L1",
        help=f"how many times the baseline's errors cann-double allows (default: L1). {levels}",
    )
    parser.add_argument(
        "--worst", metavar="N", type=_count, default=3, help="how many of the worst elements to describe (default: 3)"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=nonempty_path,
        help="write the report as JSON; - writes it to the standard output, alone",
    )
    parser.add_argument(
        "--html", metavar="FILE", type=nonempty_path, help="write the report as one HTML page with plots"
    )
    parser.add_argument(
        "--product",
        metavar="P",
        help="check the inputs as this product's documents do, such as 'Atlas A2' (default: NORMGRAD_PRODUCT, or none)",
    )
    width = max(map(len, STANDARDS))
    parser.epilog = "standards:\n" + "\n".join(f"  {name:{width}}  {text}" for name, text in STANDARDS.items())


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
    """Judge every case, write the reports, print what was found."""
    _check_options(arguments)
    product = product_of(arguments)
    if arguments.inputs.is_dir():
        outcomes, sections = _judge_folder(arguments, product)
    else:
        outcomes, sections = _judge_file(arguments, product)
    # Before anything is printed: a reader of the text that goes away must not take the reports with it.
    _write(arguments, outcomes, sections)
    if arguments.json != _STDOUT:
        _show(Console(), outcomes, is_folder=arguments.inputs.is_dir())
    if any(outcome.judgement is None for outcome in outcomes):
        return 2
    return int(not all(outcome.passed for outcome in outcomes))


def _judge_file(arguments: argparse.Namespace, product: Product | None) -> tuple[list[Outcome], list[Section]]:
    case = Files(printable(arguments.inputs.name), arguments.inputs, arguments.actual, arguments.baseline)
    with waiting(f"Judging {case.name} …"):
        judgement = _judged(arguments, case, product)
        sections = [section(case.name, judgement, with_plots=True)] if arguments.html else []
    return [Outcome(case.name, judgement)], sections


def _judge_folder(arguments: argparse.Namespace, product: Product | None) -> tuple[list[Outcome], list[Section]]:
    """Judge every case; one that cannot be judged does not keep the others from it."""
    outcomes, sections = [], []
    for case in with_progress(list(_pairs(arguments)), "Judging"):
        try:
            judgement = _judged(arguments, case, product)
        except BadInput as error:
            problem = one_line(error)
            outcomes.append(Outcome(case.name, None, problem))
            sections.append(not_judged(case.name, problem))
            continue
        if arguments.html:
            sections.append(section(case.name, judgement, with_plots=not judgement.passed))
        # What was measured is as large as the case: only what the reports need is kept.
        outcomes.append(Outcome(case.name, judgement.without_arrays()))
    return outcomes, sections


def _show(console: Console, outcomes: Sequence[Outcome], *, is_folder: bool) -> None:
    """Of a folder, the cases that failed and a summary of all."""
    for outcome in outcomes:
        if outcome.judgement is not None and not (is_folder and outcome.passed):
            show_case(console, outcome.name, outcome.judgement, only_failed=is_folder)
    if is_folder:
        show_summary(console, [(outcome.name, outcome.judgement, outcome.problem) for outcome in outcomes])


def _judged(arguments: argparse.Namespace, case: Files, product: Product | None) -> Judgement:
    operator = OPERATORS[arguments.operator]
    if case.actual is None:
        raise BadInput(f"{arguments.actual}: has no results of the name {case.inputs.stem}")
    values = read_arguments(operator, case.inputs)
    try:
        known = [tensor.name for tensor in results_of(operator, checked(operator, values, product))]
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


def _results(operator: str, path: Path, known: Sequence[str]) -> dict[str, Any]:
    """The results in a file; one that holds anything else is no file of results."""
    every = {tensor.name for tensor in OPERATORS[operator].signature.tensors if tensor.is_written}

    def accept(names: Iterable[str]) -> None:
        if unknown := [name for name in names if name not in every]:
            raise unknown_names(OPERATORS[operator], unknown, "result", known)

    content = files.read(path, accept)
    plain = [name for name, value in content.items() if not hasattr(value, "dtype")]
    if plain:
        raise BadInput(f"{path}: {', '.join(plain)}: must be arrays")
    for name, value in content.items():
        refuse_bits(path, name, value)
    return {name: value for name, value in content.items() if name in known}


def _check_options(arguments: argparse.Namespace) -> None:
    if arguments.standard == _NEEDS_BASELINE and arguments.baseline is None:
        raise BadInput(f"the standard {_NEEDS_BASELINE} needs another implementation's results: --baseline FILE")
    if arguments.baseline is not None and arguments.standard not in _TAKES_BASELINE:
        raise BadInput(
            f"--baseline has no meaning with the standard {arguments.standard}; cann-double and bitwise take one"
        )
    paths = [path for path in (arguments.inputs, arguments.actual, arguments.baseline) if path is not None]
    for path in paths:
        files.check_exists(path)
    if len({path.is_dir() for path in paths}) > 1:
        raise BadInput("INPUTS, ACTUAL and --baseline must all be files or all be folders")
    if arguments.html == _STDOUT:
        raise BadInput("--html - has no meaning: a page is written to a file")
    if arguments.html is not None and arguments.json == arguments.html:
        raise BadInput(f"{arguments.html}: is the file of both reports, and each needs its own")
    for path in (arguments.json, arguments.html):
        if path is not None and path != _STDOUT:
            _check_report(path, paths)


def _check_report(path: Path, judged: Sequence[Path]) -> None:
    """Raise BadInput where a report cannot be written, or would replace a file that is judged."""
    if not path.absolute().parent.is_dir():
        raise BadInput(f"{path}: cannot be written: there is no folder {path.parent}")
    if os.path.isdir(path):  # Path.is_dir raises where a name is too long
        raise BadInput(f"{path}: is a folder, and must be a file")
    every = chain.from_iterable(files.in_folder(each).values() if each.is_dir() else [each] for each in judged)
    if os.path.realpath(path) in map(os.path.realpath, every):
        raise BadInput(f"{path}: is a file that is judged, and is not replaced; choose another file for the report")


def _pairs(arguments: argparse.Namespace) -> Iterator[Files]:
    """The cases of a folder, by name."""
    inputs, actual = files.cases_in(arguments.inputs), files.in_folder(arguments.actual)
    baseline = {} if arguments.baseline is None else files.in_folder(arguments.baseline)
    for stem, path in inputs.items():
        if arguments.baseline is not None and stem not in baseline:
            raise BadInput(f"{arguments.baseline}: has no results of the name {stem}")
        yield Files(printable(stem), path, actual.get(stem), baseline.get(stem))


def _write(arguments: argparse.Namespace, outcomes: Sequence[Outcome], sections: Sequence[Section]) -> None:
    """The reports that are asked for."""
    origin = Origin(
        f"normgrad {normgrad.__version__}",
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        printable(f"normgrad {shlex.join(arguments.argv)}"),
    )
    if arguments.json is not None:
        cases = [
            {"case": outcome.name, "problem": outcome.problem, "passed": False}
            if outcome.judgement is None
            else {"case": outcome.name, **outcome.judgement.as_json()}
            for outcome in outcomes
        ]
        passed = all(outcome.passed for outcome in outcomes)
        source = {"version": normgrad.__version__, "date": origin.date, "command": origin.command}
        head = {"operator": arguments.operator, "standard": arguments.standard, "passed": passed}
        _write_text(arguments.json, json.dumps({**source, **head, "cases": cases}, indent=2, ensure_ascii=False) + "\n")
    if arguments.html is not None:
        level = f", level {arguments.level}" if arguments.standard == _NEEDS_BASELINE else ""
        subtitle = f"{arguments.actual} against the float64 oracle on {arguments.inputs}, "
        subtitle += f"by the standard {arguments.standard}{level}"
        _write_text(arguments.html, page(arguments.operator, printable(subtitle), sections, origin))


def _write_text(path: Path, text: str) -> None:
    if path == _STDOUT:
        sys.stdout.write(text)
        return
    try:
        if path.exists() and not path.is_file():  # a pipe or a device
            path.write_text(text, encoding="utf-8")
            return
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {reason(error)}") from None
    with files.replaced(path) as stream:
        stream.write(text.encode())
