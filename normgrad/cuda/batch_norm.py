"""The launches of BatchNorm's steps."""

from __future__ import annotations

import math
from typing import Any

from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.plan import Problem
from normgrad.contract.view import Shape
from normgrad.cuda.configurations import Chip, StreamTile, blocks, power_of_two, stream_tile
from normgrad.cuda.kernels import batch_norm as kernels
from normgrad.cuda.launch import FLOAT64, Options, Step, float64_bits
from normgrad.cuda.problem import Operand, Steps

_FINISH_TILE = 2048
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

    return (1, C, N * P), [Operand(operand.pointer, merge(operand.strides)) for operand in operands]


def _layout(steps: Steps, sizes: Shape, names: tuple[str, ...], output: str | None) -> tuple[Shape, list[Operand]]:
    operands = [steps.data(name, sizes) for name in names]
    if output is not None:
        operands.append(steps.output(output, sizes))
    return _merged(sizes, operands)


def _tile(sizes: Shape, operands: list[Operand], chip: Chip) -> StreamTile:
    N, C, P = sizes
    _, channel, place = operands[0].strides
    return stream_tile(N, C, P, chip, places_adjacent=P > 1 and (abs(place) <= abs(channel) or C == 1))


def _grid(sizes: Shape, tile: StreamTile) -> tuple[int, int, int]:
    N, C, P = sizes
    return blocks(N, tile.samples) * blocks(P, tile.places) * blocks(C, tile.channels), 1, 1


def _constants(tile: StreamTile) -> dict[str, Any]:
    return {"SAMPLES": tile.samples, "PLACES": tile.places, "CHANNELS": tile.channels}


def _strides(operands: list[Operand]) -> list[int]:
    return [stride for operand in operands for stride in operand.strides]


def _finish(tiles: int) -> dict[str, int]:
    """The tile for the sums over so many tiles of a channel: few channels a program where there are many."""
    rows = min(power_of_two(max(tiles, 1)), _FINISH_TILE // 2)
    return {"ROWS": rows, "CHANNELS": min(_FINISH_TILE // rows, 16)}


def elemt_backward(problem: Problem, chip: Chip) -> Steps:
    """The gradient of the input, element by element."""
    steps = Steps(problem, ["grad_input"])
    if problem.views["input"].numel == 0:
        return steps
    sizes, operands = _layout(steps, _sizes(problem), ("grad_out", "input"), "grad_input")
    tile = _tile(sizes, operands, chip)
    names = ("mean", "invstd", "weight", "sum_dy", "sum_dy_xmu", "counter")
    ranks = problem.views["counter"].numel
    vectors = [steps.vector(name) for name in names]
    arguments = [operands[0].pointer, operands[1].pointer, *vectors, operands[2].pointer]
    steps.add(
        Step(
            kernels.batch_norm_elemt_backward,
            _grid(sizes, tile),
            [*arguments, *sizes, ranks, *_strides(operands)],
            {**_constants(tile), "RANKS": min(power_of_two(ranks), 1024)},
            Options(tile.warps),
        )
    )
    return steps


def elemt(problem: Problem, chip: Chip) -> Steps:
    """The normalised data, element by element."""
    steps = Steps(problem, ["output"])
    if problem.views["input"].numel == 0:
        return steps
    sizes, operands = _layout(steps, _sizes(problem), ("input",), "output")
    tile = _tile(sizes, operands, chip)
    vectors = [steps.vector(name) for name in ("weight", "bias", "mean", "invstd")]
    arguments = [operands[0].pointer, *vectors, operands[1].pointer, *sizes, *_strides(operands)]
    steps.add(Step(kernels.batch_norm_elemt, _grid(sizes, tile), arguments, _constants(tile), Options(tile.warps)))
    return steps


def reduce_backward(problem: Problem, chip: Chip) -> Steps:
    """The sums of every tile, then those over the tiles."""
    names = ("sum_dy", "sum_dy_xmu", "grad_weight", "grad_bias")
    steps = Steps(problem, [])
    C = problem.views["input"].shape[1]
    outputs = [steps.output(name, (C,)) for name in names]
    if all(output.pointer is None for output in outputs):
        return steps
    tiles = 0
    partial = steps.scratch(1, FLOAT32)
    if problem.views["input"].numel:
        sizes, operands = _layout(steps, _sizes(problem), ("grad_out", "input"), None)
        tile = _tile(sizes, operands, chip)
        tiles = blocks(sizes[0], tile.samples) * blocks(sizes[2], tile.places)
        partial = steps.scratch(2 * tiles * C, FLOAT32)
        arguments = [operands[0].pointer, operands[1].pointer, steps.vector("mean"), partial, *sizes]
        steps.add(
            Step(
                kernels.batch_norm_tile_sums,
                _grid(sizes, tile),
                [*arguments, *_strides(operands)],
                _constants(tile),
                Options(tile.warps),
            )
        )
    finish = _finish(tiles)
    pointers = [output.pointer for output in outputs]
    invstd = steps.copy_if_written("invstd", [name for name in names if name in problem.views])
    steps.add(
        Step(
            kernels.batch_norm_finish_sums,
            (blocks(C, finish["CHANNELS"]), 1, 1),
            [partial, invstd, *pointers, tiles, C, *_strides(outputs)],
            finish,
        )
    )
    return steps


def stats(problem: Problem, chip: Chip) -> Steps:
    """The moments of every tile, then those of the channels."""
    steps = Steps(problem, [])
    sizes, operands = _layout(steps, _sizes(problem), ("input",), None)
    N, C, P = sizes
    tile = _tile(sizes, operands, chip)
    tiles = blocks(N, tile.samples) * blocks(P, tile.places)
    moments = steps.scratch(max(2 * tiles * C, 1), FLOAT64)
    outputs = [steps.output(name, (C,)) for name in ("mean", "invstd")]
    if tiles:
        steps.add(
            Step(
                kernels.batch_norm_tile_moments,
                _grid(sizes, tile),
                [operands[0].pointer, moments, *sizes, *_strides(operands)],
                _constants(tile),
                Options(tile.warps),
            )
        )
    finish = _finish(tiles)
    arguments = [moments, *(output.pointer for output in outputs), tiles, *sizes]
    steps.add(
        Step(
            kernels.batch_norm_finish_moments,
            (blocks(C, finish["CHANNELS"]), 1, 1),
            [*arguments, float64_bits(problem.attributes["eps"]), *_strides(outputs)],
            {"SAMPLES": tile.samples, "PLACES": tile.places, **finish},
        )
    )
    return steps


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
            [*tensors, ranks, C, momentum, eps, *_strides(running + outputs)],
            _GATHER,
        )
    )
    return steps
