"""BatchNorm over the batches of all ranks of a process group, with one collective each way.

Forward, every rank sends its mean, its invstd and its count in one buffer; backward, its two sums. Which rank has how
many samples is part of the arithmetic: one without any takes part like the others, and adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from normgrad.torch import formulas
from normgrad.torch.heuristics import gpu_problem
from normgrad.torch.internals import is_gloo
from normgrad.torch.outputs import memory_format

_MIN_VALUES = 2  # per channel: one value has no variance


@dataclass(frozen=True)
class Running:
    """The running statistics, where there are any, and how far they move: ``running += momentum·(new − running)``."""

    mean: Tensor | None = None
    var: Tensor | None = None
    momentum: float | Tensor = 0.0

    @property
    def buffers(self) -> list[Tensor]:
        return [buffer for buffer in (self.mean, self.var) if buffer is not None]

    def move(self, mean: Tensor, var: Tensor) -> None:
        """Move towards new statistics."""
        for buffer, new in ((self.mean, mean), (self.var, var)):
            if buffer is not None:
                buffer.copy_(buffer + (new - buffer) * self.momentum)


def batch_norm_over_ranks(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Running,
    eps: float,
    group: dist.ProcessGroup,
) -> Tensor:
    """Return the output on this rank, with the statistics of all ranks."""
    group_name = group.group_name
    if not input.is_contiguous():  # PyTorch's outputs are contiguous or in channels_last, whatever the input's strides
        input = input.contiguous(memory_format=memory_format(input))
    with torch.no_grad():
        data = input.detach()
        means, invstds, counts = _statistics_of_ranks(data, eps, group, group_name)
        mean, invstd = _statistics_of_all(data, means, invstds, counts, running, eps)
    output: Tensor = _Normalize.apply(input, weight, bias, mean, invstd, counts, group_name)
    return output


def _steps(data: Tensor) -> Any:
    """Return the operators; for float64, and on a GPU where they do not run, their formulas."""
    runs = data.dtype != torch.float64 and (not data.is_cuda or gpu_problem(data.device.index) is None)
    return torch.ops.normgrad if runs else formulas


def _statistics_of_ranks(
    data: Tensor, eps: float, group: dist.ProcessGroup, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return means and invstds, ranks × channels, and counts, one per rank."""
    mean, invstd = _steps(data).batch_norm_stats(data, eps)
    channels, ranks = data.shape[1], dist.get_world_size(group)
    count = mean.new_full((1,), data.numel() // channels)
    gathered = _exchanged(
        "gather the statistics",
        torch.ops._c10d_functional.all_gather_into_tensor,
        torch.cat([mean, invstd, count]),
        ranks,
        group_name,
    ).view(ranks, 2 * channels + 1)
    return gathered[:, :channels], gathered[:, channels:-1], gathered[:, -1]


def _statistics_of_all(
    data: Tensor, means: Tensor, invstds: Tensor, counts: Tensor, running: Running, eps: float
) -> tuple[Tensor, Tensor]:
    """Return mean and invstd of the whole batch; with two values per channel the running statistics move."""
    if data.numel() >= _MIN_VALUES * data.shape[1]:  # this rank's batch is enough, whatever the others have
        return _combined(data, means, invstds, counts, running, eps)
    total = counts.sum()
    if _host_knows(total) and total == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {data.shape}")
    before = [buffer.clone() for buffer in running.buffers]
    mean, invstd = _combined(data, means, invstds, counts, running, eps)
    for buffer, old in zip(running.buffers, before, strict=True):
        buffer.copy_(torch.where(total >= _MIN_VALUES, buffer, old))
    # Of no values at all there are no statistics; and gradients, which are zero then, must not be made of NaN.
    return torch.where(total > 0, mean, 0), torch.where(total > 0, invstd, 0)


def _combined(
    data: Tensor, means: Tensor, invstds: Tensor, counts: Tensor, running: Running, eps: float
) -> tuple[Tensor, Tensor]:
    """Combine the statistics of all ranks, and move the running statistics."""
    gather = _steps(data).batch_norm_gather_stats_with_counts
    mean: Tensor
    invstd: Tensor
    if _steps(data) is formulas:
        mean, invstd = gather(data, means, invstds, None, None, 0.0, eps, counts)
        total = counts.sum()
        running.move(mean, (invstd.square().reciprocal() - eps) * (total / (total - 1)))
    elif isinstance(running.momentum, Tensor):
        new_mean, new_var = (means.new_zeros(data.shape[1]) for _ in range(2))
        mean, invstd = gather(data, means, invstds, new_mean, new_var, 1.0, eps, counts)
        running.move(new_mean, new_var)
    else:
        mean, invstd = gather(data, means, invstds, running.mean, running.var, running.momentum, eps, counts)
    return mean, invstd


def _host_knows(tensor: Tensor) -> bool:
    """Return whether a value can be read without waiting for a device or breaking a graph."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


class _Normalize(torch.autograd.Function):  # type: ignore[misc]
    """The last step forward. Backward, the gradient through the statistics of all ranks is part of the input's."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        invstd: Tensor,
        counts: Tensor,
        group_name: str,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, invstd, counts)
        ctx.group_name = group_name
        output: Tensor = _steps(input).batch_norm_elemt(input, weight, bias, mean, invstd)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, invstd, counts = ctx.saved_tensors
        steps, wanted = _steps(input), ctx.needs_input_grad[:3]
        sum_dy, sum_dy_xmu, grad_weight, grad_bias = steps.batch_norm_reduce_backward(
            grad_out, input, mean, invstd, weight, *wanted
        )
        grad_input = None
        if wanted[0]:
            sums = _exchanged(
                "add up the sums of the gradient",
                torch.ops._c10d_functional.all_reduce,
                torch.cat([sum_dy, sum_dy_xmu]),
                "sum",
                ctx.group_name,
            )
            sum_dy, sum_dy_xmu = sums.chunk(2)
            grad_input = steps.batch_norm_elemt_backward(
                grad_out, input, mean, invstd, weight, sum_dy, sum_dy_xmu, counts
            )
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _exchanged(purpose: str, collective: Callable[..., Tensor], tensor: Tensor, *args: Any) -> Tensor:
    """Return the result of a collective on a tensor of each rank; the group's name is the last argument."""
    if tensor.device.type == "cuda" and is_gloo(args[-1], tensor.device.type):
        return _exchanged(purpose, collective, tensor.cpu(), *args).to(tensor.device)
    wait = torch.ops._c10d_functional.wait_tensor
    if torch.compiler.is_compiling():
        traced: Tensor = wait(collective(tensor, *args))
        return traced
    try:
        done: Tensor = wait(collective(tensor, *args))
    except RuntimeError as error:
        raise RuntimeError(
            f"SyncBatchNorm cannot {purpose} of all ranks: a rank has ended, or has not taken part within the process "
            f"group's timeout ({error})"
        ) from error
    return done
