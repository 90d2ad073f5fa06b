"""Valid calls of every operator, as hypothesis strategies: one recipe each, read off the contract's tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from support.case import Builder, Case
from support.dtypes import F16, F32, FLOATS, I32
from support.values import counts, data, scales


def _data(b: Builder, name: str, shape: tuple[int, ...], dtype: str) -> None:
    b.tensor(name, shape, dtype, data(b.rng, shape, dtype, b.style))


def _scales(b: Builder, name: str, shape: tuple[int, ...], dtype: str) -> None:
    b.tensor(name, shape, dtype, scales(b.rng, shape, b.style))


def _optional(b: Builder, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> str | None:
    """A tensor that may be left out, with one of the dtypes; which one it has."""
    dtype = b.one_of(None, *dtypes)
    if dtype is None:
        b.absent(name)
    else:
        _data(b, name, shape, dtype)
    return dtype


def _with_float32(dtype: str) -> tuple[str, ...]:
    return (dtype,) if dtype == F32 else (dtype, F32)


def _not_narrower(dtype: str) -> tuple[str, ...]:
    return (F32,) if dtype == F32 else FLOATS


def _mask(b: Builder) -> tuple[bool, bool, bool]:
    mask = b.one_of(*((x, y, z) for x in (True, False) for y in (True, False) for z in (True, False)))
    b.attribute("output_mask", mask)
    return mask


def _rows(b: Builder) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """An input's shape and the part of it that is normalised."""
    shape = b.shape(1, 8)
    return shape, shape[b.draw(st.integers(0, len(shape) - 1)) :]


def layer_norm_backward(b: Builder) -> None:
    shape, normalized = _rows(b)
    rows = math.prod(shape[: len(shape) - len(normalized)])
    dtype = b.one_of(*FLOATS)
    statistics_dtype = b.one_of(*_not_narrower(dtype))
    kept = (*shape[: len(shape) - len(normalized)], *(1 for _ in normalized))
    statistics = b.random.choice((kept, b.shape_with(rows, 1, 8)))
    _data(b, "grad_out", shape, dtype)
    _data(b, "input", shape, dtype)
    b.twin("input", "grad_out")
    b.attribute("normalized_shape", b.random.choice((list, tuple))(normalized))
    _data(b, "mean", statistics, statistics_dtype)
    _scales(b, "rstd", statistics, statistics_dtype)
    weight = _optional(b, "weight", normalized, _with_float32(dtype))
    _optional(b, "bias", normalized, (weight,) if weight else _with_float32(dtype))
    mask = _mask(b)
    b.output("grad_input", shape, (dtype,), wanted=mask[0])
    b.output("grad_weight", normalized, (weight or dtype,), wanted=mask[1])
    b.output("grad_bias", normalized, (weight or dtype,), wanted=mask[2])


def layer_norm(b: Builder) -> None:
    shape, normalized = _rows(b)
    outer = shape[: len(shape) - len(normalized)]
    dtype = b.one_of(*FLOATS)
    _data(b, "input", shape, dtype)
    b.attribute("normalized_shape", normalized)
    weight = _optional(b, "weight", normalized, _with_float32(dtype))
    _optional(b, "bias", normalized, (weight,) if weight else _with_float32(dtype))
    b.attribute("eps", b.one_of(1e-5, 1e-3, 1.0))
    b.output("output", shape, (dtype,))
    kept = (*outer, *(1 for _ in normalized))
    mean = b.output("mean", kept, _not_narrower(dtype))
    b.output("rstd", kept, (mean,) if mean else _not_narrower(dtype))


def _groups(b: Builder) -> tuple[int, int, int, int]:
    """N, C, HxW and group."""
    samples, group = b.draw(st.integers(0, 3)), b.draw(st.integers(1, 4))
    channels = group * b.random.choice((1, 1, 2, 3, 5, 0))
    positions = b.random.choice((1, 1, 2, 3, 7, 9, 0))
    for name, value in (("N", samples), ("C", channels), ("HxW", positions), ("group", group)):
        b.attribute(name, value)
    return samples, channels, positions, group


def group_norm_backward(b: Builder) -> None:
    samples, channels, positions, group = _groups(b)
    whole = samples * channels * positions
    dtype = b.one_of(*FLOATS)
    statistics_dtype = b.one_of(*_with_float32(dtype))
    shape = b.random.choice(((samples, channels, positions), b.shape_with(whole, 0, 8)))
    _data(b, "grad_out", b.random.choice((shape, b.shape_with(whole, 0, 8))), dtype)
    _data(b, "input", shape, dtype)
    b.twin("input", "grad_out")
    _data(b, "mean", b.shape_with(samples * group, 0, 8), statistics_dtype)
    _scales(b, "rstd", b.shape_with(samples * group, 0, 8), statistics_dtype)
    parameter = b.shape_with(channels, 0, 8)
    weight = _optional(b, "weight", parameter, tuple(dict.fromkeys((statistics_dtype, dtype))))
    if weight is None:
        parameter = (channels,)
    mask = _mask(b)
    b.output("grad_input", shape, (dtype,), wanted=mask[0])
    b.output("grad_weight", parameter, (weight or statistics_dtype,), wanted=mask[1])
    b.output("grad_bias", parameter, (weight or statistics_dtype,), wanted=mask[2])


def group_norm(b: Builder) -> None:
    samples, channels, positions, group = _groups(b)
    whole = samples * channels * positions
    dtype = b.one_of(*FLOATS)
    shape = b.random.choice(((samples, channels, positions), b.shape_with(whole, 0, 8)))
    _data(b, "input", shape, dtype)
    weight = _optional(b, "weight", b.shape_with(channels, 0, 8), _with_float32(dtype))
    _optional(b, "bias", b.shape_with(channels, 0, 8), (weight,) if weight else _with_float32(dtype))
    b.attribute("eps", b.one_of(1e-5, 1e-3, 1.0))
    b.output("output", shape, (dtype,))
    statistics = (F32,) if dtype == F32 else (F32, dtype)
    mean = b.output("mean", (samples, group), statistics)
    b.output("rstd", (samples, group), (mean,) if mean else statistics)


def _channelled(b: Builder) -> tuple[int, ...]:
    """The shape of BatchNorm's data: at least one channel."""
    shape = b.shape(2, 8)
    return (shape[0], max(shape[1], 1), *shape[2:])


def _any(b: Builder) -> str:
    return b.one_of(*FLOATS)


def _preferring(dtype: str) -> tuple[str, ...]:
    return (dtype, *(other for other in FLOATS if other != dtype))


def batch_norm_elemt_backward(b: Builder) -> None:
    shape = _channelled(b)
    channel = (shape[1],)
    dtype = _any(b)
    _data(b, "grad_out", shape, _any(b))
    _data(b, "input", shape, dtype)
    b.twin("input", "grad_out")
    _data(b, "mean", channel, _any(b))
    _scales(b, "invstd", channel, _any(b))
    _optional(b, "weight", channel, FLOATS)
    _data(b, "sum_dy", channel, _any(b))
    _data(b, "sum_dy_xmu", channel, _any(b))
    ranks = b.shape(0, 8, elements=12)
    b.tensor("counter", ranks, b.one_of(I32, F16, F32), counts(b.rng, ranks, b.style))
    b.output("grad_input", shape, _preferring(dtype))


def batch_norm_stats(b: Builder) -> None:
    shape = _channelled(b)
    _data(b, "input", shape, _any(b))
    b.attribute("eps", b.one_of(1e-5, 1e-3, 1.0))
    b.output("mean", (shape[1],), FLOATS)
    b.output("invstd", (shape[1],), FLOATS)


def batch_norm_gather_stats_with_counts(b: Builder) -> None:
    shape = _channelled(b)
    channels, ranks = shape[1], b.draw(st.integers(0, 5))
    _data(b, "input", shape, _any(b))
    _data(b, "mean", (ranks, channels), _any(b))
    _scales(b, "invstd", (ranks, channels), _any(b))
    for name in ("running_mean", "running_var"):
        if b.flag():
            dtype = _any(b)
            b.tensor(name, (channels,), dtype, data(b.rng, (channels,), dtype, b.style), in_place=True)
        else:
            b.absent(name)
    b.attribute("momentum", b.one_of(0.1, 0.0, 1.0, 0.37))
    b.attribute("eps", b.one_of(1e-5, 0.0, 1e-3))
    per_rank = b.shape_with(ranks, 0, 8)
    b.tensor("counts", per_rank, b.one_of(I32, F16, F32), counts(b.rng, per_rank, b.style))
    b.output("mean_all", (channels,), FLOATS)
    b.output("invstd_all", (channels,), FLOATS)


def batch_norm_elemt(b: Builder) -> None:
    shape = _channelled(b)
    dtype = _any(b)
    _data(b, "input", shape, dtype)
    _optional(b, "weight", (shape[1],), FLOATS)
    _optional(b, "bias", (shape[1],), FLOATS)
    _data(b, "mean", (shape[1],), _any(b))
    _scales(b, "invstd", (shape[1],), _any(b))
    b.attribute("eps", 1e-5)
    b.output("output", shape, _preferring(dtype))


def batch_norm_reduce_backward(b: Builder) -> None:
    shape = _channelled(b)
    channel = (shape[1],)
    _data(b, "grad_out", shape, _any(b))
    _data(b, "input", shape, _any(b))
    b.twin("input", "grad_out")
    mean = _any(b)
    _data(b, "mean", channel, mean)
    _scales(b, "invstd", channel, _any(b))
    weight = _optional(b, "weight", channel, FLOATS)
    flags = [b.flag() for _ in range(3)]
    for name, flag in zip(("input_g", "weight_g", "bias_g"), flags, strict=True):
        b.attribute(name, flag)
    b.output("sum_dy", channel, FLOATS, wanted=flags[0])
    b.output("sum_dy_xmu", channel, FLOATS, wanted=flags[0])
    b.output("grad_weight", channel, _preferring(weight or mean), wanted=flags[1])
    b.output("grad_bias", channel, _preferring(weight or mean), wanted=flags[2])


RECIPES: dict[str, Callable[[Builder], None]] = {
    recipe.__name__: recipe
    for recipe in (
        layer_norm_backward,
        group_norm_backward,
        batch_norm_elemt_backward,
        layer_norm,
        group_norm,
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_reduce_backward,
    )
}


@st.composite
def valid_calls(draw: Any, operator: str) -> Case:
    """A valid call of the operator."""
    builder = Builder(draw, operator)
    RECIPES[operator](builder)
    return builder.finished()
