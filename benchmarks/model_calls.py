"""The normalisation calls of real models: record them in a training step, and time each on the recorded data.

    python benchmarks/model_calls.py --csv model_calls.csv --json model_calls.json
    python benchmarks/model_calls.py --device cpu --models tiny

A training step (forward pass, loss, backward pass; random weights and data) of every model runs once in float32 and
once under autocast to bfloat16. What reaches ``aten::native_layer_norm``, ``aten::native_group_norm`` and their
backward operators is recorded: shapes, strides, dtypes, how often, and of each distinct call the tensors of the first.
normgrad's results on these tensors are compared with the oracle. Then PyTorch's operator, normgrad's and a copy of the
same bytes are timed in turns; on a GPU the L2 cache is filled with other data before every call. The exit status is 1
where a result is beyond the bound.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from page_parts import table
from torch.utils._python_dispatch import TorchDispatchMode

import normgrad
from normgrad.bench import machine
from normgrad.bench.cases import Case
from normgrad.bench.clock import DeviceClock, median_ratio, rounds_of_blocks
from normgrad.bench.compilation import compile_ahead
from normgrad.bench.memory import keep_freed_memory
from normgrad.bench.models import MODELS, Task, build
from normgrad.bench.results import write_csv, write_json
from normgrad.bench.verification import Claim, Verdict, verify
from normgrad.bench.workload import Workload
from normgrad.operators import OPERATORS

ROUNDS = 25
PRECISIONS = {"float32": None, "autocast": torch.bfloat16}
#: What is recorded unless the command says otherwise.
DEFAULT = ("vit_b_16", "swin_t", "convnext_tiny", "resnet50_group_norm", "gpt2")

_ATEN = {
    "layer_norm": torch.ops.aten.native_layer_norm.default,
    "layer_norm_backward": torch.ops.aten.native_layer_norm_backward.default,
    "group_norm": torch.ops.aten.native_group_norm.default,
    "group_norm_backward": torch.ops.aten.native_group_norm_backward.default,
}
_RECORDED = {overload: name for name, overload in _ATEN.items()}


# What is recorded


@dataclass(frozen=True)
class Layout:
    """A tensor without its elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Call:
    """An operator with its arguments: layouts in place of tensors, tuples in place of lists."""

    operator: str
    arguments: tuple[Any, ...]

    def layout(self, parameter: str) -> Any:
        """The layout of a tensor by the parameter's name; None where the operator does not take it."""
        names = OPERATORS[self.operator].names
        return self.arguments[names.index(parameter)] if parameter in names else None

    @property
    def input(self) -> Layout:
        return self.layout("input")

    @property
    def traffic(self) -> int:
        """The fewest bytes that the call moves: every tensor of the data's size once."""
        tensors = 3 if self.operator.endswith("backward") else 2
        return tensors * math.prod(self.input.shape) * self.input.dtype.itemsize


@dataclass
class Recorded:
    """The distinct calls of one training step: how often each was made, and the arguments of the first."""

    model: str
    precision: str
    counts: Counter[Call] = field(default_factory=Counter)
    samples: dict[Call, list[Any]] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Records the normalisation operators that reach ATen, in the forward pass and in the backward pass."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self._recorded = recorded

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = _RECORDED.get(function)
        if operator is not None:
            call = Call(operator, tuple(map(_described, args)))
            self._recorded.counts[call] += 1
            if call not in self._recorded.samples:
                self._recorded.samples[call] = [copied(value) for value in args]
        return function(*args, **(kwargs or {}))


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Layout(tuple(value.shape), value.stride(), value.dtype)
    return tuple(value) if isinstance(value, list | tuple) else value


def copied(value: Any) -> Any:
    """Return a copy of a tensor with the very same strides, those of 0 included."""
    if not isinstance(value, torch.Tensor):
        return value
    once = value.detach()
    for axis, stride in enumerate(value.stride()):
        if stride == 0:
            once = once.narrow(axis, 0, min(1, once.shape[axis]))
    copy = torch.empty_strided(once.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(once)
    return copy.as_strided(value.shape, value.stride())


def record(model: str, precision: str, task: Task, device: str) -> Recorded:
    """Record one training step."""
    recorded = Recorded(model, precision)
    dtype = PRECISIONS[precision]
    with Recorder(recorded):
        with torch.autocast(device, dtype) if dtype is not None else nullcontext():
            loss = task.loss(task.model)
        loss.backward()
    return recorded


# Verification and timing


@dataclass(frozen=True)
class Timed:
    """A distinct call of a model: one line of the table. Times in µs, ratios of times."""

    model: str
    precision: str
    operator: str
    shape: str
    input_strides: str
    grad_out_strides: str
    dtype: str
    count: int
    zero_fraction: float
    mean_magnitude: float
    pytorch_us: float | None
    normgrad_us: float | None
    copy_us: float | None
    time_over_pytorch: float | None
    of_copy: float | None
    error_of_bound: float
    problem: str


def verdict(call: Call, arguments: Sequence[Any], results: Sequence[Any]) -> Verdict:
    """Compare normgrad's results with the oracle: some rows, and some columns of what is summed over rows."""
    given = dict(zip(OPERATORS[call.operator].names, arguments, strict=False))
    mask = given.pop("output_mask", (True, True, True))
    flattened, group, shapes = _flattened(given)
    work = Workload(
        Case(call.operator, shapes["input"], call.input.dtype_name, group=group), flattened, str(given["input"].device)
    )
    names = OPERATORS[call.operator].signature.output_names
    wanted = (result if keep else None for result, keep in zip(results, mask, strict=True))
    claim = Claim([_reshaped(shapes, *pair) for pair in zip(names, wanted, strict=True)])
    verify(work, [claim], sampled=True)
    return claim.verdict


def _flattened(given: dict[str, Any]) -> tuple[dict[str, Any], int, dict[str, tuple[int, ...]]]:
    """Return the arguments as the benchmark's cases have them, the number of groups, and the shapes by name.

    Rows and columns for LayerNorm, (N, C, HxW) for GroupNorm.
    """
    if "normalized_shape" in given:
        columns = math.prod(given["normalized_shape"])
        rows, group = given["input"].numel() // columns, 0
        data, statistic, parameter = (rows, columns), (rows, 1), (columns,)
        given = given | {"normalized_shape": (columns,)}
    else:
        group = given["group"]
        data, statistic = (given["N"], given["C"], given["HxW"]), (given["N"], group)
        parameter = (given["C"],)
    shapes = {
        **dict.fromkeys(("input", "grad_out", "grad_input", "output"), data),
        **dict.fromkeys(("mean", "rstd"), statistic),
        **dict.fromkeys(("weight", "bias", "grad_weight", "grad_bias"), parameter),
    }
    return {name: _reshaped(shapes, name, value) for name, value in given.items()}, group, shapes


def _reshaped(shapes: dict[str, tuple[int, ...]], name: str, value: Any) -> Any:
    return value.reshape(shapes[name]) if isinstance(value, torch.Tensor) else value


def timed(recorded: Recorded, call: Call, clock: DeviceClock | None, rounds: int) -> Timed:
    """Verify and time one call on its recorded data."""
    arguments = recorded.samples[call]
    ours, theirs = partial(getattr(normgrad, call.operator), *arguments), partial(_ATEN[call.operator], *arguments)
    found = verdict(call, arguments, ours())
    times: dict[str, list[float]] = {}
    if not found.problem:
        target, source = (
            torch.empty(call.traffic // 2, dtype=torch.uint8, device=arguments[0].device) for _ in range(2)
        )
        blocks = [{"normgrad": ours}, {"PyTorch": theirs, "copy": partial(target.copy_, source)}]
        times = rounds_of_blocks(blocks, rounds, clock)
    data = arguments[0].float()  # grad_out of a backward operator, input of a forward one
    return Timed(
        recorded.model,
        recorded.precision,
        call.operator,
        "x".join(map(str, call.input.shape)),
        _strides(call.input),
        _strides(call.layout("grad_out")),
        call.input.dtype_name,
        recorded.counts[call],
        (data == 0).float().mean().item(),
        data.abs().mean().item(),
        _microseconds(times.get("PyTorch")),
        _microseconds(times.get("normgrad")),
        _microseconds(times.get("copy")),
        median_ratio(times.get("normgrad"), times.get("PyTorch")),
        median_ratio(times.get("copy"), times.get("normgrad")),
        found.worst,
        found.problem,
    )


def _strides(layout: Layout | None) -> str:
    return "" if layout is None else " ".join(map(str, layout.strides))


def _microseconds(seconds: list[float] | None) -> float | None:
    return statistics.median(seconds) * 1e6 if seconds else None


def compile_call(call: Call) -> None:
    """Compile the kernels of a call, on tensors of its layouts."""
    arguments = [
        torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device="cuda")
        if isinstance(value, Layout)
        else value
        for value in call.arguments
    ]
    getattr(normgrad, call.operator)(*arguments)


# The command


def worst_first(found: Sequence[Timed]) -> list[Timed]:
    """Results beyond the bound, then the slowest against PyTorch."""
    return sorted(found, key=lambda t: -math.inf if t.time_over_pytorch is None else -t.time_over_pytorch)


COLUMNS = ("model", "precision", "operator", "shape", "strides", "dtype", "count")
COLUMNS += ("PyTorch, µs", "normgrad, µs", "time / PyTorch", "% of a copy")


def cells(line: Timed) -> list[str]:
    """One line of the table."""
    strides = line.input_strides
    if line.grad_out_strides not in ("", strides):
        strides += f" (grad_out {line.grad_out_strides})"
    figures = ["WRONG"] * 4
    if line.time_over_pytorch is not None:
        figures = [f"{line.pytorch_us:.1f}", f"{line.normgrad_us:.1f}", f"{line.time_over_pytorch:.2f}"]
        figures.append(f"{100 * (line.of_copy or 0.0):.0f}")
    names = [line.model, line.precision, line.operator, line.shape.replace("x", "×"), strides, line.dtype]
    return [*names, str(line.count), *figures]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(MODELS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=DEFAULT, metavar="MODEL", help=names)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), metavar="PRECISION")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write a line per distinct call")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the same with the machine, versions and date")
    return parser.parse_args()


def recordings(arguments: argparse.Namespace) -> Iterator[Recorded]:
    """Record every model in every precision; the model's memory is free again before the next."""
    for name in arguments.models:
        task = build(name, arguments.device)
        for precision in arguments.precisions:
            recorded = record(name, precision, task, arguments.device)
            print(
                f"{name}, {precision}: {sum(recorded.counts.values())} calls, {len(recorded.counts)} distinct",
                flush=True,
            )
            yield recorded
        del task
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


def main() -> int:
    """Record, compile, verify, time, print and write."""
    arguments = _arguments()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("model_calls: --device cuda needs a CUDA GPU; --device cpu needs none", file=sys.stderr)
        return 2
    keep_freed_memory()
    try:
        recorded = list(recordings(arguments))
    except ImportError as error:
        text = f"model_calls: {error}; the models need torchvision and transformers, --models tiny needs neither"
        print(text, file=sys.stderr)
        return 2
    clock = None
    if arguments.device == "cuda":
        compile_ahead(compile_call, list(dict.fromkeys(call for each in recorded for call in each.samples)))
        clock = DeviceClock()
    found = []
    for each in recorded:
        for call in list(each.samples):
            found.append(timed(each, call, clock, ROUNDS))
            del each.samples[call]
    found = worst_first(found)
    print("\n" + table(COLUMNS, map(cells, found)))
    slower = [line for line in found if (line.time_over_pytorch or 0.0) > 1]
    print(f"{len(slower)} of {len(found)} distinct calls take longer than PyTorch's.")
    for line in found:
        if line.problem:
            print(f"WRONG: {line.model}, {line.precision}, {line.operator} {line.shape} {line.dtype}: {line.problem}")
    if arguments.csv:
        write_csv(arguments.csv, map(asdict, found))
    if arguments.json:
        write_json(arguments.json, machine.describe(arguments.device), map(asdict, found))
    return 1 if any(line.problem for line in found) else 0


if __name__ == "__main__":
    sys.exit(main())
