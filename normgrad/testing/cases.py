"""Inputs to try an implementation on: for every operator calls of many kinds, the same for the same seed."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from normgrad import oracle
from normgrad.contract.parameters import Mask, Role, Tensor
from normgrad.contract.rules import flag
from normgrad.contract.status import ContractError
from normgrad.operators import OPERATORS
from normgrad.oracle.float64 import Array
from normgrad.reference import rounded
from normgrad.testing.expected import checked
from normgrad.testing.values import DTYPES, KINDS, Values

_FLOATS = ("float32", "float16", "bfloat16")
_COUNTS = ("int32", "float16", "float32")
_PARAMETERS = ("weight", "bias")
_COUNTERS = ("counter", "counts")
_DATA = ("grad_out", "input")
_EPS = 1e-5
_SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "i32", None: "none"}
# Above so many mixes, those are taken in which every two tensors meet in every two dtypes.
_MOST_MIXES = 100

Dtypes = Mapping[str, str | None]


@dataclass(frozen=True)
class TestCase:
    """A call: its name, its kind, and its arguments by parameter name."""

    __test__ = False  # no test itself, whatever its name begins with

    operator: str
    kind: str
    name: str
    arguments: dict[str, Any]


class _Draw:
    """Draws the arguments of one call in the dtypes that it is told."""

    def __init__(self, values: Values, dtypes: Dtypes) -> None:
        self.values = values
        self.dtypes = dtypes
        self.kind = values.kind
        self.arguments: dict[str, Any] = {}

    def put(self, name: str, numbers: Any) -> Array | None:
        """Round numbers to the tensor's dtype and make them its argument; what they are now."""
        dtype = self.dtypes[name]
        narrow = None if dtype is None else rounded(np.asarray(numbers, np.float64), DTYPES[dtype])
        self.arguments[name] = narrow
        return None if narrow is None else narrow.astype(np.float64)

    def data(self, name: str, shape: tuple[int, ...], row: tuple[int, ...] = ()) -> Array:
        """A tensor of data."""
        numbers = self.put(name, self.values.data(shape, row))
        assert numbers is not None
        return numbers

    def parameters(self, *names: str, shape: tuple[int, ...]) -> None:
        """Weights or biases, where they are given."""
        for name in names:
            self.put(name, self.values.parameters(shape))

    def finished(self) -> dict[str, Any]:
        """The arguments; special values are put in last, so that statistics are those of the rest."""
        for name in _DATA:
            if name in self.arguments:
                self.arguments[name] = self.values.with_specials(self.arguments[name])
        return self.arguments


def _rows(draw: _Draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sizes = {
        "one-column": (67, 1),
        "long-rows": (3, 100_003),
        "many-rows": (20_011, 8),
        "dtypes": (3, 37),
        "masks": (9, 67),
    }
    rows, columns = sizes.get(draw.kind, (33, 515))
    return ((rows // 3, 3, columns) if rows % 3 == 0 else (rows, columns)), (columns,)


def _layer_norm(draw: _Draw, *, backward: bool) -> None:
    shape, normalized = _rows(draw)
    if backward:
        draw.data("grad_out", shape)
    x = draw.data("input", shape, (len(shape) - 1,))
    draw.arguments["normalized_shape"] = list(normalized)
    if backward:
        _, mean, rstd = oracle.layer_norm(x, normalized, eps=_EPS)
        draw.put("mean", mean)
        draw.put("rstd", rstd)
    draw.parameters("weight", "bias", shape=normalized)


def _groups(draw: _Draw) -> tuple[tuple[int, ...], dict[str, int]]:
    sizes = {
        "one-column": (5, 12, 1, 1, 12),
        "one-place": (7, 60, 1, 1, 4),
        "long-rows": (2, 6, 127, 257, 2),
        "many-rows": (307, 24, 2, 2, 12),
        "dtypes": (2, 6, 3, 3, 2),
        "masks": (2, 12, 5, 3, 4),
    }
    samples, channels, height, width, group = sizes.get(draw.kind, (3, 24, 17, 11, 4))
    attributes = {"N": samples, "C": channels, "HxW": height * width, "group": group}
    return (samples, channels, height, width), attributes


def _group_norm(draw: _Draw, *, backward: bool) -> None:
    shape, attributes = _groups(draw)
    if backward:
        draw.data("grad_out", shape)
    x = draw.data("input", shape, (1, 2, 3))
    if backward:
        _, mean, rstd = oracle.group_norm(x, None, None, **attributes, eps=_EPS)
        draw.put("mean", mean)
        draw.put("rstd", rstd)
    draw.parameters(*(name for name in _PARAMETERS if name in draw.dtypes), shape=(attributes["C"],))
    draw.arguments |= attributes


def _channelled(draw: _Draw) -> tuple[int, ...]:
    sizes: dict[str, tuple[int, ...]] = {
        "one-column": (6, 1, 5, 7),
        "one-place": (41, 37),
        "long-rows": (2, 3, 127, 257),
        "many-rows": (1009, 24, 2, 2),
        "dtypes": (3, 5, 7),
        "masks": (4, 9, 5, 3),
    }
    return sizes.get(draw.kind, (6, 19, 11, 7))


def _batch(draw: _Draw, *names: str) -> tuple[tuple[int, ...], list[Array], Array, Array]:
    """Data, and the statistics of its channels."""
    shape = _channelled(draw)
    axes = (0, *range(2, len(shape)))
    data = [draw.data(name, shape, axes if name == "input" else ()) for name in names]
    mean, invstd = oracle.batch_norm_stats(data[-1], _EPS)
    return shape, data, mean, invstd


def _batch_norm_elemt_backward(draw: _Draw) -> None:
    shape, (dy, x), mean, invstd = _batch(draw, "grad_out", "input")
    draw.put("mean", mean)
    draw.put("invstd", invstd)
    draw.parameters("weight", shape=shape[1:2])
    sum_dy, sum_dy_xmu, _, _ = oracle.batch_norm_reduce_backward(dy, x, mean, invstd, None)
    draw.put("sum_dy", sum_dy)
    draw.put("sum_dy_xmu", sum_dy_xmu)
    count = x.size // shape[1]
    draw.put("counter", [count - count // 3, count // 3])


def _batch_norm_stats(draw: _Draw) -> None:
    _batch(draw, "input")


def _batch_norm_gather_stats_with_counts(draw: _Draw) -> None:
    ranks = 64 if draw.kind == "many-rows" else 4
    shape, _, mean, invstd = _batch(draw, "input")
    spread = draw.values.rng.uniform(0.5, 2, (ranks, shape[1]))
    draw.put("mean", mean * spread)
    draw.put("invstd", invstd / spread)
    draw.put("running_mean", draw.values.parameters(shape[1:2]))
    draw.put("running_var", np.abs(draw.values.parameters(shape[1:2])) + 0.5)
    draw.arguments |= {"momentum": 0.1, "eps": _EPS}
    counts = draw.values.rng.integers(1, 1000, ranks)
    counts[0] = 0
    draw.put("counts", counts)


def _batch_norm_elemt(draw: _Draw) -> None:
    shape, _, mean, invstd = _batch(draw, "input")
    draw.parameters("weight", "bias", shape=shape[1:2])
    draw.put("mean", mean)
    draw.put("invstd", invstd)


def _batch_norm_reduce_backward(draw: _Draw) -> None:
    shape, _, mean, invstd = _batch(draw, "grad_out", "input")
    draw.put("mean", mean)
    draw.put("invstd", invstd)
    draw.parameters("weight", shape=shape[1:2])


_BUILDERS: dict[str, Callable[[_Draw], None]] = {
    "layer_norm_backward": lambda draw: _layer_norm(draw, backward=True),
    "group_norm_backward": lambda draw: _group_norm(draw, backward=True),
    "batch_norm_elemt_backward": _batch_norm_elemt_backward,
    "layer_norm": lambda draw: _layer_norm(draw, backward=False),
    "group_norm": lambda draw: _group_norm(draw, backward=False),
    "batch_norm_stats": _batch_norm_stats,
    "batch_norm_gather_stats_with_counts": _batch_norm_gather_stats_with_counts,
    "batch_norm_elemt": _batch_norm_elemt,
    "batch_norm_reduce_backward": _batch_norm_reduce_backward,
}


def kinds_of(operator: str) -> list[str]:
    """The kinds of case that an operator has."""
    absent = set()
    if operator.startswith("layer_norm"):
        absent.add("one-place")
    if not any(_choices(operator)):
        absent.add("masks")
    return [kind for kind in KINDS if kind not in absent]


def make_cases(operator: str, seed: int = 0, kinds: Sequence[str] | None = None) -> Iterator[TestCase]:
    """Calls of an operator, of some kinds or of all; each depends on the seed and its own name alone.

    >>> from normgrad.testing.cases import make_cases
    >>> [case.name for case in make_cases("batch_norm_stats", kinds=["offset", "constant"])]
    ['offset-float32', 'offset-float16', 'offset-bfloat16', 'constant-float32', 'constant-float16', 'constant-bfloat16']
    """
    for kind in kinds_of(operator) if kinds is None else kinds:
        if kind == "dtypes":
            for dtypes in _mixes(operator):
                yield _case(operator, kind, "-".join(_SHORT[dtype] for dtype in dtypes.values()), dtypes, seed)
        elif kind == "masks":
            for choice in _choices(operator):
                text = "".join(str(int(wanted)) for value in choice.values() for wanted in np.atleast_1d(value))
                yield _case(operator, kind, text, _usual_dtypes(operator, "float32"), seed, choice)
        else:
            for dtype in _FLOATS:
                yield _case(operator, kind, dtype, _usual_dtypes(operator, dtype), seed)


def _case(
    operator: str, kind: str, detail: str, dtypes: Dtypes, seed: int, more: Mapping[str, Any] | None = None
) -> TestCase:
    name = f"{kind}-{detail}"
    rng = np.random.default_rng([seed, zlib.crc32(f"{operator} {name}".encode())])
    draw = _Draw(Values(rng, kind, dtypes["input"] or "float32"), dtypes)
    _BUILDERS[operator](draw)
    return TestCase(operator, kind, name, draw.finished() | dict(more or {}))


def _tensors(operator: str) -> list[Tensor]:
    return [tensor for tensor in OPERATORS[operator].signature.tensors if tensor.role is not Role.OUTPUT]


def _usual_dtypes(operator: str, dtype: str) -> dict[str, str | None]:
    """Data and parameters of one dtype beside float32 statistics, as models have them."""

    def usual(name: str) -> str:
        if name in _COUNTERS:
            return "int32"
        return dtype if name in (*_DATA, *_PARAMETERS) else "float32"

    return {tensor.name: usual(tensor.name) for tensor in _tensors(operator)}


def _mixes(operator: str) -> Iterator[dict[str, str | None]]:
    """Every mix of dtypes that passes the checks."""
    tensors = _tensors(operator)
    choices: list[tuple[str | None, ...]] = []
    for tensor in tensors:
        levels = _COUNTS if tensor.name in _COUNTERS else _FLOATS
        choices.append((*levels, None) if tensor.optional else levels)
    names = [tensor.name for tensor in tensors]
    mixes = [dict(zip(names, mix, strict=True)) for mix in itertools.product(*choices)]
    if len(mixes) <= _MOST_MIXES or not operator.startswith("batch_norm"):
        yield from (mix for mix in mixes if _is_allowed(operator, mix))
        return
    yield from _pairs(tensors)


def _is_allowed(operator: str, dtypes: Dtypes) -> bool:
    small = _Draw(Values(np.random.default_rng(0), "dtypes", "float32"), dtypes)
    _BUILDERS[operator](small)
    try:
        checked(OPERATORS[operator], small.arguments, None)
    except ContractError:
        return False
    return True


def _pairs(tensors: Sequence[Tensor]) -> Iterator[dict[str, str | None]]:
    """27 mixes in which every two tensors meet in every two dtypes, and three without the optional tensors.

    The digits of a tensor are a linear form over the integers modulo 3, no two forms being multiples of each other.
    """
    forms = [form for form in itertools.product(range(3), repeat=3) if next(filter(None, form), 0) == 1]
    for number, point in enumerate(itertools.product(range(3), repeat=3)):
        mix: dict[str, str | None] = {}
        for tensor, form in zip(tensors, forms, strict=False):
            digit = sum(a * b for a, b in zip(form, point, strict=True)) % 3
            mix[tensor.name] = (_COUNTS if tensor.name in _COUNTERS else _FLOATS)[digit]
        yield mix
        if number % 13 == 0:
            yield mix | {tensor.name: None for tensor in tensors if tensor.optional}


def _choices(operator: str) -> Iterator[dict[str, Any]]:
    """Every choice of outputs but none at all."""
    parameters = OPERATORS[operator].signature.parameters
    flags = [p.name for p in parameters if not isinstance(p, Tensor | Mask) and p.read is flag]
    for parameter in parameters:
        if isinstance(parameter, Mask):
            for mask in itertools.product((True, False), repeat=parameter.length):
                if any(mask):
                    yield {parameter.name: list(mask)}
    if flags:
        for values in itertools.product((True, False), repeat=len(flags)):
            if any(values):
                yield dict(zip(flags, values, strict=True))
