"""What is measured: operators with a shape, a dtype and an order in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

DTYPES = ("float32", "float16", "bfloat16")
CONTIGUOUS = "contiguous"
CHANNELS_LAST = "channels_last"

LAYER_NORM = ("layer_norm_backward", "layer_norm")
GROUP_NORM = ("group_norm_backward", "group_norm")
BATCH_NORM = ("batch_norm_elemt_backward", "batch_norm_reduce_backward", "batch_norm_stats", "batch_norm_elemt")
GATHER = "batch_norm_gather_stats_with_counts"

#: Data of fewer bytes stays in a core's own caches, and the time of a call is mostly that of the way to the kernel.
SMALL = 1 << 20


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes
    ----------
    operator : str
        The operator's name.
    shape : tuple of int
        Of the data: rows and columns for LayerNorm, (N, C, positions…) for GroupNorm and BatchNorm, (ranks, C) for the
        gathering of statistics.
    dtype : str
        Of the data, and of the weights of LayerNorm and GroupNorm; all else is float32.
    layout : str
        The order in memory: ``contiguous`` or ``channels_last``.
    group : int
        How many groups, for GroupNorm.
    """

    operator: str
    shape: tuple[int, ...]
    dtype: str
    layout: str = CONTIGUOUS
    group: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of one tensor of data."""
        return self.elements * (4 if self.dtype == "float32" else 2)

    @property
    def is_small(self) -> bool:
        return self.nbytes < SMALL

    @property
    def size(self) -> str:
        """The shape as a table shows it."""
        text = "×".join(map(str, self.shape))
        return f"{text} / {self.group}" if self.group else text

    @property
    def fields(self) -> dict[str, Any]:
        """The case in a record of results, which begins with it."""
        return {
            "operator": self.operator,
            "shape": "x".join(map(str, self.shape)),
            "group": self.group or None,
            "dtype": self.dtype,
            "layout": self.layout,
            "bytes": self.nbytes,
        }

    def __str__(self) -> str:
        order = "" if self.layout == CONTIGUOUS else f" {self.layout}"
        return f"{self.operator} {self.size} {self.dtype}{order}"


@dataclass(frozen=True)
class Shapes:
    """The shapes of a set of cases, by family. Of GroupNorm: (N, C, positions…) and the number of groups.

    ``float32_alone`` are shapes for one dtype and one order in memory, since they take long.
    """

    layer_norm: Sequence[tuple[int, int]]
    group_norm: Sequence[tuple[tuple[int, ...], int]]
    batch_norm: Sequence[tuple[int, ...]]
    gather: Sequence[tuple[int, int]] = ()
    forward: bool = False
    batch_norm_channels_last: bool = False
    float32_alone: Shapes | None = None
    dtypes: Sequence[str] = DTYPES


#: Sizes as models have them.
DEFAULT = Shapes(
    layer_norm=[(8192, 1024), (4096, 4096), (65536, 256), (1024, 16384), (64, 262144), (128, 768)],
    group_norm=[
        ((8, 320, 64, 64), 32),
        ((32, 64, 56, 56), 32),
        ((16, 512, 16, 16), 32),
        ((4, 128, 128, 128), 32),
        ((64, 256, 7, 7), 1),
    ],
    batch_norm=[(32, 64, 56, 56), (16, 256, 28, 28), (4, 128, 128, 128), (256, 1024)],
)

#: From 2×2 to 256 MB, odd sizes and extreme proportions among them.
GRID = Shapes(
    layer_norm=[
        *((2, 2), (3, 7), (16, 64), (128, 768), (333, 777), (1000, 1000), (1 << 18, 16)),
        *((31, 100_003), (8192, 1024)),
    ],
    group_norm=[
        *(((2, 2, 1, 1), 1), ((2, 6, 3, 5), 3), ((4, 32, 8, 8), 8), ((64, 256, 7, 7), 1)),
        *(((16, 512, 16, 16), 32), ((32, 64, 56, 56), 32)),
    ],
    batch_norm=[
        *((2, 2), (3, 7), (128, 64), (256, 1024), (4, 3, 5, 7), (8, 32, 14, 14)),
        *((16, 256, 28, 28), (32, 64, 56, 56)),
    ],
    gather=[(2, 64), (8, 1024), (64, 4096), (1024, 2048)],
    forward=True,
    batch_norm_channels_last=True,
    float32_alone=Shapes(
        layer_norm=[(65536, 1024)],
        group_norm=[((16, 256, 128, 128), 32)],
        batch_norm=[(16, 256, 128, 128)],
        forward=True,
    ),
)

#: A look in a few seconds: one size that fits the caches, one that does not.
QUICK = Shapes(
    layer_norm=[(128, 768), (4096, 1024)],
    group_norm=[((16, 512, 16, 16), 32)],
    batch_norm=[(16, 256, 28, 28)],
)

#: For a GPU: from the launch latency to many times the L2 cache; rows up to those that several CTAs share.
CUDA = Shapes(
    layer_norm=[
        *((32768, 1024), (16384, 4096), (8192, 8192), (4096, 16384), (131072, 256), (2048, 32768)),
        *((1024, 65536), (512, 262144), (5000, 1280), (4096, 768), (64, 1024)),
    ],
    group_norm=[
        *(((16, 320, 4096), 32), ((32, 512, 1024), 32), ((8, 128, 65536), 32), ((64, 64, 3136), 32)),
        *(((6, 384, 3600), 32), ((2, 64, 64), 8)),
    ],
    batch_norm=[(16, 320, 4096), (64, 64, 3136), (8, 128, 65536), (64, 512, 196)],
    forward=True,
    batch_norm_channels_last=True,
    dtypes=("bfloat16", "float32"),
)

#: Sizes of models of all kinds, and odd ones, small and large.
CUDA_GRID = Shapes(
    layer_norm=[
        (max(elements // columns, 1), columns)
        for columns in (16, 100, 768, 1000, 3072, 5120, 10000, 50257)
        for elements in (2**15, 2**25)
    ],
    group_norm=[
        *(((2, 32, 16), 8), ((1, 512, 64), 32), ((4, 256, 49), 32), ((32, 256, 196), 32), ((8, 320, 1024), 32)),
        *(((64, 2048, 49), 32), ((1, 128, 262144), 32), ((16, 64, 3025), 1), ((128, 96, 784), 96)),
        ((2, 1280, 256), 32),
    ],
    batch_norm=[
        *((64, 2048, 49), (256, 512, 49), (32, 64, 12544), (8, 3, 50176), (4096, 512, 1), (64, 96, 3025)),
        *((16, 256, 81), (2, 16, 64)),
    ],
    gather=[(8, 1024), (64, 4096)],
    forward=True,
    batch_norm_channels_last=True,
    dtypes=("bfloat16", "float32"),
)

CUDA_QUICK = Shapes(
    layer_norm=[(64, 1024), (16384, 4096)],
    group_norm=[((2, 64, 64), 8), ((64, 64, 3136), 32)],
    batch_norm=[(64, 64, 3136)],
    forward=True,
    dtypes=("bfloat16",),
)

#: By device and name.
SETS = {
    "cpu": {"default": DEFAULT, "grid": GRID, "quick": QUICK},
    "cuda": {"default": CUDA, "grid": CUDA_GRID, "quick": CUDA_QUICK},
}


def _for_patterns(
    layer_norm: Sequence[tuple[int, int]],
    group_norm: Sequence[tuple[tuple[int, ...], int]],
    batch_norm: Sequence[tuple[int, ...]],
    gather: tuple[int, int],
    dtypes: Sequence[str] = DTYPES,
) -> Shapes:
    return Shapes(layer_norm, group_norm, batch_norm, [gather], True, True, dtypes=dtypes)


#: For the patterns of values, by device: few shapes, since each is timed on some twenty patterns. Short, middling and
#: long rows, and images; about a million elements on the CPU, and on a GPU more than its L2 cache holds.
PATTERN_SETS = {
    "cpu": _for_patterns(
        [(10752, 96), (1024, 1024), (64, 16384)], [((4, 64, 56, 56), 32)], [(4, 64, 56, 56)], (64, 4096)
    ),
    "cuda": _for_patterns(
        [(401_408, 96), (16384, 4096), (2048, 16384)],
        [((64, 64, 56, 56), 32), ((32, 512, 32, 32), 32)],
        [(64, 64, 56, 56)],
        (64, 4096),
    ),
}
QUICK_PATTERN_SETS = {
    "cpu": _for_patterns(
        [(512, 256)], [((4, 32, 28, 28), 8)], [(4, 32, 28, 28)], (8, 512), dtypes=("float32", "bfloat16")
    ),
    "cuda": _for_patterns(
        [(16384, 4096)], [((64, 64, 56, 56), 32)], [(64, 64, 56, 56)], (64, 4096), dtypes=("float32", "bfloat16")
    ),
}


def cases(shapes: Shapes) -> Iterator[Case]:
    """Every case of a set, in each dtype."""
    for dtype in shapes.dtypes:
        yield from _in_dtype(shapes, dtype)
    if shapes.float32_alone is not None:
        yield from (case for case in _in_dtype(shapes.float32_alone, "float32") if case.layout == CONTIGUOUS)
    # Its data are statistics, and those are float32.
    yield from (Case(GATHER, shape, "float32") for shape in shapes.gather)


def _in_dtype(shapes: Shapes, dtype: str) -> Iterator[Case]:
    yield from _layer_norm(shapes, dtype)
    yield from _group_norm(shapes, dtype)
    yield from _batch_norm(shapes, dtype)


def _layer_norm(shapes: Shapes, dtype: str) -> Iterator[Case]:
    for operator in LAYER_NORM if shapes.forward else LAYER_NORM[:1]:
        for shape in shapes.layer_norm:
            yield Case(operator, shape, dtype)


def _group_norm(shapes: Shapes, dtype: str) -> Iterator[Case]:
    for operator in GROUP_NORM if shapes.forward else GROUP_NORM[:1]:
        for shape, group in shapes.group_norm:
            for layout in _layouts(shape):
                yield Case(operator, shape, dtype, layout, group)


def _batch_norm(shapes: Shapes, dtype: str) -> Iterator[Case]:
    for operator in BATCH_NORM:
        for shape in shapes.batch_norm:
            for layout in _layouts(shape) if shapes.batch_norm_channels_last else (CONTIGUOUS,):
                yield Case(operator, shape, dtype, layout)


def _layouts(shape: tuple[int, ...]) -> tuple[str, ...]:
    """The orders in memory that differ for a shape."""
    positions = math.prod(shape[2:])
    return (CONTIGUOUS, CHANNELS_LAST) if positions > 1 and shape[1] > 1 else (CONTIGUOUS,)


def selected(
    every: Iterable[Case],
    operators: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    layouts: Sequence[str] = (),
    largest: int | None = None,
) -> list[Case]:
    """The cases of these operators, dtypes and layouts (all, where none is named), up to a size in bytes."""
    return [
        case
        for case in every
        if (not operators or case.operator in operators)
        and (not dtypes or case.dtype in dtypes)
        and (not layouts or case.layout in layouts)
        and (largest is None or case.nbytes <= largest)
    ]
