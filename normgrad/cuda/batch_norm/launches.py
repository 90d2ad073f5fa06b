"""The launches of BatchNorm's steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from normgrad.contract.plan import Problem
from normgrad.contract.view import Shape
from normgrad.cuda.batch_norm import elementwise_kernels as kernels
from normgrad.cuda.batch_norm import reduce_backward_kernels as sums
from normgrad.cuda.batch_norm import stats_kernels as moments_kernels
from normgrad.cuda.batch_norm.tiles import (
    StreamTile,
    SumsTile,
    channels_within,
    entries,
    even_share,
    load,
    stream_tile,
    sums_tile,
)
from normgrad.cuda.chip import VECTOR_ACCESS, Chip, blocks, power_of_two
from normgrad.cuda.device.clusters import LARGEST
from normgrad.cuda.launch import FLOAT64, Options, Scratch, Step, float64_bits
from normgrad.cuda.steps import Operand, Steps, begin_with_vectors

_LARGEST_VECTOR = 16  # elements
_FINISH_TILE = 2048
_FINISH_WARPS = 8
_GATHER = {"ROWS": 16, "CHANNELS": 16}


def _sizes(problem: Problem) -> Shape:
    shape = problem.views["input"].shape
    return shape[0], shape[1], math.prod(shape[2:])


def _merged(sizes: Shape, operands: list[Operand]) -> tuple[Shape, list[Operand]]:
    """Samples and places as one dimension, where they lie so in every tensor."""
    N, C, P = sizes
    if P > 1 and any(sample != P * place for sample, _, place in (operand.strides for operand in operands)):
        return sizes, operands

    def merge(strides: Shape) -> Shape:
        sample, channel, place = strides
        return 0, channel, place if P > 1 else sample

    return (1, C, N * P), [replace(operand, strides=merge(operand.strides)) for operand in operands]


def _layout(steps: Steps, sizes: Shape, names: tuple[str, ...], output: str | None) -> tuple[Shape, list[Operand]]:
    operands = [steps.data(name, sizes) for name in names]
    if output is not None:
        operands.append(steps.output(output, sizes))
    return _merged(sizes, operands)


def _places_adjacent(sizes: Shape, operands: list[Operand]) -> bool:
    _, channel, place = operands[0].strides
    return sizes[2] > 1 and (abs(place) <= abs(channel) or sizes[1] == 1)


def _flattened(sizes: Shape, operands: list[Operand]) -> tuple[Shape, list[Operand]]:
    """The numbers of a sample in place of channels, and samples in that of places."""
    N, C, P = sizes
    return (1, C * P, N), [replace(operand, strides=(0, 1, operand.strides[0])) for operand in operands]


def _in_a_row(sizes: Shape, operands: list[Operand]) -> bool:
    """Whether the numbers of a sample lie side by side, channel by channel."""
    _, C, P = sizes
    return P > 1 and C * P < 2**29 and all(operand.strides[1:] == (P, 1) for operand in operands)


def _vector(sizes: Shape, operands: list[Operand]) -> int:
    """What up to 16 divides the places, or channels, that lie side by side, and the strides of all else."""
    axis = 2 if _places_adjacent(sizes, operands) else 1
    strides = [operand.strides for operand in operands]
    if any(found[axis] != 1 for found in strides):
        return 1
    others = (stride for found in strides for place, stride in enumerate(found) if place != axis)
    return math.gcd(_LARGEST_VECTOR, sizes[axis], *others)


def _access(sizes: Shape, operands: list[Operand], itemsize: int) -> int:
    """How many bytes an access may take of numbers that lie side by side."""
    return min(VECTOR_ACCESS, itemsize * _vector(sizes, operands)) if begin_with_vectors(operands) else itemsize


def _accesses(sizes: Shape, operands: list[Operand], itemsize: int) -> tuple[int, int]:
    """That of a tile as it is, and of one that goes over several channels: 0 where it cannot."""
    flat = _access(*_flattened(sizes, operands), itemsize) if _in_a_row(sizes, operands) else 0
    return _access(sizes, operands, itemsize), flat


def _constants(sizes: Shape, operands: list[Operand], tile: StreamTile | SumsTile) -> dict[str, Any]:
    """What every kernel is told of a tile; sizes and operands are flattened where it has a stretch."""
    N, C, P = sizes
    stretch = tile.stretch or tile.channels
    strides = [operand.strides for operand in operands]
    reach = max(tile.places * abs(place) + tile.channels * abs(channel) for _, channel, place in strides)
    return {
        "ROWS": tile.rows,
        "PLACES": tile.places,
        "CHANNELS": tile.channels,
        "STRETCH": stretch,
        "ALONE": N == 1,
        "WHOLE": tile.places >= P,
        "MASKED": (P % tile.places != 0, C % stretch != 0 or stretch != tile.channels),
        "WIDE": max(reach, 2 * N * blocks(P, tile.places)) >= 2**31,
        "VECTOR": math.gcd(_vector(sizes, operands), _LARGEST_VECTOR if _places_adjacent(sizes, operands) else stretch),
    }


def _strides_of(operands: list[Operand]) -> list[Shape]:
    return [operand.strides for operand in operands]


def _steps_of(vectors: list[Operand]) -> list[int]:
    return [vector.strides[0] for vector in vectors]


def _finish(parts: int) -> dict[str, int]:
    """The tile for the sums over so many parts of a channel: few channels a program where there are many."""
    rows = min(power_of_two(max(parts, 1)), _FINISH_TILE // 2)
    return {"ROWS": rows, "CHANNELS": min(_FINISH_TILE // rows, 16), "ONCE": parts <= rows}


def _elementwise(
    steps: Steps, sizes: Shape, operands: list[Operand], chip: Chip
) -> tuple[list[Any], tuple[int, int, int], dict[str, Any], Options]:
    """Sizes and strides, grid, constants and options of a kernel that takes a tile a program."""
    N, C, P = sizes
    accesses = _accesses(sizes, operands, steps.itemsize)
    places_adjacent = _places_adjacent(sizes, operands)
    # Float64 numbers of three tensors take many registers.
    nbytes = 32 if len(operands) == 3 and steps.itemsize == 4 and not places_adjacent else 64
    tile = stream_tile(N, C, P, steps.itemsize, chip, places_adjacent, *accesses, nbytes)
    run = 1
    if tile.stretch:
        run = P
        sizes, operands = _flattened(sizes, operands)
        N, C, P = sizes
    grid = blocks(N * blocks(P, tile.places), tile.rows) * blocks(C, tile.stretch or tile.channels), 1, 1
    layout = [*sizes, run, *_strides_of(operands)]
    return layout, grid, _constants(sizes, operands, tile), Options(tile.warps)


def _folds(tile: SumsTile, width: int) -> tuple[int, ...]:
    """How often a thread's numbers are added up two and two: of rows, of places far apart, and of neighbours.

    Of neighbours it has ``width`` at a time: places, or channels where those lie side by side.
    """
    numbers = max(tile.rows * tile.places * tile.channels // (32 * tile.warps), 1)
    width = min(width, numbers)
    vectors = numbers // width
    near = min(width, tile.places) if tile.channels == 1 else 1
    fold = min(tile.fold // near, vectors)
    rows = min(tile.rows, fold)
    places = min(tile.places // near, fold // rows)
    return tuple(count.bit_length() - 1 for count in (rows, places, near))


@dataclass(frozen=True)
class _Parts:
    """How the rows of a channel are shared out to programs that sum them up."""

    count: int  # of a channel, that another launch takes together; 1 where there is none
    sizes: Shape
    strides: list[Shape]
    cut: list[int]  # rows of a part, numbers of a channel side by side, and entries of a part for a channel
    grid: tuple[int, int, int]
    constants: dict[str, Any]
    options: Options

    @classmethod
    def of(cls, steps: Steps, sizes: Shape, operands: list[Operand], chip: Chip) -> _Parts:
        """As many parts as run side by side."""
        N, C, P = sizes
        accesses = _accesses(sizes, operands, steps.itemsize)
        tile = sums_tile(N, C, P, steps.itemsize, chip, _places_adjacent(sizes, operands), *accesses)
        run, over, runs = 1, 1, (tile.channels, 1)
        if tile.stretch:
            run, over = P, entries(P, tile.stretch)
            runs = power_of_two(channels_within(P, tile.stretch)), power_of_two(min(P, tile.stretch))
            sizes, operands = _flattened(sizes, operands)
            N, C, P = sizes
        total = N * blocks(P, tile.places)
        channel_blocks = blocks(C, tile.stretch or tile.channels)
        tiles = blocks(total, tile.rows)
        if tile.cluster:
            share = blocks(tiles, LARGEST)
        else:
            share = even_share(channel_blocks, tiles, tile.resident, chip.multiprocessors, *load(tile, steps.itemsize))
        rows = share * tile.rows
        count = blocks(total, rows)
        cluster = count if tile.cluster or count == 1 else 0
        constants = _constants(sizes, operands, tile)
        side_by_side = tile.channels > 1 or _places_adjacent(sizes, operands)
        width = accesses[bool(tile.stretch)] // steps.itemsize if side_by_side else 1
        constants |= {"RUNS": runs, "FOLDS": _folds(tile, width), "STAGES": tile.stages, "CLUSTER": cluster}
        if rows == tile.rows:  # a program has one tile
            masked_places, masked_channels = constants["MASKED"]
            constants |= {"MASKED": (masked_places or total % rows != 0, masked_channels), "STAGES": 0}
        options = Options(tile.warps, tile.resident, cluster=max(cluster, 1))
        together, grid = (1 if cluster else count) * over, (count * channel_blocks, 1, 1)
        return cls(together, sizes, _strides_of(operands), [rows, run, over], grid, constants, options)

    def scratch(self, steps: Steps, numbers: int, C: int) -> Scratch | None:
        """Memory for so many numbers of every part of a channel, where another launch takes them together."""
        return steps.scratch(numbers * self.count * C, FLOAT64) if self.count > 1 else None


def elemt_backward(problem: Problem, chip: Chip) -> Steps:
    """The gradient of the input, element by element."""
    steps = Steps(problem, ["grad_input"])
    if problem.views["input"].numel == 0:
        return steps
    sizes, operands = _layout(steps, _sizes(problem), ("grad_out", "input"), "grad_input")
    names = ("mean", "invstd", "weight", "sum_dy", "sum_dy_xmu", "counter")
    ranks = problem.views["counter"].numel
    vectors = [steps.vector(name) for name in names]
    layout, grid, constants, options = _elementwise(steps, sizes, operands, chip)
    arguments = [operands[0].pointer, operands[1].pointer, *vectors, operands[2].pointer, ranks, *layout]
    constants["RANKS"] = min(power_of_two(ranks), 1024)
    steps.add(Step(kernels.batch_norm_elemt_backward, grid, arguments, constants, options))
    return steps


def elemt(problem: Problem, chip: Chip) -> Steps:
    """The normalised data, element by element."""
    steps = Steps(problem, ["output"])
    if problem.views["input"].numel == 0:
        return steps
    sizes, operands = _layout(steps, _sizes(problem), ("input",), "output")
    vectors = [steps.vector(name) for name in ("weight", "bias", "mean", "invstd")]
    layout, grid, constants, options = _elementwise(steps, sizes, operands, chip)
    arguments = [operands[0].pointer, *vectors, operands[1].pointer, *layout]
    steps.add(Step(kernels.batch_norm_elemt, grid, arguments, constants, options))
    return steps


def reduce_backward(problem: Problem, chip: Chip) -> Steps:
    """The sums of every part, then those over the parts."""
    names = ("sum_dy", "sum_dy_xmu", "grad_weight", "grad_bias")
    steps = Steps(problem, names)
    C = problem.views["input"].shape[1]
    wanted = [steps.output(name, (C,)) for name in names]
    if all(output.pointer is None for output in wanted):
        return steps
    outputs = [steps.vector("invstd"), *(output.pointer for output in wanted), tuple(_steps_of(wanted))]
    if problem.views["input"].numel == 0:
        _add_finish(steps, sums.batch_norm_finish_sums, [steps.scratch(1, FLOAT64), *outputs], 0, C)
        return steps
    sizes, operands = _layout(steps, _sizes(problem), ("grad_out", "input"), None)
    parts = _Parts.of(steps, sizes, operands, chip)
    partial = parts.scratch(steps, 2, C)
    inputs = [operands[0].pointer, operands[1].pointer, steps.vector("mean")]
    given = [None, *outputs] if partial is None else [partial, *[None] * len(outputs)]
    arguments = [*inputs, *given, *parts.sizes, *parts.cut, *parts.strides]
    steps.add(Step(sums.batch_norm_part_sums, parts.grid, arguments, parts.constants, parts.options))
    if partial is not None:
        _add_finish(steps, sums.batch_norm_finish_sums, [partial, *outputs], parts.count, C)
    return steps


def stats(problem: Problem, chip: Chip) -> Steps:
    """The moments of every part, then those of the channels."""
    names = ("mean", "invstd")
    steps = Steps(problem, names)
    C = problem.views["input"].shape[1]
    wanted = [steps.output(name, (C,)) for name in names]
    eps_bits = float64_bits(problem.attributes["eps"])
    outputs = [*(output.pointer for output in wanted), tuple(_steps_of(wanted)), eps_bits]
    if problem.views["input"].numel == 0:
        _add_finish(steps, moments_kernels.batch_norm_finish_moments, [steps.scratch(1, FLOAT64), *outputs], 0, C)
        return steps
    sizes, operands = _layout(steps, _sizes(problem), ("input",), None)
    parts = _Parts.of(steps, sizes, operands, chip)
    moments = parts.scratch(steps, 3, C)
    given = [None, *outputs] if moments is None else [moments, *[None] * len(outputs)]
    arguments = [operands[0].pointer, *given, *parts.sizes, *parts.cut, *parts.strides]
    steps.add(Step(moments_kernels.batch_norm_part_moments, parts.grid, arguments, parts.constants, parts.options))
    if moments is not None:
        _add_finish(steps, moments_kernels.batch_norm_finish_moments, [moments, *outputs], parts.count, C)
    return steps


def _add_finish(steps: Steps, kernel: Any, arguments: list[Any], parts: int, C: int) -> None:
    """Add the launch that takes the parts of all channels together."""
    finish = _finish(parts)
    options = Options(_FINISH_WARPS, follows=True)
    steps.add(Step(kernel, (blocks(C, finish["CHANNELS"]), 1, 1), [*arguments, parts, C], finish, options))


def gather(problem: Problem, chip: Chip) -> Steps:
    """The statistics of the whole batch."""
    moving = ("running_mean", "running_var")
    steps = Steps(problem, ["mean_all", "invstd_all", *moving])
    ranks, C = problem.views["mean"].shape
    mean, invstd, counts = (steps.vector(name) for name in ("mean", "invstd", "counts"))
    running = [steps.output(name, (C,)) for name in moving]
    outputs = [steps.output(name, (C,)) for name in ("mean_all", "invstd_all")]
    moved = (operand.pointer for operand in running)
    tensors = [mean, invstd, *moved, counts, *(output.pointer for output in outputs)]
    momentum, eps = (float64_bits(problem.attributes[name]) for name in ("momentum", "eps"))
    steps.add(
        Step(
            kernels.batch_norm_gather,
            (blocks(C, _GATHER["CHANNELS"]), 1, 1),
            [*tensors, ranks, C, momentum, eps, *_steps_of(running + outputs)],
            _GATHER,
        )
    )
    return steps
