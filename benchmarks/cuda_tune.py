"""Times the launch configurations by which those of ``normgrad.cuda`` were chosen.

    python benchmarks/cuda_tune.py [PART…]

The parts are those of ``PARTS``. Writes tune.csv into the folder that OUT names, or this one; the results that the
choices rest on are ``results/cuda_h200_tiles.csv``.
"""

from __future__ import annotations

import csv
import math
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

from normgrad.bench.cases import CHANNELS_LAST, CONTIGUOUS
from normgrad.bench.cases import Case as Problem
from normgrad.bench.clock import DeviceClock, measure
from normgrad.bench.compilation import compile_ahead
from normgrad.bench.implementations.streaming import DeviceCopy
from normgrad.bench.workload import Workload, workload
from normgrad.cuda.batch_norm import tiles as batch_norm
from normgrad.cuda.batch_norm.tiles import DataLayout, ElementwiseTile, ReduceTile, reduce_tile
from normgrad.cuda.chip import Chip, cdiv, fit_stages, next_power_of_2
from normgrad.cuda.group_norm import tiles as group_norm
from normgrad.cuda.group_norm.tiles import ChannelsLastTile, GroupTile
from normgrad.cuda.layer_norm import tiles as layer_norm
from normgrad.cuda.layer_norm.tiles import RowTile

ROUNDS = 9
DTYPES = ("bfloat16", "float32")
# Rows, columns, warps, CTAs per SM, stages (0: prefetch into registers).
WHOLE = {
    48: [(32, 64, 4, 3, 0), (16, 64, 1, 12, 3), (8, 64, 1, 16, 3), (16, 64, 1, 8, 3)],
    96: [(16, 128, 4, 3, 0), (8, 128, 1, 12, 3), (8, 128, 1, 16, 3), (4, 128, 1, 16, 3), (16, 128, 1, 8, 3)],
    192: [(8, 256, 4, 3, 0), (8, 256, 2, 4, 3), (8, 256, 2, 6, 3), (4, 256, 1, 8, 3), (8, 256, 1, 8, 3)],
    256: [(8, 256, 1, 8, 3), (8, 256, 1, 10, 3), (8, 256, 4, 3, 0), (16, 256, 2, 4, 3), (8, 256, 2, 6, 3)],
    1024: [(4, 1024, 4, 2, 0), (4, 1024, 4, 2, 3), (4, 1024, 4, 3, 3), (2, 1024, 4, 4, 3), (2, 1024, 2, 4, 3)],
    4096: [(2, 4096, 8, 1, 4), (2, 4096, 8, 1, 0), (2, 4096, 16, 1, 3), (2, 4096, 8, 1, 3), (1, 4096, 16, 1, 4)],
    8192: [(1, 8192, 16, 1, 3), (1, 8192, 16, 1, 4)],
}
SHARED = {
    "bfloat16": [
        *((2, 2048, 4, 2, 3), (2, 2048, 4, 2, 4), (2, 4096, 8, 1, 3), (4, 1024, 4, 3, 3), (4, 1024, 4, 2, 3)),
        *((4, 2048, 8, 1, 3), (2, 1024, 4, 4, 3), (2, 1024, 4, 3, 4), (4, 512, 2, 6, 3)),
    ],
    "float32": [
        *((2, 1024, 4, 3, 4), (2, 1024, 4, 3, 3), (4, 1024, 4, 2, 4), (4, 1024, 4, 2, 3), (2, 1024, 4, 2, 4)),
        *((1, 2048, 4, 3, 3), (1, 4096, 8, 1, 4), (2, 4096, 8, 1, 4), (4, 512, 2, 5, 3)),
    ],
}
SHAPES = [
    *((401408, 48), (401408, 96), (200704, 192), (131072, 256), (32768, 1024), (16384, 4096), (8192, 8192)),
    *((4096, 16384), (2048, 32768), (1024, 65536), (512, 262144)),
]
# The forward pass.
FORWARD = {
    256: [(8, 256, 2, 8, 3), (4, 256, 1, 16, 3), (4, 256, 1, 12, 3), (8, 256, 1, 12, 3), (2, 256, 1, 16, 4)],
    1024: [(1, 1024, 1, 12, 3), (1, 1024, 1, 16, 3), (1, 1024, 1, 12, 4), (1, 1024, 2, 8, 4), (2, 1024, 2, 8, 3)],
    4096: [(1, 4096, 4, 4, 3), (1, 4096, 4, 4, 4), (1, 4096, 4, 5, 3), (2, 4096, 8, 2, 4), (1, 4096, 2, 6, 3)],
    8192: [(1, 8192, 8, 2, 3), (1, 8192, 8, 2, 4), (1, 8192, 4, 3, 3), (2, 8192, 16, 1, 4), (1, 8192, 4, 4, 3)],
    16384: [(1, 16384, 16, 1, 3), (1, 16384, 8, 1, 4), (1, 16384, 8, 2, 3)],
    32768: [(1, 32768, 16, 1, 2), (1, 32768, 16, 1, 3)],
}
FORWARD_SHARED = [(2, 4096, 8, 2, 3), (2, 2048, 4, 4, 3), (2, 2048, 4, 3, 4), (1, 4096, 4, 4, 3), (4, 4096, 8, 1, 3)]
FORWARD_SHARED += [(4, 2048, 4, 3, 3), (1, 8192, 8, 2, 3)]
GROUPS = [(16, 320, 4096, 32), (32, 512, 1024, 32), (8, 128, 65536, 32), (64, 64, 3136, 32), (6, 384, 3600, 32)]
# Elements of a tile, warps, CTAs per SM, stages.
CONTIGUOUS_GROUPS = [
    *((8192, 4, 2, 3), (8192, 4, 3, 3), (8192, 8, 2, 3), (8192, 8, 1, 3), (16384, 8, 2, 3), (16384, 8, 1, 3)),
    *((4096, 2, 4, 3), (4096, 2, 6, 3), (4096, 4, 4, 3), (4096, 4, 2, 3), (2048, 4, 4, 3), (2048, 2, 8, 3)),
]
# Of tiles to reduce: positions, how many, warps, CTAs per SM, stages; of results: positions, warps, CTAs per SM.
CHANNELS = {
    "group_norm_backward": [
        *((64, 4, 4, 4, 3, 64, 4, 5), (64, 4, 4, 5, 3, 64, 4, 5), (64, 8, 4, 4, 3, 64, 4, 5)),
        *((128, 2, 4, 4, 1, 128, 4, 3), (128, 2, 4, 4, 1, 64, 4, 5), (128, 4, 4, 4, 1, 64, 4, 5)),
    ],
    "group_norm": [
        *((128, 4, 4, 5, 3, 128, 4, 4), (128, 2, 4, 5, 3, 128, 4, 4), (64, 4, 4, 8, 3, 128, 4, 4)),
        *((128, 1, 4, 5, 1, 128, 4, 4), (64, 2, 4, 8, 2, 128, 4, 4), (64, 2, 4, 8, 1, 64, 4, 8)),
    ],
}
BATCHES = [(16, 320, 4096), (64, 64, 3136), (8, 128, 65536)]
# Bytes of a tensor a thread, warps.
ELEMENTWISE = [(32, 4), (64, 4)]
# Bytes of a tensor a thread, warps, CTAs per SM, stages, elements that are added up pairwise.
REDUCE = [
    *((64, 4, 3, 4, 16), (64, 4, 2, 6, 16), (64, 4, 5, 3, 4), (64, 4, 5, 3, 16), (64, 4, 3, 5, 16), (64, 8, 2, 4, 16)),
    *((128, 4, 2, 4, 16), (128, 4, 3, 3, 16), (64, 4, 8, 1, 16), (64, 2, 6, 5, 16), (64, 8, 3, 1, 16)),
]
# With few positions, or an odd number of them; of segment tiles: samples, CTAs per SM and stages.
FEW_POSITIONS = [(64, 512, 196), (64, 2048, 49), (128, 1024, 196), (64, 256, 784), (64, 96, 3025), (16, 256, 81)]
SEGMENT_TILES = [(4, 2, 6), (4, 3, 4), (8, 2, 4), (8, 3, 3), (16, 2, 3)]


@dataclass(frozen=True)
class Case:
    """A problem with a tile in place of the package's choice. Sizes of GroupNorm end in the number of groups."""

    operator: str
    sizes: tuple[int, ...]
    dtype: str
    layout: str = CONTIGUOUS
    tile: Any = None

    @property
    def problem(self) -> Problem:
        """What is computed."""
        group = self.sizes[3] if len(self.sizes) == 4 else 0
        return Problem(self.operator, self.sizes[:3], self.dtype, self.layout, group)


def planned(case: Case, work: Workload, results: tuple[Any, ...]) -> Any:
    """Return a repeatable plan with the case's tile in place of the package's choice."""
    module, name = {
        RowTile: (layer_norm, "row_tile" if case.operator == "layer_norm_backward" else "forward_row_tile"),
        GroupTile: (group_norm, "group_tile"),
        ChannelsLastTile: (group_norm, "channels_last_tile"),
        ElementwiseTile: (batch_norm, "elementwise_tile"),
        ReduceTile: (batch_norm, "reduce_tile"),
    }[type(case.tile)]
    with mock.patch.object(module, name, return_value=case.tile):
        plan = work.operator.plan(**work.arguments, out=results)
    plan.repeatable = True
    return plan


def compile_case(case: Case) -> None:
    """Compile the kernels of a case; what does not compile is reported when it is timed."""
    work = workload(case.problem, device="cuda")
    with suppress(Exception):
        planned(case, work, work.outputs()).run()


def row_tile(shape: tuple[int, ...], choice: tuple[int, ...]) -> RowTile:
    """A tile of LayerNorm."""
    rows, columns, warps, ctas_per_sm, stages = choice
    parts = cdiv(shape[1], columns)
    return RowTile(rows, columns, parts, warps, ctas_per_sm, stages == 0, max(stages, 1))


def row_cases(operator: str, whole: dict[int, Any], shared: dict[str, Any], shared_from: int) -> list[Case]:
    """LayerNorm: whole rows, and from some number of columns on rows that several CTAs share."""
    return [
        Case(operator, shape, dtype, tile=row_tile(shape, choice))
        for shape, dtype in product(SHAPES, DTYPES)
        for choice in [*whole.get(shape[1], []), *(shared[dtype] if shape[1] >= shared_from else [])]
    ]


def group_cases() -> list[Case]:
    """GroupNorm of contiguous positions."""
    found = []
    for sizes, operator, dtype, (room, *rest) in product(GROUPS, CHANNELS, DTYPES, CONTIGUOUS_GROUPS):
        _, C, HxW, group = sizes
        positions, D = min(next_power_of_2(HxW), room), C // group
        channels = min(next_power_of_2(D), room // positions)
        parts = cdiv(HxW, positions)
        tile = GroupTile(positions, 1, channels, parts, parts * cdiv(D, channels), *rest)
        found.append(Case(operator, sizes, dtype, tile=tile))
    return found


def channel_cases() -> list[Case]:
    """GroupNorm in channels_last."""
    found = []
    for sizes, operator, dtype in product(GROUPS, CHANNELS, DTYPES):
        for positions, steps, *rest in CHANNELS[operator]:
            channels = 64 if dtype == "bfloat16" else 32
            tile = ChannelsLastTile(channels, positions, max(steps, cdiv(sizes[2], 64 * positions)), *rest)
            found.append(Case(operator, sizes, dtype, CHANNELS_LAST, tile))
    return found


def batch_cases() -> list[Case]:
    """BatchNorm."""
    found = []
    for sizes, order, dtype in product(BATCHES, (CONTIGUOUS, CHANNELS_LAST), DTYPES):
        N, C, HxW = sizes
        contiguous, itemsize = order == CONTIGUOUS, 2 if dtype == "bfloat16" else 4
        merged = (N, C, HxW) if contiguous else (1, C, N * HxW)
        for nbytes, warps in ELEMENTWISE:
            shape = batch_norm.tile_shape(*merged, nbytes * 32 * warps // itemsize, contiguous)
            found.append(Case("batch_norm_elemt_backward", sizes, dtype, order, ElementwiseTile(*shape, warps)))
        for operator, (nbytes, warps, *rest) in product(("batch_norm_reduce_backward", "batch_norm_stats"), REDUCE):
            shape = batch_norm.tile_shape(*merged, nbytes * 32 * warps // itemsize, contiguous)
            found.append(Case(operator, sizes, dtype, order, ReduceTile(*shape, warps, *rest)))
    return found


def segment_cases() -> list[Case]:
    """BatchNorm of few positions: tiles within a channel, then segment tiles."""
    found = []
    for sizes, dtype in product(FEW_POSITIONS, DTYPES):
        N, C, HxW = sizes
        itemsize = 2 if dtype == "bfloat16" else 4
        elementwise = [ElementwiseTile(*batch_norm.tile_shape(N, C, HxW, 8192 // itemsize, True), 4)]
        elementwise += [ElementwiseTile(1, 4096 // itemsize // width, width, 4, width) for width in (128, 256, 512)]
        for operator in ("batch_norm_elemt", "batch_norm_elemt_backward"):
            found += [Case(operator, sizes, dtype, tile=tile) for tile in elementwise]
        reduce = [reduce_tile(DataLayout(sizes, itemsize, True, math.gcd(16, HxW * itemsize)), Chip(132))]
        for samples, ctas_per_sm, stages in SEGMENT_TILES:
            width = 2048 // itemsize
            depth = fit_stages(stages, ctas_per_sm, 2 * samples * 2048, Chip(132))
            reduce += [
                ReduceTile(1, samples, width, 4, ctas_per_sm, depth, 16, segment)
                for segment in batch_norm.segment_choices(HxW, itemsize, width, 16)
            ]
        for operator in ("batch_norm_stats", "batch_norm_reduce_backward"):
            found += [Case(operator, sizes, dtype, tile=tile) for tile in reduce]
    return found


PARTS = {
    "rows": partial(row_cases, "layer_norm_backward", WHOLE, SHARED, 8192),
    "forward": partial(row_cases, "layer_norm", FORWARD, dict.fromkeys(DTYPES, FORWARD_SHARED), 16384),
    "groups": group_cases,
    "channels": channel_cases,
    "batches": batch_cases,
    "segments": segment_cases,
}


def fields(tile: Any) -> str:
    """Return a tile's fields, in order."""
    return str(tuple(getattr(tile, name) for name in tile.__slots__)).replace(" ", "")


def main(names: list[str]) -> None:
    """Time the parts named, or all."""
    every = [case for part in PARTS if part in names or not names for case in PARTS[part]()]
    compile_ahead(compile_case, every)
    print(len(every), "tiles", flush=True)
    clock = DeviceClock()
    best: dict[tuple[str, ...], list[tuple[float, str]]] = {}
    with open(Path(os.environ.get("OUT", ".")) / "tune.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["operator", "sizes", "dtype", "order", "tile", "microseconds", "percent_of_copy"])
        work, results = None, ()
        for case in every:
            key = (case.operator, "x".join(map(str, case.sizes)), case.dtype, case.layout)
            if work is None or work.case != case.problem:
                work = workload(case.problem, device="cuda")
                results, (copy,) = work.outputs(), DeviceCopy().prepare(work)
            try:
                runs = {"copy": copy.run, "tile": planned(case, work, results).run}
                times = measure(runs, 0.0, clock, batch=0.0, fewest=ROUNDS)
            except Exception as error:
                print("fails:", *key, fields(case.tile), str(error)[-120:], flush=True)
                continue
            share = 100 * times["copy"].median / times["tile"].median
            table.writerow([*key, fields(case.tile), f"{1e6 * times['tile'].median:.1f}", f"{share:.1f}"])
            best.setdefault(key, []).append((share, fields(case.tile)))
    for key, found in best.items():
        ranked = sorted(found, reverse=True)[:3]
        print(*key, "  ".join(f"{percent:.0f} {tile}" for percent, tile in ranked))


if __name__ == "__main__":
    main(sys.argv[1:])
