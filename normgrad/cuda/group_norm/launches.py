"""The entry points of GroupNorm, ``backward`` and ``forward``: choose the layout family of a call.

- *rows*: the channels and positions of a group are contiguous, and its channels begin at odd addresses;
- *channels_last*: the channels of a position are closer together than the positions of a channel;
- *contiguous*: anything else.
"""

from __future__ import annotations

from collections.abc import Sequence

from normgrad.contract.plan import Problem
from normgrad.cuda.chip import Chip
from normgrad.cuda.group_norm import channels_last_launches, contiguous_launches, rows_launches
from normgrad.cuda.group_norm.call import Sizes
from normgrad.cuda.group_norm.tiles import prefer_rows
from normgrad.cuda.launch import float64_bits
from normgrad.cuda.operands import Operand
from normgrad.cuda.steps import Steps, backward_steps


def _is_channels_last(sizes: Sizes, x: Operand) -> bool:
    _, channel, position = x.strides
    return sizes.C > 1 and sizes.HxW > 0 and abs(position) > abs(channel)


def _as_rows(sizes: Sizes, steps: Steps, operands: Sequence[Operand], tensors: int) -> list[Operand] | None:
    """Return the operands as rows, each a group of a sample; None where they are none, or not faster so."""
    if sizes.C * sizes.HxW == 0 or not prefer_rows(sizes.D, sizes.HxW, steps.itemsize, tensors):
        return None
    return rows_launches.as_rows(sizes, operands)


def backward(problem: Problem, chip: Chip) -> Steps:
    """Plan GroupNorm backward: launches over the groups, one that adds up the partial sums of the weight gradients."""
    sizes = Sizes.of(problem)
    N, C, HxW, _ = sizes
    steps, outputs, has_work = backward_steps(problem, C)
    if not has_work:
        return steps
    x = steps.strided_input("input", (N, C, HxW))
    operands = [steps.strided_input("grad_out", (N, C, HxW)), x, steps.output("grad_input", (N, C, HxW))]
    rows = _as_rows(sizes, steps, operands, tensors=2)
    if rows is not None:
        rows_launches.backward(sizes, chip, steps, rows, outputs)
        return steps
    parameters = [steps.contiguous_input(name) for name in ("mean", "rstd", "weight")]
    if _is_channels_last(sizes, x):
        partial = channels_last_launches.backward(sizes, chip, steps, operands, parameters)
    else:
        partial = contiguous_launches.backward(sizes, chip, steps, operands, parameters)
    if outputs:
        steps.sum_partials(partial.memory, N * partial.parts, C, outputs)
    return steps


def forward(problem: Problem, chip: Chip) -> Steps:
    """Plan GroupNorm forward."""
    sizes = Sizes.of(problem)
    N, C, HxW, group = sizes
    steps = Steps(problem, ["output", "mean", "rstd"])
    if N == 0:
        return steps
    x = steps.strided_input("input", (N, C, HxW))
    operands = [x, steps.output("output", (N, C, HxW))]
    statistics = [steps.output(name, (N * group,)) for name in ("mean", "rstd")]
    eps_bits = float64_bits(problem.attributes["eps"])
    rows = _as_rows(sizes, steps, operands, tensors=1)
    if rows is not None:
        rows_launches.forward(sizes, chip, steps, rows, statistics, eps_bits)
    elif _is_channels_last(sizes, x):
        channels_last_launches.forward(sizes, chip, steps, operands, statistics, eps_bits)
    else:
        contiguous_launches.forward(sizes, chip, steps, operands, statistics, eps_bits)
    return steps
