"""BatchNorm on the CPU: the descriptors of its kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from normgrad.contract.plan import Problem
from normgrad.cpu.compile.kernel_lookup import Kernel
from normgrad.cpu.fields import channel as at
from normgrad.cpu.fields import gather_stats as gather
from normgrad.cpu.prepare.channel import Layout, fills, separate, single_stride
from normgrad.cpu.prepare.launch import Place, Step, SteppedKernel
from normgrad.cpu.prepare.staging import Operands
from normgrad.cpu.tags import CODES, COLUMNS, F32, MIXED, ROWS, TAGS

_ELEMT = Kernel("normgrad.cpu.kernels.batch_norm", "batch_norm_elemt")
_ELEMT_BACKWARD = Kernel("normgrad.cpu.kernels.batch_norm", "batch_norm_elemt_backward")
_REDUCE_BACKWARD = Kernel("normgrad.cpu.kernels.batch_norm", "batch_norm_reduce_backward")
_STATS = Kernel("normgrad.cpu.kernels.batch_norm", "batch_norm_stats")
_TOGETHER = 8192  # places of the short rows that make a chunk
_GATHER = Kernel("normgrad.cpu.kernels.gather_stats", "batch_norm_gather_stats_with_counts")


def prepare_elemt_backward(problem: Problem) -> SteppedKernel:
    """The kernel of ``batch_norm_elemt_backward``."""
    operands = Operands(problem)
    if problem.views["input"].numel == 0:
        return operands.kernel()
    separate(operands, "grad_input", ("grad_out", "input"))
    layout, tags = _laid(operands, {"grad_out": at.GRAD_OUT, "input": at.INPUT, "grad_input": at.RESULT})
    vectors = {"mean": at.MEAN, "invstd": at.RSTD, "weight": at.WEIGHT, "sum_dy": at.SUM_DY, "counter": at.COUNTER}
    for name, position in {**vectors, "sum_dy_xmu": at.SUM_DY_XMU}.items():
        layout.vector(name, position)
    layout.desc[at.COUNTS] = problem.views["counter"].numel
    layout.take(at.TABLES, at.PLANES * layout.pitch * 4)
    return operands.kernel(layout.step(_ELEMT_BACKWARD, *tags))


def prepare_elemt(problem: Problem) -> SteppedKernel:
    """The kernel of ``batch_norm_elemt``."""
    operands = Operands(problem)
    if problem.views["input"].numel == 0:
        return operands.kernel()
    separate(operands, "output", ("input",))
    layout, tags = _laid(operands, {"input": at.INPUT, "output": at.RESULT})
    for name, position in {"mean": at.MEAN, "invstd": at.RSTD, "weight": at.WEIGHT, "bias": at.BIAS}.items():
        layout.vector(name, position)
    layout.take(at.TABLES, at.PLANES * layout.pitch * 4)
    return operands.kernel(layout.step(_ELEMT, *tags))


def prepare_stats(problem: Problem) -> SteppedKernel:
    """The kernel of ``batch_norm_stats``."""
    operands = Operands(problem)
    if problem.views["input"].numel == 0:
        return operands.kernel(*fills(operands, math.nan, "mean", "invstd"))
    layout, tags = _laid(operands, {"input": at.INPUT})
    layout.desc[at.EPS] = _bits(problem.attributes["eps"])
    for name, position in {"mean": at.OUT_0, "invstd": at.OUT_1}.items():
        layout.vector(name, position)
    layout.take_partials()
    if layout.columns:
        layout.take(at.TABLES, int(layout.desc[at.SAMPLES] * layout.desc[at.CHUNKS]) * layout.pitch * 4)  # shifts
    return operands.kernel(layout.step(_STATS, *tags))


def prepare_reduce_backward(problem: Problem) -> SteppedKernel:
    """The kernel of ``batch_norm_reduce_backward``."""
    operands = Operands(problem)
    outputs = {"sum_dy": at.OUT_0, "sum_dy_xmu": at.OUT_1, "grad_weight": at.OUT_2, "grad_bias": at.OUT_3}
    if not any(name in operands for name in outputs):
        return operands.kernel()
    layout, tags = _laid(operands, {"grad_out": at.GRAD_OUT, "input": at.INPUT})
    for name, position in {"mean": at.MEAN, "invstd": at.RSTD, **outputs}.items():
        layout.vector(name, position)
    layout.take_partials()
    layout.take(at.TABLES, 3 * layout.pitch * 4)
    return operands.kernel(layout.step(_REDUCE_BACKWARD, *tags))


def prepare_gather_stats(problem: Problem) -> SteppedKernel:
    """The kernel of ``batch_norm_gather_stats_with_counts``."""
    operands, views = Operands(problem), problem.views
    ranks, channels = views["mean"].shape
    desc = np.zeros(gather.DESC_SIZE, np.int64)
    desc[[gather.RANKS, gather.CHANNELS]] = ranks, channels
    desc[[gather.MOMENTUM, gather.EPS]] = [_bits(problem.attributes[name]) for name in ("momentum", "eps")]
    places: list[tuple[int, Place]] = [(gather.RESULTS, operands.workspace.take(4 * channels * 8))]
    for name, position in {"mean": gather.MEAN, "invstd": gather.INVSTD}.items():
        desc[position + 1 : position + 4] = *views[name].strides, CODES[views[name].dtype]
        places.append((position, operands.place(name)))
    vectors = {"counts": gather.COUNTS, "running_mean": gather.RUNNING_MEAN, "running_var": gather.RUNNING_VAR}
    for name, position in {**vectors, "mean_all": gather.MEAN_ALL, "invstd_all": gather.INVSTD_ALL}.items():
        if name in operands:
            stride = operands.laid_out(name, single_stride)
            desc[[position + 1, position + 2]] = stride, CODES[views[name].dtype]
            places.append((position, operands.place(name)))
    return operands.kernel(Step(_GATHER, desc, tuple(places)))


def _take_rows_together(layout: Layout) -> None:
    """Several whole rows to a chunk: the ends of their sums are then made together."""
    _, channels, places = layout.sizes
    if 0 < places <= layout.desc[at.CHUNK]:
        at_once = max(1, min(channels, _TOGETHER // places))
        layout.desc[at.CHANNELS_AT_ONCE] = at_once
        layout.desc[at.GRAIN] = max(1, 4 * _TOGETHER // (places * at_once))


def _bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))


def _laid(operands: Operands, tensors: dict[str, int]) -> tuple[Layout, tuple[Any, Any]]:
    """The layout of BatchNorm's data with its records, and the kernel's tags."""
    shape = operands.view("input").shape
    layout = Layout(operands, (shape[0], shape[1], math.prod(shape[2:])), tensors)
    dtypes = {operands.view(name).dtype for name in tensors}
    mixed = len(dtypes) > 1
    layout.lay(any_strides=mixed)
    if mixed:
        layout.columns = False
    layout.merge_samples()
    layout.describe(groups=1)
    layout.desc[[at.STAT_SAMPLE, at.STAT_CHANNEL]] = 0, 1
    if not layout.columns:
        _take_rows_together(layout)
    layout.take(at.RECORDS, layout.pitch * 16)
    kind = F32 if mixed else TAGS[dtypes.pop()]
    return layout, (kind, MIXED if mixed else COLUMNS if layout.columns else ROWS)
