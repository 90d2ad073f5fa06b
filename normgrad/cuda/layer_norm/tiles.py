"""The tiles of rows: LayerNorm's, and GroupNorm's where a group is a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from normgrad.cuda.chip import Chip, blocks, power_of_two, staged


@dataclass(frozen=True, slots=True)
class RowTile:
    """A tile of LayerNorm: ``parts`` programs hold ``rows`` rows, ``columns`` each.

    ``resident`` programs of ``warps`` warps run side by side on a multiprocessor. ``exact``: float32
    is computed with as float64, which takes small tiles.
    """

    rows: int
    columns: int
    parts: int
    warps: int
    resident: int
    prefetch: bool = True
    stages: int = 1
    exact: bool = False
    cluster: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """A tile of LayerNorm backward, the problem it was chosen on, and its speed there in % of a device copy."""

    tile: RowTile
    problem: str
    percent: float


# For float32 rows of so few columns that each rounding is seen; chosen without a measurement.
NARROW = RowTile(8, 32, 1, 1, 16, prefetch=False, stages=3, exact=True)
# Chosen on an NVIDIA H200 (driver 580.159, PyTorch 2.11, Triton 3.6) by benchmarks/cuda_tune.py; other GPUs take the
# same. By how numbers come: as float32, as pairs of 16 bits, or of these one by one, since a row has an odd number of
# them or they lie apart (what is copied to shared memory ahead has four bytes at least). Each holds rows of up to its
# columns.
ROW_TILES = {
    "float32": (
        Measured(RowTile(32, 64, 1, 4, 3, prefetch=True), "401408×64", 93),
        Measured(RowTile(8, 128, 1, 1, 12, prefetch=False, stages=3), "262144×128", 90),
        Measured(RowTile(8, 256, 1, 4, 3, prefetch=True), "131072×256", 95.4),
        Measured(RowTile(8, 512, 1, 4, 2, prefetch=True), "65536×512", 93.6),
        Measured(RowTile(4, 1024, 1, 4, 2, prefetch=True), "32768×1024", 96.1),
        Measured(RowTile(4, 2048, 1, 8, 1, prefetch=True), "32768×2048", 96.3),
        Measured(RowTile(1, 4096, 1, 16, 1, prefetch=False, stages=4, exact=True), "16384×4096", 97),
    ),
    "pairs": (
        Measured(RowTile(8, 256, 1, 1, 8, prefetch=False, stages=3), "131072×256", 90),
        Measured(RowTile(4, 512, 1, 2, 6, prefetch=False, stages=3), "65536×512", 85.8),
        Measured(RowTile(2, 1024, 1, 2, 4, prefetch=False, stages=3), "32768×1024", 90),
        Measured(RowTile(2, 2048, 1, 4, 2, prefetch=False, stages=3), "32768×2048", 93.9),
        Measured(RowTile(2, 4096, 1, 8, 1, prefetch=False, stages=3), "16384×4096", 91),
        Measured(RowTile(1, 8192, 1, 16, 1, prefetch=False, stages=4), "8192×8192", 78),
    ),
    "singles": (Measured(RowTile(1, 1024, 1, 2, 4, prefetch=True), "32768×1001", 54),),
}
# For float32 rows of up to 256 columns that do not fill their tile. Loads into registers, whose masked lanes fetch
# nothing, have too few bytes in flight: 71, 61 and 79 % with the tiles above.
PARTIAL_ROW_TILES = (
    Measured(RowTile(16, 64, 1, 1, 8, prefetch=False, stages=3), "401408×48", 85),
    Measured(RowTile(8, 128, 1, 1, 12, prefetch=False, stages=3), "401408×96", 90),
    Measured(RowTile(8, 256, 1, 2, 4, prefetch=False, stages=3), "200704×192", 93),
)
# For longer rows, and those that would leave much of such a tile empty: the programs of a cluster share them.
CLUSTER_ROW_TILES = {
    "float32": (
        Measured(RowTile(4, 512, 8, 2, 4, prefetch=True, cluster=True), "16384×2560", 96),
        Measured(RowTile(4, 1024, 8, 4, 2, prefetch=True, cluster=True), "8192×8192", 98),
        Measured(RowTile(4, 2048, 16, 8, 1, prefetch=True, cluster=True), "2048×32768", 97),
    ),
    "pairs": (
        Measured(RowTile(2, 512, 8, 1, 8, prefetch=True, cluster=True), "5000×1280", 72),
        Measured(RowTile(2, 1024, 8, 2, 4, prefetch=True, cluster=True), "6553×5120", 83),
        Measured(RowTile(2, 2048, 8, 4, 2, prefetch=True, cluster=True), "6553×10000", 80),
        Measured(RowTile(2, 4096, 16, 8, 1, prefetch=True, cluster=True), "8192×8192", 86),
    ),
    "singles": (
        Measured(RowTile(1, 1024, 8, 2, 4, prefetch=True, cluster=True), "8192×5001", 50),
        Measured(RowTile(1, 2048, 8, 4, 2, prefetch=True, cluster=True), "4096×16001", 49),
    ),
}
# Columns up to which a program alone with its rows is faster, and how much of a tile it may leave empty for that.
_ALONE = {"float32": (4096, 1.2), "pairs": (4096, 1.4), "singles": (1024, 1.4)}
_SHARED_FROM = 1024
# What clusters may leave of the multiprocessors and their own tiles, all in all, before other tiles are faster.
_LEAST_BUSY = 0.7
# For rows longer still, or on GPUs without clusters: programs anywhere share them.
SHARED_ROW_TILES = {
    "float32": (
        Measured(RowTile(2, 1024, 8, 4, 3, prefetch=False, stages=4), "8192×8192", 93),
        Measured(RowTile(4, 1024, 32, 4, 2, prefetch=False, stages=4), "4096×16384", 94),
        Measured(RowTile(2, 1024, 64, 4, 3, prefetch=False, stages=4), "1024×65536", 86),
        Measured(RowTile(1, 2048, 128, 4, 2, prefetch=True), "512×262144", 77),
    ),
    "pairs": (
        Measured(RowTile(2, 2048, 16, 4, 2, prefetch=False, stages=3), "4096×16384", 71),
        Measured(RowTile(2, 4096, 16, 8, 1, prefetch=False, stages=3), "1024×65536", 67),
        Measured(RowTile(2, 2048, 128, 4, 2, prefetch=False, stages=3), "512×262144", 68),
    ),
    "singles": (Measured(RowTile(1, 2048, 64, 4, 2, prefetch=True), "667×50257", 42),),
}


def kind_of_numbers(itemsize: int, single: bool) -> str:
    """How numbers come, by which tiles are chosen; those of 16 bits perhaps as single ones."""
    if itemsize == 4:
        return "float32"
    return "singles" if single else "pairs"


def _in_cluster(columns: int, tiles: Sequence[RowTile], chip: Chip) -> RowTile | None:
    """The tile for rows that a cluster shares; None where there is none.

    That which leaves the least empty, of itself and of the multiprocessors: clusters need some that lie together, so
    that not all have room for them.
    """
    found, most = None, _LEAST_BUSY
    for tile in tiles:
        parts = blocks(columns, tile.columns)
        if parts <= tile.parts and chip.clusters is not None:
            programs = parts * chip.clusters(parts, tile.resident)
            busy = columns * programs / (parts * tile.columns * tile.resident * chip.multiprocessors)
            if busy > most:
                found, most = replace(tile, parts=parts), busy
    return found


def row_tile(columns: int, itemsize: int, chip: Chip, single: bool = False) -> RowTile:
    """The tile for rows of so many columns: the narrowest that holds a row, or parts of one."""
    width = power_of_two(columns)
    kind = kind_of_numbers(itemsize, single)
    whole, clusters, shared = (
        [measured.tile for measured in tiles[kind]] for tiles in (ROW_TILES, CLUSTER_ROW_TILES, SHARED_ROW_TILES)
    )
    most, spare = _ALONE[kind]
    if columns > most or (columns > _SHARED_FROM and width > spare * columns):
        tile = _in_cluster(columns, clusters, chip)
        if tile is not None:
            return tile
    if kind == "float32":
        partial = [measured.tile for measured in PARTIAL_ROW_TILES]
        whole = [NARROW, *(partial if columns < width <= partial[-1].columns else whole)]
    return _alone_or_shared(columns, itemsize, whole, shared, chip)


def _alone_or_shared(
    columns: int, itemsize: int, whole: Sequence[RowTile], shared: Sequence[RowTile], chip: Chip
) -> RowTile:
    """The first tile that holds rows of so many columns, each of so many bytes in two tensors; or parts of one."""
    width = power_of_two(columns)
    for tile in whole:
        if width <= min(tile.columns, chip.largest_tile):
            rows = tile.rows * (tile.columns // width)
            stages = staged(tile.stages, tile.resident, 2 * rows * width * itemsize, chip)
            return replace(tile, columns=width, rows=rows, stages=stages)
    tile = next((found for found in shared if columns <= found.columns * found.parts), shared[-1])
    block = min(tile.columns, chip.largest_tile)
    stages = staged(tile.stages, tile.resident, 2 * tile.rows * block * itemsize, chip)
    return replace(tile, columns=block, parts=blocks(columns, block), stages=stages)


def with_few_rows(tile: RowTile, M: int, vector: int, chip: Chip) -> RowTile:
    """The tile for M rows, with fewer of them at a time where they are so few that each program has one tile.

    Threads keep whole vectors, and so their columns: the order in which a row is summed up stays the same.
    """
    if tile.parts > 1 and not tile.cluster:
        return tile
    at_once = tile.warps * 32 * vector
    room = chip.clusters(tile.parts, tile.resident) if chip.clusters and tile.cluster else chip.multiprocessors
    rows = tile.rows
    while rows > 1 and rows * tile.columns >= 2 * at_once and blocks(M, rows // 2) <= room:
        rows //= 2
    return replace(tile, rows=rows)


# For the forward pass of longer rows, and of those that would leave much of a tile empty: speeds in 16 bits, and in
# float32. A multiprocessor has room for eight programs in clusters, however small they are.
FORWARD_CLUSTER_TILES = (
    RowTile(1, 1024, 8, 1, 8, prefetch=True, cluster=True),  # 6553×5120: 72 and 88 % of a copy
    RowTile(1, 2048, 8, 2, 6, prefetch=True, cluster=True),  # 3355×10000: 77 and 96
    RowTile(1, 4096, 8, 4, 3, prefetch=True, cluster=True),  # 2048×32768: 74 and 92; 4096×16384 79 and 91
)
# Columns up to which a program is always alone with its rows, and is so if it leaves less of its tile empty than this.
_FORWARD_ALONE = {2: (4096, 16384, 1.4), 4: (4096, 8192, 1.4)}


def forward_row_tile(columns: int, itemsize: int, chip: Chip) -> RowTile:
    """The tile for LayerNorm's forward pass: a row a program, a warp for every 1024 columns; or parts of one."""
    width = power_of_two(columns)
    largest = 2 * chip.largest_tile
    always, most, spare = _FORWARD_ALONE[itemsize]
    if columns > most or (columns > always and width > spare * columns):
        tile = _in_cluster(columns, FORWARD_CLUSTER_TILES, chip)
        if tile is not None:
            return tile
    if itemsize == 2 and width > largest:  # 63 % of a copy at 2048×32768, 59 at 1024×65536, 51 at 512×262144
        block, warps, resident = (4096, 4, 4) if width <= 65536 else (8192, 8, 2)
        block = min(block, chip.largest_tile)
        stages = staged(3, resident, block * itemsize, chip)
        return RowTile(1, block, blocks(columns, block), warps, resident, False, stages)
    if width > largest:
        block = min(2048, chip.largest_tile)
        return RowTile(2, block, blocks(columns, block), 4, 3, False, staged(4, 3, 2 * block * itemsize, chip))
    rows = min(max(min(1024, chip.largest_tile) // width, 1), 32)
    warps = min(max(rows * width // 1024, 1), 8 if itemsize == 2 else 16)
    resident = 1 if width > 8192 else 16 // warps
    return RowTile(rows, width, 1, warps, resident, False, staged(3, resident, rows * width * itemsize, chip))


# For GroupNorm's groups as rows. Results of float32 are computed as float64, and single numbers of 16 bits take as many
# registers as those of 32: the tiles are small. Chosen as ROW_TILES are, in 32 groups (0: not timed).
FLAT_TILES = {
    "float32": (
        Measured(RowTile(8, 256, 1, 4, 3, prefetch=False, stages=3), "4096×512×1", 0),
        Measured(RowTile(4, 512, 1, 4, 3, prefetch=False, stages=3), "4×256×49", 45),
        Measured(RowTile(2, 1024, 1, 4, 3, prefetch=False, stages=3), "256×512×49", 68),
        Measured(RowTile(1, 2048, 1, 8, 1, prefetch=False, stages=3), "32×1024×49", 51),
        Measured(RowTile(1, 4096, 1, 8, 1, prefetch=False, stages=4), "64×2048×49", 57),
    ),
    "pairs": (
        Measured(RowTile(8, 256, 1, 1, 8, prefetch=False, stages=3), "4096×512×1", 42),
        Measured(RowTile(4, 512, 1, 2, 6, prefetch=False, stages=3), "4×256×49", 47),
        Measured(RowTile(2, 1024, 1, 2, 4, prefetch=False, stages=3), "256×512×49", 58),
        Measured(RowTile(2, 2048, 1, 4, 2, prefetch=False, stages=3), "32×1024×49", 43),
        Measured(RowTile(2, 4096, 1, 8, 1, prefetch=False, stages=3), "64×2048×49", 53),
    ),
}
# For longer ones, which several programs share.
SHARED_FLAT_TILES = {
    "float32": Measured(RowTile(1, 1024, 0, 4, 3, prefetch=False, stages=4), "64×64×3025", 0),
    "pairs": Measured(RowTile(1, 2048, 0, 4, 3, prefetch=False, stages=3), "64×64×3025", 40),
}


def flat_tile(columns: int, itemsize: int, chip: Chip) -> RowTile:
    """The tile for GroupNorm's backward pass where a group of so many numbers is a row, each of so many bytes."""
    kind = kind_of_numbers(itemsize, False)
    whole = [measured.tile for measured in FLAT_TILES[kind]]
    return _alone_or_shared(columns, itemsize, whole, [SHARED_FLAT_TILES[kind].tile], chip)


def flat_forward_tile(columns: int, itemsize: int, chip: Chip) -> RowTile:
    """The tile for GroupNorm's forward pass where a group is a row: sixteen numbers a thread.

    Beside them a thread keeps their weights, and the biases.
    """
    width = power_of_two(columns)
    block = min(width, chip.largest_tile)
    if width > block:
        block = min(4096 if itemsize == 2 else 2048, chip.largest_tile)
    rows = min(max(min(512, chip.largest_tile) // block, 1), 32)
    warps = max(rows * block // 512, 1)
    resident = 12 // warps if itemsize == 4 and warps <= 4 else 16 // warps
    stages = staged(3, resident, rows * block * itemsize, chip)
    return RowTile(rows, block, blocks(columns, block), warps, resident, False, stages)


_LINE = 128  # bytes of the cache


def as_rows(D: int, HxW: int, itemsize: int, tensors: int) -> bool:
    """Whether groups of D channels of HxW places, read from one or two tensors, are rows, if they lie side by side.

    They are where channels begin at multiples of 4 bytes at the best, so that a thread would have every number's
    address in registers: in place of 196 and 259 µs (16 bits and float32) the backward pass of 64×2048×49 in 32 groups
    takes 23 and 36, of 256×512×49 21 and 30 in place of 50 and 92. Forward, not where rows are shorter than a line of
    the cache: 4096×512×1 takes 11 µs as rows, and 10 otherwise.
    """
    one_by_one = HxW * itemsize % 8 != 0
    return D > 1 and one_by_one and (tensors == 2 or D * HxW * itemsize >= _LINE)
