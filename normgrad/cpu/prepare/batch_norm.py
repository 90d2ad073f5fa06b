"""BatchNorm on the CPU: from a problem to a kernel and its descriptor."""

from __future__ import annotations

import math
from collections.abc import Iterable

from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.plan import Problem
from normgrad.cpu.compile.kernel_lookup import Kernel
from normgrad.cpu.descriptors import COEFFICIENTS, GatherStats, Vector
from normgrad.cpu.prepare.channel import ChannelLayout
from normgrad.cpu.prepare.launch import Step, SteppedKernel
from normgrad.cpu.prepare.staging import Operands, padded
from normgrad.cpu.tags import CODES

_ELEMT = Kernel("normgrad.cpu.kernels.batch_norm", "batch_norm_elemt")
_ELEMT_BACKWARD = Kernel("normgrad.cpu.kernels.batch_norm", "batch_norm_elemt_backward")
_REDUCE_BACKWARD = Kernel("normgrad.cpu.kernels.batch_norm", "batch_norm_reduce_backward")
_STATS = Kernel("normgrad.cpu.kernels.batch_norm", "batch_norm_stats")
_GATHER = Kernel("normgrad.cpu.kernels.batch_norm", "batch_norm_gather_stats_with_counts")


def prepare_elemt_backward(problem: Problem) -> SteppedKernel:
    """Prepare ``batch_norm_elemt_backward``."""
    vectors = ("mean", "weight", "sum_dy", "sum_dy_xmu", "counter")
    return _elementwise(problem, _ELEMT_BACKWARD, ("grad_out", "input"), "grad_input", vectors)


def prepare_elemt(problem: Problem) -> SteppedKernel:
    """Prepare ``batch_norm_elemt``."""
    return _elementwise(problem, _ELEMT, ("input",), "output", ("mean", "weight", "bias"))


def _elementwise(
    problem: Problem, kernel: Kernel, inputs: tuple[str, ...], output: str, vectors: Iterable[str]
) -> SteppedKernel:
    operands = Operands(problem)
    if problem.views["input"].numel == 0:
        return operands.kernel()
    tensors = {**dict(zip(inputs, inputs, strict=True)), output: "result"}
    operands.separate(output, inputs)
    layout = _layout(operands, tensors)
    layout.add_vectors(*vectors, rstd="invstd")
    layout.desc.counts = problem.views["counter"].numel if "counter" in operands else 0
    layout.take_coefficients(COEFFICIENTS)
    return operands.kernel(layout.step(kernel))


def prepare_stats(problem: Problem) -> SteppedKernel:
    """Prepare ``batch_norm_stats``."""
    operands = Operands(problem)
    if problem.views["input"].numel == 0:
        return operands.kernel(*operands.fills(math.nan, "mean", "invstd"))
    layout = _layout(operands, {"input": "input"})
    layout.desc.eps = problem.attributes["eps"]
    layout.add_vectors("mean", rstd="invstd")
    layout.take_statistics(layout.desc.padded_channels)
    layout.take_partials()
    if layout.columns:
        layout.take_coefficients(layout.desc.samples * layout.desc.chunks)  # shifts
    return operands.kernel(layout.step(_STATS))


def prepare_reduce_backward(problem: Problem) -> SteppedKernel:
    """Prepare ``batch_norm_reduce_backward``."""
    operands = Operands(problem)
    outputs = ("sum_dy", "sum_dy_xmu", "grad_weight", "grad_bias")
    if not any(name in operands for name in outputs):
        return operands.kernel()
    if problem.views["input"].numel == 0:
        return operands.kernel(*operands.fills(0.0, *outputs))
    tensors = {"grad_out": "grad_out", "input": "input"}
    layout = _layout(operands, tensors)
    layout.add_vectors("mean", *outputs, rstd="invstd")
    layout.take_statistics(layout.desc.padded_channels)
    layout.take_partials()
    layout.take_coefficients(3)
    return operands.kernel(layout.step(_REDUCE_BACKWARD))


def prepare_gather_stats(problem: Problem) -> SteppedKernel:
    """Prepare ``batch_norm_gather_stats_with_counts``."""
    operands, views = Operands(problem), problem.views
    ranks, channels = views["mean"].shape
    lanes = padded(channels)
    desc = GatherStats(ranks, channels, lanes, problem.attributes["momentum"], problem.attributes["eps"])
    for name in ("mean", "invstd"):
        (rank_stride, channel_stride), dtype = views[name].strides, views[name].dtype
        setattr(desc, name, Vector(operands.pointer(name), channel_stride, CODES[dtype]))
        setattr(desc, f"{name}_pitch", rank_stride * dtype.itemsize)
    for name in ("counts", "running_mean", "running_var", "mean_all", "invstd_all"):
        setattr(desc, name, operands.vector(name))
    desc.results = operands.workspace.take(4 * lanes * 8)
    return operands.kernel(Step(_GATHER, desc))


def _converted(operands: Operands, names: Iterable[str]) -> list[str]:
    """Return the tensors that get float32 copies: of different dtypes all others, since kernels take one dtype."""
    mixed = len({operands.view(name).dtype for name in names}) > 1
    return [name for name in names if mixed and operands.view(name).dtype is not FLOAT32]


def _layout(operands: Operands, tensors: dict[str, str]) -> ChannelLayout:
    """Describe BatchNorm's data."""
    shape = operands.view("input").shape
    layout = ChannelLayout(operands, (shape[0], shape[1], math.prod(shape[2:])), tensors)
    layout.choose_layout(_converted(operands, tensors))
    layout.merge_samples()
    layout.describe(groups=1)
    return layout
