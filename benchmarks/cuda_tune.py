"""Times tiles for the backward passes of LayerNorm and GroupNorm: what ``normgrad.cuda.configurations`` rests on."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

import torch
from cuda_cases import Case, compile_ahead, copying, median_time, outputs, planned, tensors

from normgrad.cuda.configurations import ChannelsTile, GroupTile, RowTile, blocks, power_of_two

# Rows, columns, warps, residents, stages; 0 stages for loading ahead into registers.
_SHORT = [(8, 1, 8, 0), (8, 4, 3, 0), (4, 1, 12, 3), (8, 1, 8, 3), (8, 2, 6, 3), (16, 2, 4, 3), (8, 4, 4, 2)]
_SHORT += [(16, 4, 3, 3), (16, 4, 4, 2), (32, 4, 2, 3), (32, 8, 2, 3), (8, 1, 12, 2), (16, 2, 6, 2), (8, 1, 10, 3)]
_MIDDLE = [
    (4, 4, 3, 0),
    (4, 4, 2, 0),
    (4, 4, 3, 3),
    (4, 4, 4, 2),
    (2, 4, 4, 3),
    (2, 4, 5, 3),
    (8, 8, 2, 3),
    (4, 8, 2, 3),
]
_MIDDLE += [(8, 8, 1, 3), (8, 8, 1, 0), (4, 8, 2, 4), (4, 4, 4, 3), (4, 4, 3, 4), (2, 4, 4, 4)]
_LONG = [(2, 16, 1, 0), (2, 8, 1, 0), (2, 16, 1, 3), (1, 8, 2, 3), (1, 16, 1, 4), (2, 8, 1, 3), (4, 16, 1, 2)]
_LONG += [(2, 16, 1, 2), (1, 8, 2, 4), (2, 16, 1, 4), (2, 8, 2, 3), (1, 8, 3, 3)]
_SHARED = [(1, 8192, 16, 1, 2), (1, 8192, 16, 1, 3), (1, 8192, 16, 1, 4), (2, 8192, 16, 1, 2), (1, 8192, 32, 1, 3)]
_SHARED += [(2, 4096, 16, 1, 3), (2, 4096, 8, 1, 3), (2, 4096, 16, 1, 4), (1, 4096, 8, 2, 3), (1, 4096, 8, 2, 4)]
_SHARED += [(4, 4096, 16, 1, 2), (4, 2048, 8, 1, 3), (4, 2048, 8, 1, 4), (2, 2048, 8, 2, 3), (2, 2048, 8, 2, 4)]
_SHARED += [(4, 1024, 4, 3, 3), (4, 1024, 4, 2, 4), (2, 1024, 4, 4, 3), (4, 2048, 8, 2, 2), (8, 1024, 4, 2, 3)]
_SHARED += [(8, 1024, 4, 1, 4), (4, 1024, 4, 4, 2), (2, 1024, 4, 4, 4), (2, 1024, 4, 4, 1), (4, 512, 2, 6, 3)]
ROWS = {
    256: [(r, 256, w, k, s) for r, w, k, s in _SHORT],
    768: [(r, 1024, w, k, s) for r, w, k, s in _MIDDLE],
    1024: [(r, 1024, w, k, s) for r, w, k, s in _MIDDLE],
    4096: [(r, 4096, w, k, s) for r, w, k, s in _LONG],
    8192: _SHARED,
    16384: _SHARED,
    65536: _SHARED,
}
SHAPES = [(32768, 1024), (16384, 4096), (8192, 8192), (4096, 16384), (131072, 256), (1024, 65536), (4096, 768)]
GROUPS = [(16, 320, 4096, 32), (32, 512, 1024, 32), (8, 128, 65536, 32), (64, 64, 3136, 32), (6, 384, 3600, 32)]

# Elements of a tile, warps, residents, stages.
PLACES = [(2048, 4, 8, 1), (4096, 8, 4, 1), (8192, 8, 2, 1), (8192, 16, 2, 1), (4096, 8, 2, 0), (4096, 8, 2, 3)]
PLACES += [(4096, 8, 3, 2), (8192, 16, 1, 3), (8192, 8, 1, 3), (2048, 4, 6, 3), (2048, 4, 4, 3), (8192, 16, 2, 2)]
PLACES += [(4096, 4, 4, 2), (4096, 4, 3, 3), (2048, 4, 8, 2), (4096, 4, 4, 1)]
# Elements of a tile, tiles of a stretch, warps, residents.
CHANNELS = [(4096, 4, 8, 3), (4096, 8, 8, 3), (4096, 2, 8, 3), (4096, 4, 8, 4), (2048, 4, 4, 6), (2048, 8, 4, 6)]
CHANNELS += [(2048, 16, 4, 4), (4096, 16, 8, 2), (8192, 4, 8, 2), (2048, 8, 8, 3), (4096, 32, 8, 3), (8192, 16, 8, 2)]


def row_cases() -> list[Case]:
    """LayerNorm's."""
    found = []
    for M, N in SHAPES:
        for dtype in ("bfloat16", "float32"):
            for rows, columns, warps, resident, stages in ROWS[N]:
                tile = RowTile(rows, columns, blocks(N, columns), warps, resident, stages == 0, max(stages, 1))
                found.append(Case("layer_norm_backward", (M, N), dtype, tile=tile))
    return found


def group_cases() -> list[Case]:
    """GroupNorm's."""
    found = []
    for sizes in GROUPS:
        _, C, HxW, group = sizes
        D = C // group
        for dtype in ("bfloat16", "float32"):
            for room, warps, resident, stages in PLACES:
                places = min(power_of_two(HxW), room)
                channels = min(power_of_two(D), room // places)
                shape = places, 1, channels, blocks(HxW, places), blocks(D, channels)
                tile = GroupTile(*shape, warps, resident, stages == 0, max(stages, 1))
                found.append(Case("group_norm_backward", sizes, dtype, tile=tile))
            for width in (64, 128, 256):
                groups = min(group, width // D)
                while groups * D % 8:
                    groups -= 1
                for room, steps, warps, resident in CHANNELS:
                    channels = power_of_two(groups * D)
                    places = room // channels
                    parts = blocks(HxW, places * steps)
                    if channels != width or parts > 132 * resident or parts > 256:
                        continue
                    wide = ChannelsTile(places, channels, groups, steps, parts, warps, resident)
                    found.append(Case("group_norm_backward", sizes, dtype, "channels_last", wide))
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
            tile = str(case.tile).replace("RowTile", "").replace("GroupTile", "").replace("ChannelsTile", "")
            table.writerow(
                [case.operator, case.sizes, case.dtype, case.order, tile, f"{time:.1f}", f"{100 * copy / time:.1f}"]
            )
            best.setdefault(key, []).append((100 * copy / time, tile))
    for key, found in best.items():
        print(*key)
        for percent, tile in sorted(found, reverse=True)[:3]:
            print(f"   {percent:5.1f} {tile}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["rows", "groups"])
