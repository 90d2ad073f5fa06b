"""Tile sizes of LayerNorm, by the columns of a row; called by ``launches``, and by GroupNorm where a group is a row.

A CTA holds its columns of a tile's rows in registers. A tile holds whole rows where they fit; longer rows are split
among the CTAs of a cluster, or of a CTA group anywhere on the GPU. Beside every entry of the tables stands the problem
M×N that it was chosen on, and its speed there in % of a device copy of the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from normgrad.cuda.chip import VECTOR_BYTES, Chip, cdiv, fit_stages, next_power_of_2
from normgrad.cuda.device.pack16 import UNPACKED


@dataclass(frozen=True, slots=True)
class RowTile:
    """A tile of rows, which ``parts`` CTAs share."""

    rows: int
    columns: int  # that a CTA holds; a power of two
    parts: int  # CTAs that share a row
    warps: int
    ctas_per_sm: int
    prefetch: bool = True  # load the next tile into registers an iteration ahead
    stages: int = 1  # of Triton's software pipeline through shared memory, instead of prefetch
    float64: bool = False  # float32 data is computed in float64, which takes more registers
    cluster: bool = False  # the CTAs that share a row form a cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTileSpec(RowTile):
    """The constexpr TILE of kernels on rows: a tile, and how it maps to rows of memory."""

    words: int  # columns that a CTA holds in words: elements, or packed pairs of them
    padded_parts: int  # the next power of two
    vector: int  # words that divide a row's words and the strides of rows, which the host counts in vectors
    packing: int  # of ``device.pack16``
    masked: bool  # columns·parts exceeds the columns of a row
    offset64: bool  # offsets within a tile, or row indices, need 64 bits

    @classmethod
    def of(cls, tile: RowTile, columns: int, vector: int, packing: int, offset64: bool) -> RowTileSpec:
        """Describe a tile of rows with ``columns`` columns."""
        return cls(
            **asdict(tile),
            words=tile.columns if packing == UNPACKED.value else tile.columns // 2,
            padded_parts=next_power_of_2(tile.parts),
            vector=vector,
            packing=packing,
            masked=tile.columns * tile.parts != columns,
            offset64=offset64,
        )


# For float32 rows of up to 32 columns: sums of so few terms are computed in float64, since one float32 rounding would
# be a visible share of the error bound. Chosen without a measurement.
NARROW = RowTile(8, 32, 1, 1, 16, prefetch=False, stages=3, float64=True)
# Chosen on an NVIDIA H200 (driver 580.159, PyTorch 2.11, Triton 3.6) by benchmarks/cuda_tune.py; other GPUs take the
# same. By dtype and packing: unpacked 16-bit elements are those of rows with an odd number of columns or an odd stride
# (cp.async copies at least four bytes, so they are not loaded through shared memory). Each tile holds rows of up to its
# columns.
ROW_TILES = {
    "float32": (
        RowTile(32, 64, 1, 4, 3, prefetch=True),  # 401408×64: 93 %
        RowTile(8, 128, 1, 1, 12, prefetch=False, stages=3),  # 262144×128: 90 %
        RowTile(8, 256, 1, 4, 3, prefetch=True),  # 131072×256: 95.4 %
        RowTile(8, 512, 1, 4, 2, prefetch=True),  # 65536×512: 93.6 %
        RowTile(4, 1024, 1, 4, 2, prefetch=True),  # 32768×1024: 96.1 %
        RowTile(4, 2048, 1, 8, 1, prefetch=True),  # 32768×2048: 96.3 %
        RowTile(1, 4096, 1, 16, 1, prefetch=False, stages=4, float64=True),  # 16384×4096: 97 %
    ),
    "packed16": (
        RowTile(8, 256, 1, 1, 8, prefetch=False, stages=3),  # 131072×256: 90 %
        RowTile(4, 512, 1, 2, 6, prefetch=False, stages=4),  # 100352×384: 88 %; 85 with 3 stages
        RowTile(2, 1024, 1, 2, 4, prefetch=False, stages=4),  # 50432×768: 90 %; 84 with 3 stages; 32768×1024: 88 and 89
        RowTile(2, 2048, 1, 4, 2, prefetch=False, stages=3),  # 32768×2048: 93.9 %
        RowTile(2, 4096, 1, 8, 1, prefetch=False, stages=3),  # 16384×4096: 91 %
        RowTile(1, 8192, 1, 16, 1, prefetch=False, stages=4),  # 8192×8192: 78 %
    ),
    "unpacked16": (RowTile(1, 1024, 1, 2, 4, prefetch=True),),  # 32768×1001: 54 %
}
# For float32 rows of up to 256 columns that do not fill their tile. Prefetch into registers, where masked lanes load
# nothing, has too few bytes in flight: 71, 61 and 79 % with the tiles above.
PARTIAL_ROW_TILES = (
    RowTile(16, 64, 1, 1, 8, prefetch=False, stages=3),  # 401408×48: 85 %
    RowTile(8, 128, 1, 1, 12, prefetch=False, stages=3),  # 401408×96: 90 %
    RowTile(8, 256, 1, 2, 4, prefetch=False, stages=3),  # 200704×192: 93 %
)
# For longer rows, and those that would leave much of such a tile empty: the CTAs of a cluster share them.
CLUSTER_ROW_TILES = {
    "float32": (
        RowTile(4, 512, 8, 2, 4, prefetch=True, cluster=True),  # 16384×2560: 96 %
        RowTile(4, 1024, 8, 4, 2, prefetch=True, cluster=True),  # 8192×8192: 98 %
        RowTile(4, 2048, 16, 8, 1, prefetch=True, cluster=True),  # 2048×32768: 97 %
    ),
    "packed16": (
        RowTile(2, 512, 8, 1, 8, prefetch=True, cluster=True),  # 5000×1280: 72 %
        RowTile(2, 1024, 8, 2, 4, prefetch=True, cluster=True),  # 6553×5120: 83 %
        RowTile(2, 2048, 8, 4, 2, prefetch=True, cluster=True),  # 6553×10000: 80 %
        RowTile(2, 4096, 16, 8, 1, prefetch=True, cluster=True),  # 8192×8192: 86 %
    ),
    "unpacked16": (
        RowTile(1, 1024, 8, 2, 4, prefetch=True, cluster=True),  # 8192×5001: 50 %
        RowTile(1, 2048, 8, 4, 2, prefetch=True, cluster=True),  # 4096×16001: 49 %
    ),
}
# Columns up to which a CTA always holds whole rows; columns up to which it does if the padding (tile columns / columns)
# is no more than the third. It is faster than a cluster there.
_WHOLE_ROWS = {"float32": (1024, 4096, 1.2), "packed16": (1024, 4096, 1.4), "unpacked16": (1024, 1024, 1.4)}
# Share of the GPU's tile elements that clusters must at least fill; below it other tiles are faster.
_MIN_UTILIZATION = 0.7
# For rows longer still, or on GPUs without clusters: CTAs anywhere on the GPU share them.
SHARED_ROW_TILES = {
    "float32": (
        RowTile(2, 1024, 8, 4, 3, prefetch=False, stages=4),  # 8192×8192: 93 %
        RowTile(4, 1024, 32, 4, 2, prefetch=False, stages=4),  # 4096×16384: 94 %
        RowTile(2, 1024, 64, 4, 3, prefetch=False, stages=4),  # 1024×65536: 86 %
        RowTile(1, 2048, 128, 4, 2, prefetch=True),  # 512×262144: 77 %
    ),
    "packed16": (RowTile(2, 2048, 128, 4, 2, prefetch=False, stages=3),),  # 512×262144: 68 %
    "unpacked16": (RowTile(1, 2048, 64, 4, 2, prefetch=True),),  # 667×50257: 42 %
}


def element_key(itemsize: int, unpacked: bool) -> str:
    """Return the key of the tile tables for elements of ``itemsize`` bytes."""
    if itemsize == 4:
        return "float32"
    return "unpacked16" if unpacked else "packed16"


def _cluster_tile(
    columns: int, whole_rows: tuple[int, int, float], tiles: Sequence[RowTile], chip: Chip
) -> RowTile | None:
    """Return the tile for rows that a cluster shares; None for whole rows, or where there is none.

    Of all tiles, that with the highest utilization: the share of columns in its own elements, times the share of the
    GPU that clusters of that size fill. A cluster needs SMs of one GPC, so that not all SMs have room for them.
    """
    always, most, padding = whole_rows
    if columns <= always or (columns <= most and next_power_of_2(columns) <= padding * columns):
        return None
    found, best = None, _MIN_UTILIZATION
    for tile in tiles:
        parts = cdiv(columns, tile.columns)
        if 1 < parts <= tile.parts and chip.max_active_clusters is not None:
            ctas = parts * chip.max_active_clusters(parts, tile.ctas_per_sm)
            utilization = columns * ctas / (parts * tile.columns * tile.ctas_per_sm * chip.multiprocessors)
            if utilization > best:
                found, best = replace(tile, parts=parts), utilization
    return found


def row_tile(columns: int, itemsize: int, chip: Chip, unpacked: bool = False) -> RowTile:
    """Choose the tile of LayerNorm backward: the narrowest that holds whole rows, or parts of one."""
    width = next_power_of_2(columns)
    key = element_key(itemsize, unpacked)
    tile = _cluster_tile(columns, _WHOLE_ROWS[key], CLUSTER_ROW_TILES[key], chip)
    if tile is not None:
        return tile
    whole = ROW_TILES[key]
    if key == "float32":
        whole = (NARROW, *(PARTIAL_ROW_TILES if columns < width <= PARTIAL_ROW_TILES[-1].columns else whole))
    return whole_or_shared(columns, itemsize, whole, SHARED_ROW_TILES[key], chip)


def whole_or_shared(
    columns: int, itemsize: int, whole: Sequence[RowTile], shared: Sequence[RowTile], chip: Chip
) -> RowTile:
    """Return the first tile that holds whole rows of two tensors, or one whose CTAs share them."""
    width = next_power_of_2(columns)
    for tile in whole:
        if width <= min(tile.columns, chip.max_tile_elements):
            rows = tile.rows * (tile.columns // width)
            stages = fit_stages(tile.stages, tile.ctas_per_sm, 2 * rows * width * itemsize, chip)
            return replace(tile, columns=width, rows=rows, stages=stages)
    tile = next((found for found in shared if columns <= found.columns * found.parts), shared[-1])
    block = min(tile.columns, chip.max_tile_elements)
    stages = fit_stages(tile.stages, tile.ctas_per_sm, 2 * tile.rows * block * itemsize, chip)
    return replace(tile, columns=block, parts=cdiv(columns, block), stages=stages)


def with_fewer_rows(tile: RowTile, M: int, vector: int, chip: Chip, share: int = 1) -> RowTile:
    """Return the tile with fewer rows where M is so small that multiprocessors would be idle.

    It then has at most as many CTAs as a ``share``-th of the multiprocessors. Each thread keeps whole vectors of
    ``vector`` elements, and so its columns: the order of a row's sum stays the same.
    """
    if tile.parts > 1 and not tile.cluster:
        return tile
    vector_columns = tile.warps * 32 * vector
    room = chip.multiprocessors
    if chip.max_active_clusters and tile.cluster:
        room = chip.max_active_clusters(tile.parts, tile.ctas_per_sm)
    rows = tile.rows
    while rows > 1 and rows * tile.columns >= 2 * vector_columns and share * cdiv(M, rows // 2) <= room:
        rows //= 2
    return replace(tile, rows=rows)


# A thread adds up this many float32 elements of a row in a chain at the most; longer chains are split into segments.
_CHAIN = 8


def forward_segments(tile: RowTile, itemsize: int) -> int:
    """Return into how many segments a CTA's columns fall, in each of which every thread holds a vector.

    Elements of the same index in all segments are added up as float32 first, eight at the most: with packed elements
    the two of a word too. 1 where a thread holds no more than eight elements anyway.
    """
    threads = tile.warps * 32
    if tile.columns <= _CHAIN * threads:
        return 1
    return min(tile.columns * itemsize // (threads * VECTOR_BYTES), _CHAIN * itemsize // 4)


# For the forward pass of longer rows, and of those that would leave much of a tile empty: speeds in 16 bits, and in
# float32. An SM has room for eight CTAs in clusters, however small they are.
FORWARD_CLUSTER_TILES = (
    RowTile(1, 1024, 8, 1, 8, prefetch=True, cluster=True),  # 6553×5120: 72 and 88 % of a copy
    RowTile(1, 2048, 8, 2, 6, prefetch=True, cluster=True),  # 3355×10000: 77 and 96
    RowTile(1, 4096, 8, 4, 3, prefetch=True, cluster=True),  # 2048×32768: 74 and 92; 4096×16384 79 and 91
)
# By itemsize: as _WHOLE_ROWS.
_FORWARD_WHOLE_ROWS = {2: (4096, 16384, 1.4), 4: (4096, 8192, 1.4)}


def forward_row_tile(columns: int, itemsize: int, chip: Chip) -> RowTile:
    """Choose the tile of LayerNorm forward: one row a CTA, a warp for every 1024 columns; or parts of a row."""
    width = next_power_of_2(columns)
    largest = 2 * chip.max_tile_elements
    tile = _cluster_tile(columns, _FORWARD_WHOLE_ROWS[itemsize], FORWARD_CLUSTER_TILES, chip)
    if tile is not None:
        return tile
    if itemsize == 2 and width > largest:  # 63 % of a copy at 2048×32768, 59 at 1024×65536, 51 at 512×262144
        block, warps, ctas_per_sm = (4096, 4, 4) if width <= 65536 else (8192, 8, 2)
        block = min(block, chip.max_tile_elements)
        stages = fit_stages(3, ctas_per_sm, block * itemsize, chip)
        return RowTile(1, block, cdiv(columns, block), warps, ctas_per_sm, False, stages)
    if width > largest:
        block = min(2048, chip.max_tile_elements)
        return RowTile(2, block, cdiv(columns, block), 4, 3, False, fit_stages(4, 3, 2 * block * itemsize, chip))
    rows = min(max(min(1024, chip.max_tile_elements) // width, 1), 32)
    warps = min(max(rows * width // 1024, 1), 8 if itemsize == 2 else 16)
    ctas_per_sm = 1 if width > 8192 else 16 // warps
    return RowTile(rows, width, 1, warps, ctas_per_sm, False, fit_stages(3, ctas_per_sm, rows * width * itemsize, chip))
