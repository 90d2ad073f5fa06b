"""The entry points of GroupNorm, ``backward`` and ``forward``: choose the layout family of a call.

- *rows*: the channels and positions of a group are contiguous, and its channels begin at odd addresses;
- *channels_last*: the channels of a position are closer together than the positions of a channel;
- *contiguous*: anything else.
"""

from __future__ import annotations

from typing import Any

from normgrad.contract.plan import Problem
from normgrad.cuda.chip import Chip
from normgrad.cuda.group_norm import channels_last_launches, contiguous_launches, rows_launches
from normgrad.cuda.group_norm.tiles import Sizes, prefer_rows
from normgrad.cuda.launch import float64_bits
from normgrad.cuda.operands import Operand
from normgrad.cuda.steps import Steps, backward_steps


def _layout(sizes: Sizes, steps: Steps, operands: list[Operand], tensors: int) -> tuple[Any, list[Operand]]:
    """Return the module of the layout of the operands, and these as it takes them.

    The first ``tensors`` of the operands are read: 1 forward, 2 backward. The input is the last of them.
    """
    if sizes.C * sizes.HxW and prefer_rows(sizes.D, sizes.HxW, steps.itemsize, tensors):
        rows = rows_launches.as_rows(sizes, operands)
        if rows is not None:
            return rows_launches, rows
    _, channel, position = operands[tensors - 1].strides
    is_channels_last = sizes.C > 1 and sizes.HxW > 0 and abs(position) > abs(channel)
    return (channels_last_launches if is_channels_last else contiguous_launches), operands


def backward(problem: Problem, chip: Chip) -> Steps:
    """Plan GroupNorm backward: launches over the groups, one that adds up the partial sums of the weight gradients."""
    sizes = Sizes.of(problem)
    data = sizes[:3]
    steps, outputs, has_work = backward_steps(problem, sizes.C)
    if has_work:
        inputs = [steps.strided_input(name, data) for name in ("grad_out", "input")]
        operands = [*inputs, steps.output("grad_input", data)]
        layout, operands = _layout(sizes, steps, operands, tensors=2)
        layout.backward(sizes, chip, steps, operands, outputs)
    return steps


def forward(problem: Problem, chip: Chip) -> Steps:
    """Plan GroupNorm forward."""
    sizes = Sizes.of(problem)
    data = sizes[:3]
    steps = Steps(problem, ["output", "mean", "rstd"])
    if sizes.N:
        operands = [steps.strided_input("input", data), steps.output("output", data)]
        statistics = [steps.output(name, (sizes.N * sizes.group,)) for name in ("mean", "rstd")]
        layout, operands = _layout(sizes, steps, operands, tensors=1)
        layout.forward(sizes, chip, steps, operands, statistics, float64_bits(problem.attributes["eps"]))
    return steps
