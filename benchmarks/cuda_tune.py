"""Times tiles for the backward passes of LayerNorm and GroupNorm: what ``normgrad.cuda.configurations`` rests on."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

import torch
from cuda_cases import Case, compile_ahead, copying, median_time, outputs, planned, tensors

from normgrad.cuda.configurations import ChannelsTile, GroupTile, RowTile, StreamTile, blocks, power_of_two

# Rows, warps, residents, stages; 0 stages for loading ahead into registers.
WHOLE = {
    256: [(8, 1, 8, 0), (8, 4, 3, 0), (8, 1, 8, 3), (8, 1, 10, 3), (8, 1, 8, 4), (16, 1, 6, 2), (8, 2, 6, 0)],
    512: [(4, 2, 8, 3), (4, 2, 6, 3), (4, 2, 6, 0), (8, 4, 2, 0), (8, 4, 3, 0), (4, 2, 8, 4), (8, 2, 4, 0)],
    768: [(4, 4, 2, 0), (2, 4, 4, 3), (4, 4, 3, 3), (4, 4, 3, 0), (2, 4, 4, 0)],
    1024: [(4, 4, 2, 0), (2, 4, 4, 3), (4, 4, 3, 3), (2, 4, 4, 4), (2, 4, 4, 0)],
    2048: [(2, 8, 2, 3), (4, 8, 1, 0), (2, 8, 2, 0), (4, 8, 1, 3), (2, 4, 2, 3), (2, 8, 2, 4), (4, 8, 2, 3)],
    4096: [(2, 8, 1, 0), (2, 8, 1, 3), (2, 16, 1, 3), (2, 16, 1, 4), (2, 16, 1, 0), (1, 8, 2, 3), (2, 8, 1, 4)],
    8192: [(1, 16, 1, 1), (1, 16, 1, 2), (1, 16, 1, 3), (1, 16, 1, 4), (1, 32, 1, 1), (2, 16, 1, 2), (1, 32, 1, 3)],
}
# Rows, columns, warps, residents, stages.
SHARED = [(2, 1024, 4, 4, 1), (4, 1024, 4, 3, 1), (4, 1024, 4, 4, 1), (2, 2048, 8, 2, 1), (1, 4096, 8, 2, 1)]
SHARED += [(4, 2048, 8, 1, 0), (2, 4096, 8, 1, 0), (2, 1024, 4, 4, 0), (4, 512, 4, 4, 1), (4, 512, 2, 6, 1)]
SHARED += [(8, 512, 4, 4, 1), (4, 1024, 8, 2, 0), (8, 512, 4, 3, 1), (4, 512, 4, 4, 0), (4, 2048, 8, 2, 1)]
SHARED += [(2, 8192, 16, 1, 1), (1, 8192, 16, 1, 0), (2, 4096, 16, 1, 1), (2, 4096, 16, 1, 0), (4, 4096, 16, 1, 1)]
SHAPES = [(131072, 256), (65536, 512), (4096, 768), (32768, 1024), (32768, 2048), (16384, 4096), (8192, 8192)]
SHAPES += [(4096, 16384), (1024, 65536), (512, 262144)]
GROUPS = [(16, 320, 4096, 32), (32, 512, 1024, 32), (8, 128, 65536, 32), (64, 64, 3136, 32), (6, 384, 3600, 32)]

# Elements of a tile, warps, residents, stages.
PLACES = [(2048, 4, 8, 1), (4096, 8, 4, 1), (8192, 8, 2, 1), (8192, 16, 2, 1), (4096, 8, 2, 0), (4096, 8, 2, 3)]
PLACES += [(4096, 8, 3, 2), (8192, 16, 1, 3), (8192, 8, 1, 3), (2048, 4, 6, 3), (2048, 4, 4, 3), (8192, 16, 2, 2)]
PLACES += [(4096, 4, 4, 2), (4096, 4, 3, 3), (2048, 4, 8, 2), (4096, 4, 4, 1)]
# Elements of a tile, tiles of a stretch, warps, residents, stages.
CHANNELS = [(4096, 4, 8, 3, 1), (4096, 4, 8, 3, 2), (4096, 2, 8, 3, 1), (4096, 8, 8, 3, 1), (2048, 4, 4, 6, 1)]
CHANNELS += [(2048, 8, 4, 6, 1), (4096, 4, 8, 2, 3), (4096, 8, 8, 2, 3), (4096, 16, 8, 2, 3), (2048, 16, 4, 4, 3)]
CHANNELS += [(2048, 4, 4, 4, 3), (2048, 8, 4, 4, 3), (4096, 16, 8, 2, 2), (2048, 32, 4, 4, 3), (4096, 32, 8, 2, 3)]
BATCHES = [(16, 320, 4096), (64, 64, 3136)]
STREAMS = [(2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (1024, 4)]


def stream_cases() -> list[Case]:
    """BatchNorm's."""
    found = []
    for sizes in BATCHES:
        P = sizes[2]
        for operator in ("batch_norm_elemt_backward", "batch_norm_reduce_backward", "batch_norm_stats"):
            for dtype in ("bfloat16", "float32"):
                for room, warps in STREAMS:
                    places = min(power_of_two(P), room)
                    found.append(Case(operator, sizes, dtype, tile=StreamTile(room // places, places, 1, warps)))
                    for channels in (64, 128):
                        tile = StreamTile(1, room // channels, channels, warps)
                        found.append(Case(operator, sizes, dtype, "channels_last", tile))
    return found


def row_cases() -> list[Case]:
    """LayerNorm's."""
    found = []
    for M, N in SHAPES:
        for dtype in ("bfloat16", "float32"):
            whole = [(rows, power_of_two(N), *rest) for rows, *rest in WHOLE.get(N, [])]
            for rows, columns, warps, resident, stages in whole + (SHARED if N >= 8192 else []):
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
            for width in (64, 128):
                groups = min(group, width // D)
                while groups * D % 8:
                    groups -= 1
                for room, steps, warps, resident, stages in CHANNELS:
                    channels = power_of_two(groups * D)
                    places = room // channels
                    parts = blocks(HxW, places * steps)
                    if channels != width or parts > 132 * resident or parts > 256:
                        continue
                    wide = ChannelsTile(places, channels, groups, steps, parts, warps, resident, stages)
                    found.append(Case("group_norm_backward", sizes, dtype, "channels_last", wide))
    return found


def main(parts: list[str]) -> None:
    """Time the parts named: rows, groups."""
    every = [
        case for part in parts for case in {"rows": row_cases, "groups": group_cases, "streams": stream_cases}[part]()
    ]
    compile_ahead(every)
    print(len(every), "tiles", flush=True)
    target = Path(os.environ.get("OUT", "."))
    best: dict[tuple[object, ...], list[tuple[float, str]]] = {}
    made_for, made, results = None, {}, ()
    with open(target / "tune.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["operator", "sizes", "dtype", "order", "tile", "microseconds", "percent_of_copy"])
        for case in every:
            key = (case.operator, case.sizes, case.dtype, case.order)
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
            tile = (
                str(case.tile)
                .replace("RowTile", "")
                .replace("GroupTile", "")
                .replace("ChannelsTile", "")
                .replace("StreamTile", "")
            )
            table.writerow(
                [case.operator, case.sizes, case.dtype, case.order, tile, f"{time:.1f}", f"{100 * copy / time:.1f}"]
            )
            best.setdefault(key, []).append((100 * copy / time, tile))
    for key, found in best.items():
        print(*key)
        for percent, tile in sorted(found, reverse=True)[:3]:
            print(f"   {percent:5.1f} {tile}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["rows", "groups", "streams"])
