"""Times tiles for the backward passes of LayerNorm and GroupNorm: what ``normgrad.cuda.configurations`` rests on."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

import torch
from cuda_cases import Case, compile_ahead, copying, median_time, outputs, planned, tensors

from normgrad.cuda.configurations import GroupTile, RowTile, blocks

ROWS = {
    256: [
        (r, 256, w, k)
        for r, w, k in ((4, 1, 16), (4, 1, 12), (8, 1, 8), (4, 2, 8), (8, 2, 6), (8, 4, 3), (8, 4, 4), (16, 4, 2))
    ],
    768: [(r, 1024, w, k) for r, w, k in ((2, 4, 4), (2, 4, 3), (4, 4, 2), (2, 8, 2), (4, 8, 2))],
    1024: [
        (r, 1024, w, k)
        for r, w, k in (
            (2, 4, 4),
            (2, 4, 3),
            (4, 4, 2),
            (4, 4, 3),
            (2, 8, 2),
            (4, 8, 2),
            (8, 8, 1),
            (1, 4, 5),
            (4, 16, 1),
        )
    ],
    4096: [
        (r, c, w, k)
        for r, c, w, k in (
            (1, 4096, 16, 1),
            (2, 4096, 16, 1),
            (4, 4096, 16, 1),
            (1, 4096, 8, 2),
            (1, 4096, 8, 1),
            (2, 4096, 8, 1),
            (1, 4096, 32, 1),
            (4, 1024, 4, 3),
            (2, 2048, 8, 2),
            (2, 1024, 4, 4),
            (1, 2048, 8, 3),
        )
    ],
    8192: [
        (r, c, w, k)
        for r, c, w, k in (
            (1, 8192, 32, 1),
            (1, 8192, 16, 1),
            (2, 4096, 16, 1),
            (4, 1024, 4, 3),
            (2, 2048, 8, 2),
            (1, 4096, 8, 2),
            (2, 1024, 4, 4),
            (1, 2048, 8, 3),
        )
    ],
    16384: [
        (r, c, w, k)
        for r, c, w, k in (
            (1, 16384, 32, 1),
            (2, 4096, 16, 1),
            (1, 4096, 16, 1),
            (4, 1024, 4, 3),
            (2, 2048, 8, 2),
            (1, 4096, 8, 2),
            (2, 1024, 4, 4),
            (1, 2048, 8, 3),
        )
    ],
    65536: [
        (r, c, w, k)
        for r, c, w, k in (
            (1, 8192, 16, 1),
            (2, 4096, 16, 1),
            (1, 4096, 16, 1),
            (4, 1024, 4, 3),
            (2, 2048, 8, 2),
            (1, 4096, 8, 2),
            (2, 1024, 4, 4),
            (4, 2048, 8, 1),
        )
    ],
}
SHAPES = [(32768, 1024), (16384, 4096), (8192, 8192), (4096, 16384), (131072, 256), (1024, 65536), (4096, 768)]
GROUPS = [(16, 320, 4096, 32), (32, 512, 1024, 32), (8, 128, 65536, 32), (64, 64, 3136, 32), (6, 384, 3600, 32)]

# Elements of a tile, warps, residents, prefetch.
NEIGHBOURS = [
    (2048, 4, 4, True),
    (2048, 8, 4, False),
    (2048, 4, 8, False),
    (4096, 8, 2, True),
    (4096, 8, 4, False),
    (4096, 8, 3, False),
    (4096, 16, 2, False),
    (8192, 16, 1, True),
    (8192, 16, 2, False),
    (8192, 8, 2, False),
]


def row_cases() -> list[Case]:
    """LayerNorm's."""
    found = []
    for M, N in SHAPES:
        for dtype in ("bfloat16", "float32"):
            for rows, columns, warps, resident in ROWS[N]:
                for prefetch in (True, False):
                    tile = RowTile(rows, columns, blocks(N, columns), warps, resident, prefetch)
                    found.append(Case("layer_norm_backward", (M, N), dtype, tile=tile))
    return found


def group_cases() -> list[Case]:
    """GroupNorm's."""
    found = []
    for sizes in GROUPS:
        _, C, HxW, group = sizes
        D = C // group
        for dtype in ("bfloat16", "float32"):
            for room, warps, resident, prefetch in NEIGHBOURS:
                places = min(1 << (HxW - 1).bit_length(), room)
                channels = min(1 << (D - 1).bit_length(), room // places)
                shape = places, 1, channels, blocks(HxW, places), blocks(D, channels)
                found.append(
                    Case("group_norm_backward", sizes, dtype, tile=GroupTile(*shape, warps, resident, prefetch))
                )
            padded = 1 << (D - 1).bit_length()
            for wide in (64, 128):
                groups = max(1 << (wide // (D * (2 if dtype == "bfloat16" else 4)) - 1).bit_length(), 1)
                for room in (2048, 4096):
                    places = room // (groups * padded)
                    for warps, resident in ((4, 4), (8, 2), (8, 4)):
                        if places < 1 or blocks(HxW, places) > 132 * resident:
                            continue
                        tile = GroupTile(places, groups, padded, blocks(HxW, places), 1, warps, resident, resident < 4)
                        found.append(Case("group_norm_backward", sizes, dtype, "channels_last", tile))
    return found


def main(parts: list[str]) -> None:
    """Time the parts named: rows, groups."""
    every = (row_cases() if "rows" in parts else []) + (group_cases() if "groups" in parts else [])
    compile_ahead(every)
    print(len(every), "tiles", flush=True)
    target = Path(os.environ.get("OUT", "."))
    best: dict[tuple[object, ...], list[tuple[float, str]]] = {}
    made_for, made, results = None, {}, ()
    with open(target / "tune.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["operator", "sizes", "dtype", "order", "tile", "microseconds", "percent_of_copy"])
        for case in every:
            key = (case.sizes, case.dtype, case.order)
            if key != made_for:
                made, results = tensors(case), outputs(case, tensors(case))
                made_for = key
                copy = median_time([copying(case.traffic)])[0]
            try:
                time = median_time([planned(case, made, results).run], repeats=7)[0]
            except Exception as error:
                print("fails:", case, str(error)[:200], flush=True)
                torch.cuda.synchronize()
                continue
            tile = str(case.tile).replace("RowTile", "").replace("GroupTile", "")
            table.writerow(
                [case.operator, case.sizes, case.dtype, case.order, tile, f"{time:.1f}", f"{100 * copy / time:.1f}"]
            )
            best.setdefault(key, []).append((100 * copy / time, tile))
    for key, found in best.items():
        print(*key)
        for percent, tile in sorted(found, reverse=True)[:4]:
            print(f"   {percent:5.1f} {tile}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["rows", "groups"])
