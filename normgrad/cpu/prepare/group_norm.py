"""GroupNorm on the CPU: from a problem to a kernel and its descriptor."""

from __future__ import annotations

import math

from normgrad.contract.plan import Problem
from normgrad.cpu import limits
from normgrad.cpu.compile.kernel_lookup import Kernel
from normgrad.cpu.descriptors import COEFFICIENTS
from normgrad.cpu.prepare.channel import ChannelLayout
from normgrad.cpu.prepare.launch import SteppedKernel
from normgrad.cpu.prepare.staging import Operands

_BACKWARD = Kernel("normgrad.cpu.kernels.group_norm", "group_norm_backward")
_FORWARD = Kernel("normgrad.cpu.kernels.group_norm", "group_norm")


def prepare_backward(problem: Problem) -> SteppedKernel:
    """Prepare ``group_norm_backward``."""
    operands = Operands(problem)
    if problem.views["input"].numel == 0:
        return operands.kernel(*operands.fills(0.0, "grad_weight", "grad_bias"))
    tensors = {"grad_out": "grad_out", "input": "input"}
    if "grad_input" in operands:
        operands.separate("grad_input", ("grad_out", "input"))
        tensors["grad_input"] = "result"
    layout = _layout(operands, tensors, 2)
    layout.desc.sums = operands.workspace.take(layout.sample_blocks * 2 * layout.desc.padded_channels * 8)
    layout.add_vectors("mean", "rstd", "weight", "grad_weight", "grad_bias")
    return operands.kernel(layout.step(_BACKWARD))


def prepare_forward(problem: Problem) -> SteppedKernel:
    """Prepare ``group_norm``."""
    operands = Operands(problem)
    if problem.views["input"].numel == 0:
        return operands.kernel(*operands.fills(math.nan, "mean", "rstd"))
    operands.separate("output", ("input",))
    layout = _layout(operands, {"input": "input", "output": "result"}, 1)
    desc = layout.desc
    if layout.columns and desc.groups == 1 and layout.strides["input"][2] == desc.channels:
        desc.is_contiguous, desc.chunk_channels = 1, desc.channels
    layout.take_statistics(desc.samples * desc.groups)
    desc.eps = problem.attributes["eps"]
    layout.add_vectors("weight", "bias", "mean", "rstd")
    return operands.kernel(layout.step(_FORWARD))


def _layout(operands: Operands, tensors: dict[str, str], read: int) -> ChannelLayout:
    """Describe GroupNorm's data, of which ``read`` tensors are read, and reserve its workspace."""
    attributes = operands.problem.attributes
    sizes, groups = tuple(attributes[name] for name in ("N", "C", "HxW")), attributes["group"]
    layout = ChannelLayout(operands, sizes, tensors)
    layout.choose_layout()
    layout.describe(groups, phases_above=limits.L2_UNIT // (read * operands.view("input").dtype.itemsize))
    desc = layout.desc
    layout.take_partials()
    take, pitch = operands.workspace.take, desc.padded_channels
    desc.parameter_lanes = take(2 * pitch * 4)
    desc.coefficients = take((desc.samples * desc.in_phases + desc.slots) * COEFFICIENTS * pitch * 4)
    return layout
