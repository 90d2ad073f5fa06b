"""GroupNorm on the CPU: the descriptors of its kernels."""

from __future__ import annotations

import math

import numpy as np

from normgrad.contract.plan import Problem
from normgrad.cpu.compile.kernel_lookup import Kernel
from normgrad.cpu.fields import channel as at
from normgrad.cpu.prepare.channel import Layout, fills, separate
from normgrad.cpu.prepare.launch import SteppedKernel
from normgrad.cpu.prepare.staging import Operands
from normgrad.cpu.tags import COLUMNS, ROWS, TAGS

_BACKWARD = Kernel("normgrad.cpu.kernels.group_norm", "group_norm_backward")
_FORWARD = Kernel("normgrad.cpu.kernels.group_norm", "group_norm")
_KEPT = 1 << 20  # bytes of data that stay in a core's cache from the sums to the results


def prepare_backward(problem: Problem) -> SteppedKernel:
    """The kernel of ``group_norm_backward``."""
    operands = Operands(problem)
    if problem.views["input"].numel == 0:
        return operands.kernel(*fills(operands, 0.0, "grad_weight", "grad_bias"))
    tensors = {"grad_out": at.GRAD_OUT, "input": at.INPUT}
    if "grad_input" in operands:
        separate(operands, "grad_input", ("grad_out", "input"))
        tensors["grad_input"] = at.RESULT
    layout = _laid(operands, tensors, 2)
    for name, position in (("mean", at.MEAN), ("rstd", at.RSTD), ("weight", at.WEIGHT)):
        layout.vector(name, position)
    for name, position in (("grad_weight", at.OUT_0), ("grad_bias", at.OUT_1)):
        layout.vector(name, position)
    tags = TAGS[problem.views["input"].dtype], COLUMNS if layout.columns else ROWS
    return operands.kernel(layout.step(_BACKWARD, *tags))


def prepare_forward(problem: Problem) -> SteppedKernel:
    """The kernel of ``group_norm``."""
    operands = Operands(problem)
    if problem.views["input"].numel == 0:
        return operands.kernel(*fills(operands, math.nan, "mean", "rstd"))
    separate(operands, "output", ("input",))
    layout = _laid(operands, {"input": at.INPUT, "output": at.RESULT}, 1)
    channels, groups = int(layout.desc[at.CHANNELS]), int(layout.desc[at.GROUPS])
    if layout.columns and groups == 1 and layout.strides["input"][2] == channels:
        layout.desc[[at.ONE_RUN, at.CHANNELS_AT_ONCE]] = 1, channels
    layout.take(at.RECORDS, int(layout.desc[at.SAMPLES]) * groups * 16)
    layout.desc[at.EPS] = np.float64(problem.attributes["eps"]).view(np.int64)
    for name, position in (("weight", at.WEIGHT), ("bias", at.BIAS), ("mean", at.OUT_0), ("rstd", at.OUT_1)):
        layout.vector(name, position)
    tags = TAGS[problem.views["input"].dtype], COLUMNS if layout.columns else ROWS
    return operands.kernel(layout.step(_FORWARD, *tags))


def _laid(operands: Operands, tensors: dict[str, int], read: int) -> Layout:
    """The layout of GroupNorm's data, of which ``read`` tensors are read, with its workspace."""
    attributes = operands.problem.attributes
    sizes, groups = tuple(attributes[name] for name in ("N", "C", "HxW")), attributes["group"]
    layout = Layout(operands, sizes, tensors)
    layout.lay()
    itemsize = operands.view("input").dtype.itemsize
    layout.describe(groups, apart_from=_KEPT // (read * itemsize))
    desc, samples = layout.desc, sizes[0]
    desc[[at.STAT_SAMPLE, at.STAT_CHANNEL]] = groups, sizes[1] // groups
    slots = int(desc[at.SLOTS])
    layout.take_partials()
    layout.take(at.WEIGHTS, 2 * (layout.pitch + at.SPARE) * 4)
    layout.take_tables(samples + slots if desc[at.APART] else 2 * slots)
    return layout
