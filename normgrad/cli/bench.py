"""Measure the operators against the bandwidth limit and against other libraries, and training steps of models.

Every result is compared with the oracle, and every model's losses with PyTorch's, before its time counts. The bandwidth
limit is the time of the fastest plain kernel that moves the same bytes. The exit status is 1 if a result of
normgrad's own is wrong.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from normgrad import backends, threads
from normgrad.bench.cases import (
    CHANNELS_LAST,
    CONTIGUOUS,
    DTYPES,
    PATTERN_SETS,
    QUICK_PATTERN_SETS,
    SETS,
    Case,
    cases,
    selected,
)
from normgrad.bench.machine import hardware
from normgrad.bench.model_steps import MODES, MODES_16, ROUNDINGS, Settings
from normgrad.bench.models import MODELS, STEPS
from normgrad.cli.errors import BadInput, nonempty_path, reason
from normgrad.cli.terminal import Console
from normgrad.contract.status import counted
from normgrad.operators import OPERATORS

Item = TypeVar("Item")

NAME = "bench"
HELP = "measure the operators against the bandwidth limit and other libraries"

_MEGABYTE = 1 << 20
_BUSY = 0.5  # load per core before the run
_QUICK_ROUNDS = 7  # for each pattern of values
_GPU_ROUNDS = 25
_SUBNORMAL_BUDGET = 0.5  # seconds for each size
_MODEL_ROUNDS = {"cpu": 7, "cuda": 10}
_MODEL_STEPS = {"cpu": 1, "cuda": 3}  # in a row: a GPU's queue is kept filled, as it is in training
#: On a GPU autocast alone, as models are trained there.
_MODEL_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}
#: Each holds a model's activations, up to 40 GB for a batch of a GPU.
_COMPILING_PROCESSES = 3
_PICTURES = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, how, and where the numbers go."""
    parser.add_argument(
        "--data",
        action="store_true",
        help="time every operator on values that training produces (tiny, zero, constant, NaN) against normal data",
    )
    parser.add_argument(
        "--models",
        nargs="*",
        choices=MODELS,
        metavar="MODEL",
        help="time training steps of models with PyTorch's norms and with normgrad's "
        f"(default: {', '.join(STEPS)}; also {', '.join(name for name in MODELS if name not in STEPS)})",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        metavar="MODE",
        default=[],
        help=f"how the models of --models are run (default: all, but {' and '.join(MODES_16)} on a GPU only). "
        f"{', '.join(MODES)}",
    )
    parser.add_argument("--rounds", type=_count, metavar="N", help="rounds for each model (default: 7; on a GPU 10)")
    parser.add_argument(
        "--steps", type=_count, metavar="N", help="steps of each mode in a round of --models (default: 1; on a GPU 3)"
    )
    sets = parser.add_mutually_exclusive_group()
    sets.add_argument(
        "--grid", action="store_true", help="all operators and sizes, from 2×2 to 256 MB (default: sizes of models)"
    )
    sets.add_argument("--quick", action="store_true", help="a few sizes, less time for each")
    parser.add_argument(
        "--operators",
        nargs="+",
        choices=OPERATORS,
        metavar="OPERATOR",
        default=[],
        help=f"only these (default: all). {', '.join(OPERATORS)}",
    )
    dtypes, layouts = ", ".join(DTYPES), (CONTIGUOUS, CHANNELS_LAST)
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        metavar="DTYPE",
        default=[],
        help=f"only these (default: all). {dtypes}",
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=layouts,
        metavar="LAYOUT",
        default=[],
        help=f"only these memory formats (default: all). {', '.join(layouts)}",
    )
    parser.add_argument("--largest", type=_positive, metavar="MB", help="leave out larger tensors (default: none)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default: cpu)")
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads for normgrad and PyTorch (default: NORMGRAD_NUM_THREADS, or the cores of this process)",
    )
    parser.add_argument(
        "--budget",
        type=_positive,
        metavar="S",
        help="seconds for each case (default: 2; with --quick 0.5, with --grid 0.3; on a GPU 25 rounds)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="measure torch.compile too, which takes seconds a case; with --grid in float32 at the default sizes",
    )
    parser.add_argument(
        "--graph",
        action="store_true",
        help="on a GPU, time small calls on the host and in a replayed CUDA graph too",
    )
    parser.add_argument("--startup", action="store_true", help="time the first call in new processes too")
    parser.add_argument("--csv", type=nonempty_path, metavar="FILE", help="write every measurement as a line")
    parser.add_argument(
        "--json", type=nonempty_path, metavar="FILE", help="write every measurement, the machine, versions and date"
    )
    parser.add_argument(
        "--plot", type=nonempty_path, metavar="FILE", help="draw speed over size (.png, .svg or .pdf; needs matplotlib)"
    )


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, and is {text!r}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, and is {text!r}")
    return int(text)


def execute(arguments: argparse.Namespace) -> int:
    """Measure, show, write."""
    _check_reports(csv=arguments.csv, json=arguments.json, plot=arguments.plot)
    if arguments.plot is not None and find_spec("matplotlib") is None:
        raise BadInput("--plot needs matplotlib: pip install 'normgrad[plot]'")
    if arguments.plot is not None and arguments.plot.suffix.lower() not in _PICTURES:
        raise BadInput(f"{arguments.plot}: the file name must end in {', '.join(_PICTURES)}")
    if arguments.models is not None:
        _refuse(arguments, "models", *("data", "grid", "quick", "operators", "layouts", "largest"), *_FOR_OPERATORS)
        return _measure_models(arguments)
    _refuse(arguments, "", "modes", "steps", "rounds")
    if arguments.data:
        _refuse(arguments, "data", "grid", *_FOR_OPERATORS)
        every = (QUICK_PATTERN_SETS if arguments.quick else PATTERN_SETS)[arguments.device]
    else:
        every = SETS[arguments.device]["grid" if arguments.grid else "quick" if arguments.quick else "default"]
    largest = None if arguments.largest is None else int(arguments.largest * _MEGABYTE)
    chosen = selected(cases(every), arguments.operators, arguments.dtypes, arguments.layouts, largest)
    if not chosen:
        hint = "" if arguments.data or arguments.grid else "; --grid has all operators"
        raise BadInput(
            f"nothing is left to measure: no case of the set is of these operators, dtypes, layouts and sizes{hint}"
        )
    _prepare_process(arguments.device, arguments.threads)
    return _measure_patterns(arguments, chosen) if arguments.data else _measure(arguments, chosen)


def _check_reports(**reports: Path | None) -> None:
    """Raise BadInput where a file cannot be written, or two options name one file."""
    options: dict[str, str] = {}
    for option, path in reports.items():
        if path is None:
            continue
        _check_writable(path)
        other = options.setdefault(os.path.realpath(path), option)
        is_device = path.exists() and not path.is_file()
        if other != option and not is_device:
            raise BadInput(f"{path}: is the file of --{other} and of --{option}, and each needs its own")


def _check_writable(path: Path) -> None:
    """Raise BadInput where a file cannot be written: before anything is measured, not after."""
    try:
        is_new = not path.exists()
        if is_new or not path.is_fifo():
            path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {reason(error)}") from None


_FOR_OPERATORS = ("compile", "startup", "plot", "budget", "graph")


def _refuse(arguments: argparse.Namespace, used: str, *options: str) -> None:
    """Refuse the options that another, or its absence, has no use for."""
    for option in options:
        if getattr(arguments, option):
            raise BadInput(f"--{option} has no meaning with{f' --{used}' if used else 'out --models'}")


def _prepare_process(device: str, count: int | None) -> None:
    """The same number of threads for everyone, and an allocator that does not give memory back."""
    from normgrad.bench.memory import keep_freed_memory

    try:
        if count is not None:
            threads.set_num_threads(count)
        share = threads.get_num_threads()
        backends.chosen(device)
    except ValueError as error:
        raise BadInput(str(error)) from None
    keep_freed_memory()
    has_torch = find_spec("torch") is not None
    if has_torch:
        import torch

        torch.set_num_threads(share)
    if device == "cuda" and not (has_torch and torch.cuda.is_available()):
        raise BadInput("--device cuda needs PyTorch and a CUDA GPU")


def _measure(arguments: argparse.Namespace, chosen: Sequence[Case]) -> int:
    from normgrad.bench import machine, overhead, pattern_runner, report, runner, startup
    from normgrad.bench.compilation import compile_ahead
    from normgrad.bench.implementations.implementation import Role
    from normgrad.bench.results import CaseResult, rows, skipped, wrong

    console = Console()
    on_gpu = arguments.device == "cuda"
    budget = arguments.budget or (0.0 if on_gpu else 0.3 if arguments.grid else 0.5 if arguments.quick else 2.0)
    settings = runner.Settings(arguments.device, budget, arguments.compile, graph=arguments.graph)
    if arguments.graph and not on_gpu:
        raise BadInput("--graph needs --device cuda")
    if on_gpu:
        settings = replace(settings, fewest_rounds=_GPU_ROUNDS)
    elif arguments.grid:  # many cases: less for each
        settings = replace(settings, compiled_cases=_compiled_in_the_grid(chosen), fewest_rounds=3)
    description = machine.describe(arguments.device)
    _show_machine(console, description)
    if on_gpu:
        compile_ahead(pattern_runner.compile_case, chosen)
    results: list[CaseResult] = []
    overheads: list[overhead.Overhead] = []
    startups: list[startup.Startup] = []
    try:
        libraries = runner.libraries(settings)
        results.extend(runner.run_case(case, libraries, settings) for case in _with_progress(chosen))
        if not on_gpu and overhead.OPERATOR in {case.operator for case in chosen}:
            overheads = list(overhead.overheads(budget))
        if arguments.startup:
            pairs = dict.fromkeys((case.operator, case.dtype) for case in chosen)
            startups = [startup.measure_startup(*pair) for pair in pairs]
    finally:  # what was measured before an interruption is not lost
        report.show(console, results)
        if overheads:
            overhead.show(console, overheads)
        if startups:
            startup.show(console, startups)
        sections = {"overhead": overhead.record(overheads), "startup": startup.record(startups)}
        _write(arguments, description, rows(results), skipped=skipped(results), **sections)
    if arguments.plot:
        from normgrad.bench.plot import draw

        draw(arguments.plot, results, _headline(description))
    return 1 if any(measurement.role is Role.OURS for _, measurement in wrong(results)) else 0


def _measure_patterns(arguments: argparse.Namespace, chosen: Sequence[Case]) -> int:
    from normgrad.bench import machine, pattern_report, pattern_runner
    from normgrad.bench.compilation import compile_ahead
    from normgrad.bench.subnormals import subnormal_cost

    console = Console()
    device, rounds = arguments.device, _QUICK_ROUNDS if arguments.quick else pattern_runner.ROUNDS
    description = machine.describe(device)
    _show_machine(console, description)
    if device == "cuda":
        compile_ahead(pattern_runner.compile_case, chosen)
    found: list[pattern_runner.PatternCase] = []
    cost = subnormal_cost(_SUBNORMAL_BUDGET) if device == "cpu" else {}
    try:
        libraries = pattern_runner.libraries()
        found.extend(pattern_runner.run_patterns(case, device, libraries, rounds) for case in _with_progress(chosen))
    finally:  # what was measured before an interruption is not lost
        pattern_report.show(console, found, device, cost)
        sections = {"skipped": pattern_report.skipped(found), "subnormal_cost": cost}
        _write(arguments, description, pattern_report.rows(found), **sections)
    return 1 if pattern_report.wrong(found) else 0


def _measure_models(arguments: argparse.Namespace) -> int:
    from normgrad.bench import machine, model_report, model_steps
    from normgrad.bench.compilation import compile_ahead

    device = arguments.device
    if find_spec("torch") is None:
        raise BadInput("--models needs PyTorch: pip install 'normgrad[torch]'")
    dtypes = arguments.dtypes or _MODEL_DTYPES[device]
    for dtype in dtypes:
        if dtype not in ROUNDINGS:
            raise BadInput(f"--models takes {' and '.join(ROUNDINGS)}; {dtype} would need the loss scaled")
    _prepare_process(device, arguments.threads)
    settings = Settings(
        device,
        arguments.modes or [mode for mode in MODES if device == "cuda" or mode not in MODES_16],
        arguments.rounds or _MODEL_ROUNDS[device],
        arguments.steps or _MODEL_STEPS[device],
    )
    console = Console()
    description = machine.describe(device)
    _show_machine(console, description)
    chosen = [(name, dtype) for name in arguments.models or STEPS for dtype in dtypes]
    if device == "cuda":
        items = [(name, dtype, settings.modes) for name, dtype in chosen]
        compile_ahead(model_steps.warm_up, items, _COMPILING_PROCESSES)
    found: list[model_steps.ModelResult] = []
    try:
        for name, dtype in _with_progress(chosen):
            found.append(model_steps.run_model(name, dtype, settings))
            # After each model, which takes up to a minute: nothing of a run that is killed is lost.
            _write(arguments, description, model_report.rows(found, settings), skipped=model_report.skipped(found))
    finally:
        model_report.show(console, found, settings.modes)
    return 1 if any(mode.is_wrong for result in found for mode in result.results) else 0


def _write(
    arguments: argparse.Namespace, description: dict[str, Any], rows: Iterable[dict[str, Any]], **sections: Any
) -> None:
    """Write the records to the files that are asked for."""
    from normgrad.bench.results import write_csv, write_json

    records = list(rows)
    if arguments.csv:
        write_csv(arguments.csv, records)
    if arguments.json:
        write_json(arguments.json, description, records, **sections)


def _show_machine(console: Console, description: dict[str, Any]) -> None:
    """Print what the run is made on, and whether it is busy."""
    console.print(_headline(description), style="bold", soft_wrap=True)
    if description["load"] is not None and description["load"] > _BUSY * description["cores"]:
        console.print(
            f"The machine is busy (load {description['load']:.1f} on {description['cores']} cores): the times will be "
            "those of a busy machine.",
            style="bold red",
            soft_wrap=True,
        )
    console.print()


def _compiled_in_the_grid(chosen: Sequence[Case]) -> frozenset[Case]:
    """Where torch.compile takes part: in float32, at sizes that are among the default ones."""
    usual = {case.shape for case in cases(SETS["cpu"]["default"])}
    return frozenset(c for c in chosen if c.dtype == "float32" and c.layout == CONTIGUOUS and c.shape in usual)


def _headline(description: dict[str, Any]) -> str:
    versions = description["versions"]
    with_torch = f", PyTorch {versions['torch']}" if "torch" in versions else ""
    return (
        f"normgrad {versions['normgrad']}, backend {description['backend']}, "
        f"{counted(description['threads'], 'thread')}, {hardware(description)}{with_torch}, {description['date']}"
    )


def _with_progress(chosen: Sequence[Item]) -> Iterator[Item]:
    """The cases, with a bar on a terminal."""
    console = RichConsole(stderr=True, highlight=False, markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    # Redrawn between cases alone: a thread that draws would take time from those that are timed.
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=len(chosen))
        for case in chosen:
            name = " ".join(case) if isinstance(case, tuple) else str(case)
            bar.update(task, description=name, refresh=True)
            yield case
            bar.advance(task)
