"""What synchronised BatchNorm is tried on, run on a rank's part, or in one process on all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHANNELS, STEPS = 3, 2


@dataclass(frozen=True)
class Case:
    """A BatchNorm and what it is trained on. ``split`` are the samples of each rank."""

    split: tuple[int, ...]
    tail: tuple[int, ...] = (4, 5)
    dtype: torch.dtype = torch.float32
    parameters: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    affine: bool = True
    momentum: float | None = 0.1
    track: bool = True
    eps: float = 1e-5
    offset: float = 0.5
    transposed: bool = False
    frozen: bool = False
    input_needs_gradient: bool = True
    same_on_all: bool = False


def cases(ranks: int) -> dict[str, Case]:
    """By name."""
    uneven = Case({2: (3, 5), 4: (3, 1, 6, 2)}[ranks])
    alone = (0,) * (ranks - 1) + (7,)
    return {
        "uneven": uneven,
        "even": replace(uneven, split=(4,) * ranks),
        "an empty rank": replace(uneven, split=(0, *uneven.split[1:])),
        "all but one empty": replace(uneven, split=alone),
        "one sample each": replace(uneven, split=(1,) * ranks, tail=()),
        "no tail": replace(uneven, tail=()),
        "1d": replace(uneven, tail=(6,)),
        "3d": replace(uneven, tail=(2, 3, 2)),
        "channels last": replace(uneven, memory_format=torch.channels_last),
        "channels last 3d": replace(uneven, tail=(2, 3, 2), memory_format=torch.channels_last_3d),
        "transposed": replace(uneven, transposed=True),
        "float16": replace(uneven, dtype=torch.float16),
        "bfloat16": replace(uneven, dtype=torch.bfloat16),
        "bfloat16 channels last, an empty rank": replace(
            uneven, split=(0, *uneven.split[1:]), dtype=torch.bfloat16, memory_format=torch.channels_last
        ),
        "bfloat16 parameters": replace(uneven, dtype=torch.bfloat16, parameters=torch.bfloat16),
        "float64": replace(uneven, dtype=torch.float64, parameters=torch.float64),
        "not affine": replace(uneven, affine=False),
        "cumulative": replace(uneven, momentum=None),
        "momentum 1": replace(uneven, momentum=1.0),
        "no running statistics": replace(uneven, track=False),
        "large eps": replace(uneven, eps=0.5),
        "far from zero": replace(uneven, offset=1000.0),
        "frozen parameters": replace(uneven, frozen=True),
        "input without gradient": replace(uneven, input_needs_gradient=False),
        "same data on all": replace(uneven, split=(4,) * ranks, same_on_all=True),
    }


def whole_batch(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """The input of all ranks and the gradient of the output, in the case's dtype."""
    generator = torch.Generator().manual_seed(step)
    samples = case.split[0] if case.same_on_all else sum(case.split)
    shape = (samples, CHANNELS, *case.tail)
    x, grad_out = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    repeat = (len(case.split) if case.same_on_all else 1, *(1 for _ in shape[1:]))
    return (2 * x + case.offset).to(case.dtype).repeat(repeat), (grad_out + 0.3).to(case.dtype).repeat(repeat)


def make_norm(case: Case, cls: Any, dtype: torch.dtype, **kwargs: Any) -> Any:
    """A layer with parameters that are not the initial ones."""
    norm = cls(CHANNELS, case.eps, case.momentum, case.affine, case.track, **kwargs).to(dtype)
    if case.affine:
        with torch.no_grad():
            norm.weight.copy_(torch.tensor([0.5, -1.25, 2.0]))
            norm.bias.copy_(torch.tensor([0.25, 1.0, -3.0]))
        norm.requires_grad_(not case.frozen)
    return norm


def train(norm: Any, forward: Any, parts: Sequence[Sequence[Tensor]], case: Case) -> dict[str, Tensor]:
    """Outputs, gradients and buffers of some steps, and the output in evaluation after them."""
    found: dict[str, Tensor] = {}
    for step, (x, grad_out) in enumerate(parts):
        x = x.detach().requires_grad_(case.input_needs_gradient)
        output = forward(x)
        found[f"output {step}"] = output.detach()
        if output.requires_grad:
            output.backward(grad_out)
        if x.grad is not None:
            found[f"grad_input {step}"] = x.grad
    for name, parameter in norm.named_parameters():
        if parameter.grad is not None:
            found[f"grad_{name}"] = parameter.grad
    found |= {name: buffer.clone() for name, buffer in norm.named_buffers()}
    if case.track:
        norm.eval()
        found["output in evaluation"] = norm(parts[0][0]).detach()
    return found


def part_of(tensor: Tensor, case: Case, rank: int) -> Tensor:
    """A rank's share of the batch, laid out as the case says."""
    start = sum(case.split[:rank])
    part = tensor[start : start + case.split[rank]]
    if case.transposed:
        return part.transpose(-1, -2).contiguous().transpose(-1, -2)
    return part.contiguous(memory_format=case.memory_format)


def train_on_rank(
    case: Case, process_group: Any = None, wrap: Any = lambda norm: norm, device: str = "cpu", cls: Any = None
) -> dict[str, Tensor]:
    """The case on this rank, whose batch is its share; with normgrad's layer, or another of its kind."""
    from normgrad.torch import SyncBatchNorm

    norm = make_norm(case, cls or SyncBatchNorm, case.parameters, process_group=process_group).to(device)
    rank = dist.get_rank(process_group)
    batches = [whole_batch(case, step) for step in range(STEPS)]
    parts = [[part_of(tensor, case, rank).to(device) for tensor in batch] for batch in batches]
    found = train(norm, wrap(norm), parts, case)
    return {name: value.cpu() for name, value in found.items()}


def train_in_one_process(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """PyTorch's BatchNorm on the whole batch, all of it in this dtype or the case's own."""
    cls = {0: torch.nn.BatchNorm1d, 1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d, 3: torch.nn.BatchNorm3d}
    wide = dtype == torch.float64
    norm = make_norm(case, cls[len(case.tail)], dtype if wide else case.parameters)
    batches = [whole_batch(case, step) for step in range(STEPS)]
    if wide:
        batches = [(x.double(), grad_out.double()) for x, grad_out in batches]
    return train(norm, norm, batches, case)


def terms(case: Case) -> dict[str, Tensor]:
    """What each result is a sum of, in absolute values and per channel, from the case in float64.

    A statistic that is rounded to float32 is off by a share of the largest value: in units of the standard deviation,
    that is what every result inherits.
    """
    batches = [tuple(t.double().transpose(0, 1).flatten(1) for t in whole_batch(case, step)) for step in range(STEPS)]
    norm = make_norm(case, torch.nn.BatchNorm1d, torch.float64)
    weight, bias = (
        (norm.weight.abs(), norm.bias.abs()) if case.affine else (torch.ones(CHANNELS), torch.zeros(CHANNELS))
    )
    found: dict[str, Tensor] = {name: torch.zeros(CHANNELS) for name in ("grad_weight", "grad_bias")}
    largest, variances = torch.zeros(CHANNELS), torch.ones(CHANNELS)
    for step, (x, grad_out) in enumerate(batches):
        size, invstd = x.abs().amax(1), (x.var(1, correction=0) + case.eps).rsqrt()
        deviations = 1 + size * invstd
        found[f"output {step}"] = weight * deviations + bias
        found[f"grad_input {step}"] = weight * invstd * grad_out.abs().amax(1) * deviations
        found["grad_weight"] += grad_out.abs().sum(1) * deviations
        found["grad_bias"] += grad_out.abs().sum(1)
        largest, variances = torch.maximum(largest, size), torch.maximum(variances, x.var(1) + size / invstd)
    found["running_mean"], found["running_var"] = largest, variances
    if case.track:
        running_var = train_in_one_process(case, torch.float64)["running_var"] + case.eps
        found["output in evaluation"] = weight * largest * running_var.rsqrt() * (1 + variances / running_var) + bias
    return {name: value.detach() for name, value in found.items()}
