"""Training steps of whole models: PyTorch's norms against normgrad's, eager and compiled.

Every mode trains a copy of the same model on the same batch. Its losses over the first steps are compared with eager
mode's before it is timed; then the modes take turns, so that whatever else the machine does meets all of them.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from normgrad.bench import models
from normgrad.bench.clock import median_ratio, no_collection, turns
from normgrad.bench.models import Task

EAGER, OVERRIDE, MODULES = "eager", "override", "modules"
#: The same with 16-bit output under autocast on CUDA (``autocast_dtype``).
OVERRIDE_16, MODULES_16 = "override16", "modules16"
MODES_16 = (OVERRIDE_16, MODULES_16)
COMPILE, COMPILE_MODULES = "compile", "compile+modules"
MODES = (EAGER, OVERRIDE, MODULES, *MODES_16, COMPILE, COMPILE_MODULES)
#: What a mode's time is compared with.
BASELINES = {mode: COMPILE if mode == COMPILE_MODULES else EAGER for mode in MODES if mode != EAGER}

#: The largest relative error of one rounding. A dtype other than float32 is autocast's.
ROUNDINGS = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
#: Steps whose losses are compared. They are also the warm-up, in which kernels are compiled.
LOSS_STEPS = 10
#: How far a mode's losses may be from eager mode's, in multiples of the noise, which is estimated from one sample. Seen
#: on a CPU: 0.5 in float32 (GPT-2, compiled); in bfloat16 0.3 (GPT-2, compiled) and 1.0 (Swin-T, modules).
NOISE_FACTOR = 4.0

#: Small enough that the loss falls step by step. With 0.01 Swin-T and ResNet-50 overshoot, which amplifies rounding.
_LEARNING_RATE = 0.001


@dataclass(frozen=True)
class Settings:
    """How to time: so many rounds; in a round, every mode makes so many steps in a row."""

    device: str = "cpu"
    modes: Sequence[str] = MODES
    rounds: int = 7
    steps: int = 1


@dataclass(frozen=True)
class ModeResult:
    """A model in one mode.

    Attributes
    ----------
    seconds : float or None
        The median of the rounds, for one step; None where the losses are wrong or the mode could not run.
    speedup : float or None
        The median of the rounds' ratios of the baseline's time to this mode's (:data:`BASELINES`).
    losses : sequence of float
        Of the first :data:`LOSS_STEPS` steps.
    difference, allowed : float or None
        The largest difference of a loss from eager mode's, and what the dtype's noise allows.
    first_step : float
        Seconds of the first step, which compiles.
    problem : str
        What is wrong with the losses, or why the mode could not run.
    is_wrong : bool
        Whether the losses are the problem.
    """

    mode: str
    seconds: float | None = None
    speedup: float | None = None
    losses: Sequence[float] = ()
    difference: float | None = None
    allowed: float | None = None
    first_step: float | None = None
    problem: str = ""
    is_wrong: bool = False


@dataclass(frozen=True)
class ModelResult:
    """All modes of a model in one dtype; ``problem`` says why it could not be built."""

    model: str
    dtype: str
    batch: tuple[int, ...] = ()
    results: Sequence[ModeResult] = ()
    problem: str = ""


class Training:
    """A copy of a model in one mode, with its optimizer. A call is one step, which returns the loss."""

    def __init__(self, task: Task, mode: str, dtype: str, device: str) -> None:
        import torch

        import normgrad.torch

        model = copy.deepcopy(task.model)
        output_dtype = getattr(torch, dtype) if mode in MODES_16 else torch.float32
        if mode in (MODULES, MODULES_16, COMPILE_MODULES):
            normgrad.torch.replace_norms(model, autocast_dtype=output_dtype)
        override = partial(normgrad.torch.override, autocast_dtype=output_dtype)
        #: What has to surround the steps: the override, in its modes.
        self.in_force: Callable[[], AbstractContextManager[Any]] = (
            override if mode in (OVERRIDE, OVERRIDE_16) else nullcontext
        )
        self._loss = task.loss
        # SGD: an error in the scale of a gradient shows in the losses, which Adam would hide.
        self._optimizer = torch.optim.SGD(model.parameters(), _LEARNING_RATE, momentum=0.9, fused=device == "cuda")
        self._model = torch.compile(model) if mode in (COMPILE, COMPILE_MODULES) else model
        self._cast = nullcontext if dtype == "float32" else lambda: torch.autocast(device, dtype=getattr(torch, dtype))

    def __call__(self) -> Any:
        self._optimizer.zero_grad()
        with self._cast():
            loss = self._loss(self._model)
        loss.backward()
        self._optimizer.step()
        return loss


def run_model(name: str, dtype: str, settings: Settings) -> ModelResult:
    """Compare the losses of all modes and time them."""
    package = models.MODELS[name].package
    if package is not None and find_spec(package) is None:
        return ModelResult(name, dtype, problem=f"{package} is not installed")
    try:
        task = models.build(name, settings.device)
    except (ImportError, RuntimeError) as error:  # a package that does not fit this PyTorch; no memory
        return ModelResult(name, dtype, problem=_first_line(error))
    results = _compared_and_timed(task, dtype, settings)
    del task
    _free_memory(settings.device)
    return ModelResult(name, dtype, results[0], results[1])


def _compared_and_timed(task: Task, dtype: str, settings: Settings) -> tuple[tuple[int, ...], list[ModeResult]]:
    device = settings.device
    eager = Training(task, EAGER, dtype, device)
    first, losses = _first_steps(eager)
    allowed = NOISE_FACTOR * noise(task, losses, dtype, device)
    trainings = {EAGER: eager}
    found = {EAGER: ModeResult(EAGER, None, None, losses, 0.0, allowed, first)}
    for mode in settings.modes:
        if mode == EAGER:
            continue
        if mode in MODES_16 and (device == "cpu" or dtype == "float32"):
            found[mode] = ModeResult(mode, problem="there is no 16-bit output without autocast on a GPU")
            continue
        try:
            training = Training(task, mode, dtype, device)
            first, own = _first_steps(training)
        except Exception as error:  # a missing compiler is reported in many ways
            found[mode] = ModeResult(mode, problem=_first_line(error))
            continue
        difference = largest_difference(own, losses)
        result = ModeResult(mode, None, None, own, difference, allowed, first)
        if difference <= allowed:  # not so for NaN
            trainings[mode] = training
        else:
            text = f"a loss differs from eager mode's by {difference:.2g}; the noise of {dtype} allows {allowed:.2g}"
            result = replace(result, problem=text, is_wrong=True)
        found[mode] = result
    times = timed(trainings, settings)
    return task.batch, [_with_times(found[mode], times) for mode in MODES if mode in found]


def _first_steps(training: Training) -> tuple[float, list[float]]:
    """Return the seconds of the first step, and the losses."""
    with training.in_force():
        start = time.perf_counter()
        losses = [training().item()]  # which waits for the device
        first = time.perf_counter() - start
        losses += [training().item() for _ in range(LOSS_STEPS - 1)]
    return first, losses


def noise(task: Task, losses: Sequence[float], dtype: str, device: str) -> float:
    """Return how much rounding changes a loss: eager training from weights that are one rounding off.

    Each weight is moved up or down at random. That is about the rounding error of one operation in every layer, which
    is what another order of summation or a fused kernel changes.
    """
    import torch

    moved = copy.deepcopy(task.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            signs = torch.randint(2, parameter.shape, generator=generator).mul_(2).sub_(1).to(parameter.device)
            parameter.copy_(parameter.double() * (1 + ROUNDINGS[dtype] * signs))
    _, others = _first_steps(Training(replace(task, model=moved), EAGER, dtype, device))
    # The losses themselves are rounded to float32.
    return max(largest_difference(others, losses), ROUNDINGS["float32"] * max(map(abs, losses)))


def largest_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest difference of two trainings' losses; NaN where one is NaN."""
    differences = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    return next((d for d in differences if d != d), max(differences))


def timed(trainings: Mapping[str, Training], settings: Settings) -> dict[str, list[float]]:
    """Return the seconds of a step, by mode and round."""
    times: dict[str, list[float]] = {mode: [] for mode in trainings}
    with no_collection():
        for mode in turns(list(trainings), settings.rounds):
            with trainings[mode].in_force():
                times[mode].append(_seconds(trainings[mode], settings))
    return times


def _seconds(training: Training, settings: Settings) -> float:
    wait = _wait(settings.device)
    wait()
    start = time.perf_counter()
    for _ in range(settings.steps):
        training()
    wait()
    return (time.perf_counter() - start) / settings.steps


def _wait(device: str) -> Callable[[], None]:
    import torch

    return torch.cuda.synchronize if device == "cuda" else lambda: None


def _with_times(result: ModeResult, times: Mapping[str, list[float]]) -> ModeResult:
    own, baseline = times.get(result.mode), times.get(BASELINES.get(result.mode, ""))
    if not own:
        return result
    return replace(result, seconds=statistics.median(own), speedup=median_ratio(baseline, own))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]


def _free_memory(device: str) -> None:
    import torch

    torch.compiler.reset()  # compiled code holds the models
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def warm_up(item: tuple[str, str, Sequence[str]]) -> None:
    """Make one step of a model in a dtype and modes on the GPU, so that the caches on disk have its kernels.

    For processes that compile ahead. What does not run is reported by the process that times it.
    """
    name, dtype, modes = item
    try:
        task = models.build(name, "cuda")
        for mode in modes:
            training = Training(task, mode, dtype, "cuda")
            with training.in_force():
                training()
            del training
    except Exception:
        pass
    _free_memory("cuda")
