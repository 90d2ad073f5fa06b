"""The launches of BatchNorm's five operators: the backend calls one function for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from normgrad.contract.plan import Problem
from normgrad.contract.view import Shape
from normgrad.cuda.batch_norm import reduce_kernels, tiles
from normgrad.cuda.batch_norm.elementwise_kernels import batch_norm_elemt, batch_norm_elemt_backward
from normgrad.cuda.chip import VECTOR_BYTES, Chip, cdiv, next_power_of_2
from normgrad.cuda.launch import FLOAT64, Argument, Options, Step, float64_bits
from normgrad.cuda.operands import Operand, all_vector_aligned, present
from normgrad.cuda.steps import Steps

_MAX_VECTOR = 16  # elements
_COMBINE_TILE = 2048  # parts × channels of a program of the combine kernels
_COMBINE_WARPS = 8
_GATHER_TILE = {"ROWS": 16, "CHANNELS": 16}


@dataclass(frozen=True)
class Data:
    """The data of a call as a kernel sees it: sizes [N, columns, positions], and operands with strides over these."""

    sizes: tuple[int, int, int]
    operands: list[Operand]

    @classmethod
    def of(cls, problem: Problem, steps: Steps, inputs: Sequence[str], output: str | None = None) -> Data:
        """Return the data with samples and positions merged into one dimension, where they are in every tensor."""
        N, C, *spatial = problem.views["input"].shape
        HxW = math.prod(spatial)
        operands = [steps.strided_input(name, (N, C, HxW)) for name in inputs]
        if output is not None:
            operands.append(steps.output(output, (N, C, HxW)))
        if HxW > 1 and any(operand.strides[0] != HxW * operand.strides[2] for operand in operands):
            return cls((N, C, HxW), operands)

        def merge(strides: Shape) -> Shape:
            sample, channel, position = strides
            return 0, channel, position if HxW > 1 else sample

        return cls((1, C, N * HxW), [replace(operand, strides=merge(operand.strides)) for operand in operands])

    def as_segments(self) -> Data:
        """Return the data for segment tiles: the elements of a sample as columns, the samples as positions."""
        N, C, HxW = self.sizes
        operands = [replace(operand, strides=(0, 1, operand.strides[0])) for operand in self.operands]
        return Data((1, C * HxW, N), operands)

    @property
    def pointers(self) -> list[Argument]:
        return [operand.pointer for operand in self.operands]

    @property
    def strides(self) -> list[Shape]:
        return [operand.strides for operand in self.operands]

    @property
    def contiguous_positions(self) -> bool:
        """The positions of a channel are closer together than the channels of a position."""
        _, channel, position = self.operands[0].strides
        return self.sizes[2] > 1 and (abs(position) <= abs(channel) or self.sizes[1] == 1)

    @property
    def vector(self) -> int:
        """Elements, up to 16, that divide the contiguous positions or columns and all other strides."""
        axis = 2 if self.contiguous_positions else 1
        if any(strides[axis] != 1 for strides in self.strides):
            return 1
        others = (stride for strides in self.strides for dimension, stride in enumerate(strides) if dimension != axis)
        return math.gcd(_MAX_VECTOR, self.sizes[axis], *others)

    def load_bytes(self, itemsize: int) -> int:
        """Return the bytes of the widest load of contiguous elements."""
        if not all_vector_aligned(self.operands):
            return itemsize
        return min(VECTOR_BYTES, itemsize * self.vector)

    def layout(self, itemsize: int) -> tiles.DataLayout:
        """Return what a tile is chosen by."""
        _, C, HxW = self.sizes
        nbytes, segment_nbytes = self.load_bytes(itemsize), 0
        contiguous_samples = all(strides[1:] == (HxW, 1) for strides in self.strides)
        if contiguous_samples and HxW > 1 and C * HxW < 2**29:
            segment_nbytes = self.as_segments().load_bytes(itemsize)
        return tiles.DataLayout(self.sizes, itemsize, self.contiguous_positions, nbytes, segment_nbytes)

    def tile_spec(self, tile: tiles.ElementwiseTile | tiles.ReduceTile) -> tiles.TileSpec:
        """Describe a tile of this data, which is ``as_segments`` for a segment tile."""
        N, columns, positions = self.sizes
        segment = tile.segment or tile.columns
        extent = max(
            tile.positions * abs(position) + tile.columns * abs(column) for _, column, position in self.strides
        )
        return tiles.TileSpec(
            rows=tile.rows,
            positions=tile.positions,
            columns=tile.columns,
            segment=segment,
            one_sample=N == 1,
            one_position_block=tile.positions >= positions,
            mask_positions=positions % tile.positions != 0,
            mask_columns=columns % segment != 0 or segment != tile.columns,
            offset64=max(extent, 2 * N * cdiv(positions, tile.positions)) >= 2**31,
            vector=math.gcd(self.vector, _MAX_VECTOR if self.contiguous_positions else segment),
        )


def _strides_of(vectors: Sequence[Operand]) -> list[int]:
    return [vector.strides[0] for vector in vectors]


def _add_elementwise(
    steps: Steps, chip: Chip, data: Data, kernel: Any, arguments: Sequence[Argument], **constants: Any
) -> None:
    """Add the launch of an elementwise kernel, which takes a tile a program; ``arguments``: those before the sizes."""
    layout = data.layout(steps.itemsize)
    # Float64 elements of three tensors take many registers: with 64 of them a thread, eight CTAs fit on an SM.
    three_float64 = len(data.operands) == 3 and steps.itemsize == 4 and not layout.contiguous_positions
    thread_bytes, ctas_per_sm = (32, 8) if three_float64 else (64, 0)
    tile = tiles.elementwise_tile(layout, chip, thread_bytes)
    channel_length = 1
    if tile.segment:
        channel_length = data.sizes[2]
        data = data.as_segments()
    N, columns, positions = data.sizes
    rows = cdiv(N * cdiv(positions, tile.positions), tile.rows)
    grid = rows * cdiv(columns, tile.segment or tile.columns), 1, 1
    arguments = [*arguments, *data.sizes, channel_length, *data.strides]
    constants["TILE"] = data.tile_spec(tile)
    steps.add(Step(kernel, grid, arguments, constants, Options(tile.warps, ctas_per_sm)))


def _halvings(tile: tiles.ReduceTile, width: int) -> tuple[int, int, int]:
    """Return how often a thread adds up its elements two and two: along rows, far positions, adjacent positions.

    A thread holds ``width`` adjacent elements at a time: positions, or columns where those are contiguous.
    """
    elements = max(tile.rows * tile.positions * tile.columns // (32 * tile.warps), 1)
    width = min(width, elements)
    vectors = elements // width
    adjacent = min(width, tile.positions) if tile.columns == 1 else 1
    others = min(tile.pairwise // adjacent, vectors)
    rows = min(tile.rows, others)
    positions = min(tile.positions // adjacent, others // rows)
    return rows.bit_length() - 1, positions.bit_length() - 1, adjacent.bit_length() - 1


class _ReduceWork:
    """How the rows of a channel are shared out to CTAs that reduce them, and the launch that does so.

    There are as many parts as can be resident at once.
    """

    def __init__(self, steps: Steps, data: Data, chip: Chip) -> None:
        layout = data.layout(steps.itemsize)
        tile = tiles.reduce_tile(layout, chip)
        channel_length, blocks, channels, channel_elements = 1, 1, tile.columns, 1
        if tile.segment:
            HxW = channel_length = data.sizes[2]
            blocks = tiles.blocks_per_channel(HxW, tile.segment)
            channels = next_power_of_2(tiles.channels_per_segment(HxW, tile.segment))
            channel_elements = next_power_of_2(min(HxW, tile.segment))
            data = data.as_segments()
        N, columns, positions = data.sizes
        total_rows = N * cdiv(positions, tile.positions)
        column_blocks = cdiv(columns, tile.segment or tile.columns)
        work = tiles.Workload.of(tile, column_blocks, cdiv(total_rows, tile.rows), steps.itemsize, chip)
        rows_per_part = tile.rows * tiles.tiles_per_cta(work)
        parts = cdiv(total_rows, rows_per_part)
        spec, stages = data.tile_spec(tile), tile.stages
        if rows_per_part == tile.rows:  # a CTA has one tile, whose rows are masked with its positions
            spec = replace(spec, mask_positions=spec.mask_positions or total_rows % rows_per_part != 0)
            stages = 0
        contiguous = tile.columns > 1 or data.contiguous_positions
        load_bytes = layout.segment_nbytes if tile.segment else layout.nbytes
        halvings = _halvings(tile, load_bytes // steps.itemsize if contiguous else 1)
        reduce = tiles.ReduceSpec(channels, channel_elements, halvings, stages, parts == 1)
        self.entries = parts * blocks  # partial sums of a channel that a second launch combines; 1 where there is none
        self.grid = parts * column_blocks, 1, 1
        # Those after the tensors: sizes, rows of a part, columns of a channel, blocks of a channel, strides.
        self.arguments: list[Argument] = [*data.sizes, rows_per_part, channel_length, blocks, *data.strides]
        self.constants = {"TILE": spec, "REDUCE": reduce}
        self.options = Options(tile.warps, tile.ctas_per_sm)


def _add_combine(steps: Steps, kernel: Any, arguments: Sequence[Argument], entries: int, C: int) -> None:
    """Add the launch that combines the entries of all channels: few channels a program where entries are many."""
    rows = min(next_power_of_2(max(entries, 1)), _COMBINE_TILE // 2)
    channels = min(_COMBINE_TILE // rows, 16)
    constants = {"ROWS": rows, "CHANNELS": channels, "ONE_TILE": entries <= rows}
    options = Options(_COMBINE_WARPS, pdl=True)
    steps.add(Step(kernel, (cdiv(C, channels), 1, 1), [*arguments, entries, C], constants, options))


def _add_reduction(
    steps: Steps,
    problem: Problem,
    chip: Chip,
    kernels: tuple[Any, Any],
    inputs: Sequence[str],
    vectors: Sequence[str],
    outputs: Sequence[Argument],
    values: int,
) -> None:
    """Add one launch that reduces the inputs, and one that combines the parts if there are several, or no data.

    ``kernels`` for the two; ``vectors``: what the first one takes beside the inputs; ``outputs``: arguments of the last
    launch; ``values``: float64 sums of a part and channel.
    """
    reduce, combine = kernels
    C = problem.views["input"].shape[1]
    if problem.views["input"].numel == 0:
        _add_combine(steps, combine, [steps.scratch(1, FLOAT64), *outputs], 0, C)
        return
    data = Data.of(problem, steps, inputs)
    work = _ReduceWork(steps, data, chip)
    partial = steps.scratch(values * work.entries * C, FLOAT64) if work.entries > 1 else None
    results = outputs if partial is None else [None] * len(outputs)
    tensors = [*data.pointers, *map(steps.contiguous_input, vectors), partial]
    steps.add(Step(reduce, work.grid, [*tensors, *results, *work.arguments], work.constants, work.options))
    if partial is not None:
        _add_combine(steps, combine, [partial, *outputs], work.entries, C)


def elemt_backward(problem: Problem, chip: Chip) -> Steps:
    """Plan batch_norm_elemt_backward: one elementwise launch."""
    steps = Steps(problem, ["grad_input"])
    if problem.views["input"].numel:
        data = Data.of(problem, steps, ("grad_out", "input"), "grad_input")
        ranks = problem.views["counter"].numel
        names = ("mean", "invstd", "weight", "sum_dy", "sum_dy_xmu", "counter")
        grad_out, x, grad_input = data.pointers
        arguments = [grad_out, x, *map(steps.contiguous_input, names), grad_input, ranks]
        ranks_at_once = min(next_power_of_2(ranks), 1024)
        _add_elementwise(steps, chip, data, batch_norm_elemt_backward, arguments, RANKS=ranks_at_once)
    return steps


def elemt(problem: Problem, chip: Chip) -> Steps:
    """Plan batch_norm_elemt: one elementwise launch."""
    steps = Steps(problem, ["output"])
    if problem.views["input"].numel:
        data = Data.of(problem, steps, ("input",), "output")
        x, output = data.pointers
        parameters = map(steps.contiguous_input, ("weight", "bias", "mean", "invstd"))
        _add_elementwise(steps, chip, data, batch_norm_elemt, [x, *parameters, output])
    return steps


def reduce_backward(problem: Problem, chip: Chip) -> Steps:
    """Plan batch_norm_reduce_backward: one launch that reduces, and one that combines the parts if there are some."""
    names = ("sum_dy", "sum_dy_xmu", "grad_weight", "grad_bias")
    steps = Steps(problem, names)
    C = problem.views["input"].shape[1]
    wanted = [steps.output(name, (C,)) for name in names]
    requested = present(wanted)
    if problem.views["input"].numel == 0:  # zeros, whatever invstd is
        for first in range(0, len(requested), 2):
            steps.sum_partials(steps.scratch(1, FLOAT64), 0, C, requested[first : first + 2])
    elif requested:
        pointers = [output.pointer for output in wanted]
        outputs = [steps.contiguous_input("invstd"), *pointers, tuple(_strides_of(wanted))]
        kernels = reduce_kernels.batch_norm_reduce_backward, reduce_kernels.batch_norm_reduce_backward_combine
        _add_reduction(steps, problem, chip, kernels, ("grad_out", "input"), ("mean",), outputs, values=2)
    return steps


def stats(problem: Problem, chip: Chip) -> Steps:
    """Plan batch_norm_stats: one launch that reduces, and one that combines the parts if there are several."""
    names = ("mean", "invstd")
    steps = Steps(problem, names)
    wanted = [steps.output(name, problem.views["input"].shape[1:2]) for name in names]
    eps_bits = float64_bits(problem.attributes["eps"])
    outputs: list[Argument] = [*(output.pointer for output in wanted), tuple(_strides_of(wanted)), eps_bits]
    kernels = reduce_kernels.batch_norm_stats, reduce_kernels.batch_norm_stats_combine
    _add_reduction(steps, problem, chip, kernels, ("input",), (), outputs, values=3)
    return steps


def gather_stats(problem: Problem, chip: Chip) -> Steps:
    """Plan batch_norm_gather_stats_with_counts: one launch over the channels."""
    running_names = ("running_mean", "running_var")
    steps = Steps(problem, ["mean_all", "invstd_all", *running_names])
    ranks, C = problem.views["mean"].shape
    mean, invstd, counts = (steps.contiguous_input(name) for name in ("mean", "invstd", "counts"))
    running = [steps.output(name, (C,)) for name in running_names]
    outputs = [steps.output(name, (C,)) for name in ("mean_all", "invstd_all")]
    running_pointers = (operand.pointer for operand in running)
    tensors = [mean, invstd, *running_pointers, counts, *(output.pointer for output in outputs)]
    momentum, eps = (float64_bits(problem.attributes[name]) for name in ("momentum", "eps"))
    arguments = [*tensors, ranks, C, momentum, eps, *_strides_of([*running, *outputs])]
    grid = (cdiv(C, _GATHER_TILE["CHANNELS"]), 1, 1)
    steps.add(Step(reduce_kernels.batch_norm_gather_stats, grid, arguments, _GATHER_TILE))
    return steps
