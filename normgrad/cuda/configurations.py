"""How the work is cut into tiles: pure functions of sizes, element size and chip.

What decides the order of a row's or group's sum (the tile and its warps) depends on the row or group alone, never on
how many of them there are: so a row's result has the same bits in every batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

VECTOR_ACCESS = 16  # bytes


@dataclass(frozen=True, slots=True)
class Chip:
    """What of a GPU matters here. ``concurrent``: programs of a launch can wait for each other.

    ``clusters``: how many clusters of so many programs run side by side, so many programs on an SM; None where the
    GPU has none.
    """

    multiprocessors: int
    concurrent: bool = True
    clusters: Callable[[int, int], int] | None = None
    largest_tile: int = 8192  # elements that a program may hold of each tensor
    shared_memory: int = 228 * 1024  # bytes of a multiprocessor


@dataclass(frozen=True, slots=True)
class RowTile:
    """A tile of LayerNorm: ``parts`` programs hold ``rows`` rows, ``columns`` each.

    ``resident`` programs of ``warps`` warps run side by side on a multiprocessor. Where programs share rows, results
    follow ``later`` turns after the sums. ``exact``: float32 is computed with as float64, which takes small tiles.
    """

    rows: int
    columns: int
    parts: int
    warps: int
    resident: int
    prefetch: bool = True
    stages: int = 1
    later: int = 1
    exact: bool = False
    cluster: bool = False


@dataclass(frozen=True, slots=True)
class GroupTile:
    """A tile of GroupNorm: places × groups × channels of a group, and in how many parts a group is cut either way."""

    places: int
    groups: int
    channels: int
    place_parts: int
    channel_parts: int
    warps: int
    resident: int
    stages: int = 1

    @property
    def parts(self) -> int:
        return self.place_parts * self.channel_parts


@dataclass(frozen=True, slots=True)
class ChannelsTile:
    """Tiles of GroupNorm with the channels side by side: a program sums up ``steps`` of places × channels.

    Its results are made in tiles of their own, of as many channels.
    """

    channels: int
    places: int
    steps: int
    warps: int
    resident: int
    stages: int
    result_places: int
    result_warps: int
    result_resident: int


@dataclass(frozen=True, slots=True)
class StreamTile:
    """A tile of BatchNorm's steps: rows of ``places`` places of a sample × channels.

    With a ``stretch``, that many numbers of a sample side by side, whatever channels they belong to, take the place of
    the channels, and samples that of the places.
    """

    rows: int
    places: int
    channels: int
    warps: int
    stretch: int = 0


@dataclass(frozen=True, slots=True)
class SumsTile:
    """A tile of BatchNorm's sums: as ``StreamTile``, ``fold`` numbers of which are added up at once."""

    rows: int
    places: int
    channels: int
    warps: int
    resident: int
    stages: int
    fold: int
    stretch: int = 0


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
# For longer rows, and those that would leave much of such a tile empty: the programs of a cluster share them. Tiles
# of stages load into registers ahead only where a program has all of its columns.
CLUSTER_ROW_TILES = {
    "float32": (
        Measured(RowTile(4, 512, 8, 2, 4, prefetch=True, cluster=True), "16384×2560", 96),
        Measured(RowTile(4, 1024, 8, 4, 2, prefetch=True, cluster=True), "8192×8192", 98),
        Measured(RowTile(4, 2048, 8, 8, 1, prefetch=True, cluster=True), "4096×16384", 97),
    ),
    "pairs": (
        Measured(RowTile(2, 512, 8, 1, 8, prefetch=False, stages=3, cluster=True), "16384×2560", 79),
        Measured(RowTile(2, 1024, 8, 2, 4, prefetch=False, stages=4, cluster=True), "8192×8192", 80),
        Measured(RowTile(2, 2048, 8, 4, 2, prefetch=True, stages=3, cluster=True), "4096×16384", 75),
        Measured(RowTile(2, 4096, 8, 8, 1, prefetch=True, stages=4, cluster=True), "2048×32768", 72),
    ),
    "singles": (
        Measured(RowTile(1, 1024, 8, 2, 4, prefetch=True, cluster=True), "8192×5001", 50),
        Measured(RowTile(1, 2048, 8, 4, 2, prefetch=True, cluster=True), "4096×16001", 0),
    ),
}
# Columns up to which a program alone with its rows is faster, and how much of a tile it may leave empty for that.
_ALONE = {"float32": (4096, 1.2), "pairs": (4096, 1.4), "singles": (1024, 1.4)}
_SHARED_FROM = 1024
# For rows longer still, or on GPUs without clusters: programs anywhere share them.
SHARED_ROW_TILES = {
    "float32": (
        Measured(RowTile(2, 1024, 8, 4, 3, prefetch=False, stages=4), "8192×8192", 93),
        Measured(RowTile(4, 1024, 32, 4, 2, prefetch=False, stages=4), "4096×16384", 94),
        Measured(RowTile(2, 1024, 64, 4, 3, prefetch=False, stages=4), "1024×65536", 86),
        Measured(RowTile(2, 4096, 64, 8, 1, prefetch=False, stages=4), "512×262144", 73),
    ),
    "pairs": (
        Measured(RowTile(2, 2048, 16, 4, 2, prefetch=False, stages=3, later=2), "4096×16384", 71),
        Measured(RowTile(2, 4096, 16, 8, 1, prefetch=False, stages=3, later=2), "1024×65536", 67),
        Measured(RowTile(2, 2048, 128, 4, 2, prefetch=False, stages=3), "512×262144", 68),
    ),
    "singles": (Measured(RowTile(1, 2048, 64, 4, 2, prefetch=True), "667×50257", 42),),
}


def kind_of_numbers(itemsize: int, single: bool) -> str:
    """How numbers come, by which tiles are chosen; those of 16 bits perhaps as single ones."""
    if itemsize == 4:
        return "float32"
    return "singles" if single else "pairs"


def staged(stages: int, resident: int, nbytes: int, chip: Chip) -> int:
    """As many stages as asked for, or as the shared memory has room for where ``nbytes`` are loaded at a time."""
    room = chip.shared_memory // resident - 2048  # what the hardware, the sums and the statistics take
    return max(min(stages, 1 + room // nbytes), 1)


def power_of_two(size: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(size - 1, 0).bit_length()


def blocks(size: int, block: int) -> int:
    """How many blocks cover a size."""
    return -(-size // block)


def _even_block(size: int, largest: int, spare: float = 1.34, smallest: int = 256) -> int:
    """The largest power of two up to ``largest`` whose blocks cover a size with little to spare."""
    block = min(power_of_two(size), largest)
    while block > smallest and blocks(size, block) * block > spare * size:
        block //= 2
    return block


def _in_cluster(columns: int, tiles: Sequence[RowTile], nbytes: int, chip: Chip) -> RowTile | None:
    """The first tile of which a cluster has enough for a row, of ``nbytes`` a column; None where there is none."""
    for tile in tiles:
        parts = blocks(columns, tile.columns)
        if parts <= tile.parts and chip.clusters is not None and chip.clusters(parts, tile.resident):
            stages = staged(tile.stages, tile.resident, tile.rows * tile.columns * nbytes, chip)
            return replace(tile, parts=parts, stages=stages)
    return None


def row_tile(columns: int, itemsize: int, chip: Chip, single: bool = False) -> RowTile:
    """The tile for rows of so many columns: the narrowest that holds a row, or parts of one."""
    width = power_of_two(columns)
    kind = kind_of_numbers(itemsize, single)
    whole, clusters, shared = (
        [measured.tile for measured in tiles[kind]] for tiles in (ROW_TILES, CLUSTER_ROW_TILES, SHARED_ROW_TILES)
    )
    most, spare = _ALONE[kind]
    if columns > most or (columns > _SHARED_FROM and width > spare * columns):
        tile = _in_cluster(columns, clusters, 2 * itemsize, chip)
        if tile is not None:
            masked = tile.columns * tile.parts != columns
            return replace(tile, prefetch=False) if tile.stages > 1 and masked else tile
    for tile in [NARROW, *whole] if kind == "float32" else whole:
        if columns <= tile.columns and width <= chip.largest_tile:
            rows = tile.rows * (tile.columns // width)
            return replace(
                tile,
                columns=width,
                rows=rows,
                stages=staged(tile.stages, tile.resident, 2 * rows * width * itemsize, chip),
            )
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


# For the forward pass of longer rows, and of those that would leave much of a tile empty. 67 % of a copy at 16384×5120
# and 6553×10000 in 16 bits, 68 at 2048×32768; in float32 81, 82 and 78.
FORWARD_CLUSTER_TILES = tuple(
    RowTile(1, 1024 * warps, 8, warps, 16 // warps, prefetch=False, stages=3, cluster=True) for warps in (1, 2, 4)
)
_FORWARD_ALONE = (4096, 16384, 1.4)


def forward_row_tile(columns: int, itemsize: int, chip: Chip) -> RowTile:
    """The tile for LayerNorm's forward pass: a row a program with a warp for every 1024 columns, or parts of two."""
    width = power_of_two(columns)
    largest = 2 * chip.largest_tile
    always, most, spare = _FORWARD_ALONE
    if columns > most or (columns > always and width > spare * columns):
        tile = _in_cluster(columns, FORWARD_CLUSTER_TILES, itemsize, chip)
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
# registers as those of 32: the tiles are small.
FLAT_TILES = {
    "float32": (
        Measured(RowTile(8, 256, 1, 4, 3, prefetch=False, stages=3), "", 0),
        Measured(RowTile(4, 512, 1, 4, 3, prefetch=False, stages=3), "4×256×49", 45),
        Measured(RowTile(2, 1024, 1, 4, 3, prefetch=False, stages=3), "256×512×49", 68),
        Measured(RowTile(1, 2048, 1, 4, 3, prefetch=False, stages=3), "32×1024×49", 37),
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
    "float32": Measured(RowTile(2, 1024, 0, 4, 3, prefetch=False, stages=3), "", 0),
    "pairs": Measured(RowTile(1, 2048, 0, 4, 3, prefetch=False, stages=3), "64×64×3025", 40),
}


def flat_tile(columns: int, itemsize: int, chip: Chip) -> RowTile:
    """The tile for GroupNorm's backward pass where a group of so many numbers is a row, each of so many bytes."""
    width = power_of_two(columns)
    kind = kind_of_numbers(itemsize, False)
    for tile in (measured.tile for measured in FLAT_TILES[kind]):
        if width <= min(tile.columns, chip.largest_tile):
            rows = tile.rows * (tile.columns // width)
            stages = staged(tile.stages, tile.resident, 2 * rows * width * itemsize, chip)
            return replace(tile, columns=width, rows=rows, stages=stages)
    tile = SHARED_FLAT_TILES[kind].tile
    block = min(tile.columns, chip.largest_tile)
    stages = staged(tile.stages, tile.resident, 2 * tile.rows * block * itemsize, chip)
    return replace(tile, columns=block, parts=blocks(columns, block), stages=stages)


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


@dataclass(frozen=True, slots=True)
class GroupWork:
    """How many elements of each tensor of GroupNorm a program holds, its warps, and programs on a multiprocessor.

    With the problem in 32 groups (8 of the smallest) that it was chosen on, and its speed there in % of a device copy.
    """

    elements: int
    warps: int
    resident: int
    problem: str
    percent: float


# Chosen as ROW_TILES are. By the number of tensors read and the bytes of an element; each holds whole groups.
GROUP_WORK = {
    (1, 2): (
        GroupWork(4096, 4, 4, "2×64×64", 77),
        GroupWork(8192, 4, 3, "64×64×3136", 90),
        GroupWork(16384, 8, 2, "32×512×1024", 89),
    ),
    (1, 4): (GroupWork(4096, 4, 3, "2×64×64", 69), GroupWork(8192, 8, 2, "64×64×3136", 89)),
    (2, 2): (GroupWork(4096, 4, 4, "2×64×64", 58), GroupWork(8192, 4, 3, "64×64×3136", 79)),
    (2, 4): (GroupWork(4096, 4, 2, "2×64×64", 65), GroupWork(8192, 8, 1, "64×64×3136", 82)),
}
# For larger groups, which several programs share: of few places, and of more.
SHARED_GROUP_WORK = {
    (1, 2): (GroupWork(4096, 2, 6, "32×512×1024", 78), GroupWork(8192, 4, 3, "16×320×4096", 79)),
    (1, 4): (GroupWork(4096, 4, 4, "32×512×1024", 88), GroupWork(4096, 4, 4, "16×320×4096", 86)),
    (2, 2): (GroupWork(4096, 2, 4, "32×512×1024", 77), GroupWork(8192, 4, 2, "16×320×4096", 77)),
    (2, 4): (GroupWork(2048, 4, 4, "32×512×1024", 87), GroupWork(2048, 4, 4, "16×320×4096", 89)),
}
_FEW_PLACES = 4095


def _group_work(D: int, HxW: int, itemsize: int, tensors: int, chip: Chip) -> GroupWork:
    """The smallest that holds a group, or that for parts of one."""
    size = power_of_two(HxW) * power_of_two(D)
    largest = chip.largest_tile * (2 if itemsize == 2 else 1)
    for work in GROUP_WORK[tensors, itemsize]:
        if size <= min(work.elements, largest):
            return work
    few, more = SHARED_GROUP_WORK[tensors, itemsize]
    return few if HxW <= _FEW_PLACES else more


def group_tile(D: int, HxW: int, group: int, itemsize: int, chip: Chip, tensors: int = 2) -> GroupTile:
    """The tile for groups of D channels of HxW places, read from one or two tensors."""
    work = _group_work(D, HxW, itemsize, tensors, chip)
    room = min(work.elements, chip.largest_tile * (2 if itemsize == 2 else 1))
    # A thread has no more than 64 numbers of a channel to add up.
    places = _even_block(HxW, room if tensors == 1 else min(room, 4096))
    channels = min(power_of_two(D), room // places)
    fits = places >= HxW and channels >= D
    groups = min(power_of_two(group), max(room // (places * channels) // 2, 1)) if fits else 1
    parts = blocks(HxW, places), blocks(D, channels)
    nbytes = groups * channels * (tensors * places * itemsize + 8)  # with a channel's weight and bias
    stages = staged(3, work.resident, nbytes, chip)
    return GroupTile(places, groups, channels, *parts, work.warps, work.resident, stages)


#: In how many parts the places of a sample are cut at the most, where its channels lie side by side.
MOST_PARTS = 64


def channels_tile(C: int, HxW: int, group: int, itemsize: int, chip: Chip, tensors: int = 2) -> ChannelsTile:
    """The tile for channels side by side, in one or two tensors: blocks of 128 bytes.

    On (16, 320, 4096), (32, 512, 1024), (8, 128, 65536), (64, 64, 3136) and (6, 384, 3600) in 32 groups: backward in 16
    bits 50, 49, 56, 50, 47 % of a copy, in float32 57, 56, 61, 54, 53; forward 52, 53, 58, 49, 52 and 58, 60, 63, 54,
    53.
    """
    channels = min(power_of_two(C), 128 // itemsize, max(chip.largest_tile // 16, 1))
    # Many groups in a block are many sums to collect from each part, so the parts are fewer.
    many_groups = channels // (C // group) >= 32
    many_places = HxW > 16384
    part = 512 if tensors == 1 or many_groups else 256
    at_once = tensors == itemsize == 2 and (many_groups or many_places)  # a tile in registers, none loaded ahead
    places = min(power_of_two(HxW), 128 if tensors == 1 or at_once else 64, chip.largest_tile // channels)
    steps = max(blocks(min(HxW, part), places), blocks(HxW, MOST_PARTS * places))
    nbytes = tensors * places * channels * itemsize
    if tensors == 1:
        return ChannelsTile(channels, places, steps, 4, 5, staged(3, 5, nbytes, chip), places, 4, 4)
    stages = 1 if at_once else staged(3, 4, nbytes, chip)
    if at_once and many_places:
        return ChannelsTile(channels, places, steps, 4, 4, stages, places, 4, 3)
    return ChannelsTile(channels, places, steps, 4, 4, stages, min(places, 64), 4, 5)


# Up to so many places of a channel, a tile of results goes over several channels even if that makes no larger vectors.
_FEW_CHANNEL_PLACES = 256


def _stream_shape(N: int, C: int, P: int, room: int, places_adjacent: bool) -> tuple[int, int, int]:
    """Rows, places and channels of a tile of ``room`` elements at most, for N samples, C channels and P places."""
    if places_adjacent:
        divisor = min(P & -P, room)  # a power of two
        places = divisor if divisor >= 64 else _even_block(P, room, spare=1.07, smallest=64)
        return min(power_of_two(N * blocks(P, places)), room // places), places, 1
    channels = min(power_of_two(C), 64, room)
    places = min(power_of_two(P), room // channels)
    return min(power_of_two(N), room // (channels * places)), places, channels


def stream_tile(
    N: int,
    C: int,
    P: int,
    itemsize: int,
    chip: Chip,
    places_adjacent: bool,
    access: int = VECTOR_ACCESS,
    flat_access: int = 0,
) -> StreamTile:
    """The tile for what BatchNorm does element by element: 64 bytes of each tensor a thread, as for its sums."""
    warps = 4
    room = min(warps * 2048 // itemsize, chip.largest_tile)
    if flat_access > access or (flat_access and access < VECTOR_ACCESS and P <= _FEW_CHANNEL_PLACES):
        width = room // 16  # 32 bytes a thread
        return StreamTile(1, min(power_of_two(N), 8), width, warps, width)
    return StreamTile(*_stream_shape(N, C, P, room, places_adjacent), warps)


def entries(P: int, stretch: int) -> int:
    """In how many stretches, side by side from the first channel on, one of P places is at the most."""
    return max(P // stretch, 1) if stretch % P == 0 or P % stretch == 0 else (P - 2) // stretch + 2


def channels_within(P: int, stretch: int) -> int:
    """Of how many channels of P places such a stretch has numbers at the most."""
    return max(stretch // P, 1) if stretch % P == 0 or P % stretch == 0 else (stretch - 2) // P + 2


def stretches(P: int, itemsize: int, width: int, access: int) -> list[int]:
    """What of a sample a tile of some width may go over: whole channels that begin and end with a vector, or any."""
    channels = access // math.gcd(access, P * itemsize)
    whole = width // (channels * P) * channels * P
    return [whole] * (2 * whole > width) + [width]


@functools.cache
def flat_sums_tile(N: int, C: int, P: int, itemsize: int, chip: Chip, access: int) -> SumsTile:
    """The tile for BatchNorm's sums that goes over several channels, a vector of each sample a thread.

    So no thread has a sum to add to another's before those of a channel are added up.
    """
    warps = 4
    samples, resident, stages = (8, 2, 4) if itemsize == 2 else (4, 3, 4)
    width = min(32 * warps * VECTOR_ACCESS // itemsize, chip.largest_tile // samples)
    stages = staged(stages, resident, 2 * samples * width * itemsize, chip)

    def cost(stretch: int) -> float:
        tile = replace(widest, stretch=stretch)
        given = blocks(C * P, stretch), blocks(N, tile.places), resident, chip.multiprocessors, *load(tile, itemsize)
        return _cost(even_share(*given), *given) + (_FINISH if entries(P, stretch) > 1 else 0)

    widest = SumsTile(1, min(power_of_two(N), samples), width, warps, resident, stages, 16, width)
    return replace(widest, stretch=min(stretches(P, itemsize, width, access), key=cost))


def load(tile: SumsTile, itemsize: int) -> tuple[float, int]:
    """How much a tile has of what those of 64 bytes a thread have, and how many programs keep a multiprocessor busy."""
    if not tile.stretch:
        return 1, tile.resident
    nbytes = tile.stretch * tile.places * itemsize
    return nbytes / 8192, min(blocks(_ON_THEIR_WAY, (tile.stages - 1) * nbytes), tile.resident)


def _fewer_channels(tile: SumsTile, C: int, P: int, itemsize: int, chip: Chip) -> SumsTile:
    """Where channels lie side by side: as many a program as one launch takes, where that has it done sooner."""

    def given(tile: SumsTile) -> tuple[int, int, int, int, float, int]:
        tiles = blocks(P, tile.places)
        return blocks(C, tile.channels), tiles, tile.resident, chip.multiprocessors, *load(tile, itemsize)

    found = [tile]
    for fewer in (2, 4):
        if tile.channels * itemsize >= 64 * fewer:
            narrow = replace(tile, places=tile.places * fewer, channels=tile.channels // fewer)
            found += [narrow] * (even_share(*given(narrow)) == blocks(P, narrow.places))
    return min(found, key=lambda tile: _cost(even_share(*given(tile)), *given(tile)))


def sums_tile(
    N: int,
    C: int,
    P: int,
    itemsize: int,
    chip: Chip,
    places_adjacent: bool,
    access: int = VECTOR_ACCESS,
    flat_access: int = 0,
) -> SumsTile:
    """The tile for BatchNorm's sums: 64 bytes of each tensor a thread, ``access`` at a time.

    ``flat_access``: as many bytes at a time where a tile goes over several channels, 0 where it cannot. It does so
    where that is more, or has room for whole channels.

    Where channels lie side by side a program has many sums to add up at its end, so there are few programs. On (16,
    320, 4096), (64, 64, 3136) and (8, 128, 65536): statistics in 16 bits 88, 66, 90 % of a copy, in float32 91, 79,
    99; sums in 16 bits 89, 74, 97, in float32 94, 85, 102. With channels side by side: 65, 54, 82 and 75, 67, 94; 72,
    66, 92 and 87, 76, 100.
    """
    if flat_access:
        tile = flat_sums_tile(N, C, P, itemsize, chip, flat_access)
        if flat_access > access or stretches(P, itemsize, tile.channels, flat_access)[0] % P == 0:
            return tile
    warps = 4
    room = min(warps * 2048 // itemsize, chip.largest_tile)
    if not places_adjacent:
        resident, stages = 2, 6
    else:
        resident, stages = (3, 4) if access > itemsize else (4, 3)
    stages = staged(stages, resident, 2 * room * itemsize, chip)
    tile = SumsTile(*_stream_shape(N, C, P, room, places_adjacent), warps, resident, stages, 16)
    return tile if places_adjacent or N > 1 else _fewer_channels(tile, C, P, itemsize, chip)


# Bytes that keep a multiprocessor busy while they are on their way.
_ON_THEIR_WAY = 32768
# What the start and the end of a program that sums up cost, in tiles that the memory could have brought meanwhile, and
# another launch, which takes the parts together.
_START = 12
_FINISH = 10


def _cost(share: int, work: int, tiles: int, resident: int, multiprocessors: int, full: float, enough: int) -> float:
    """The time of sums, in tiles of 64 bytes a thread; see ``even_share`` and ``load``."""
    programs = work * blocks(tiles, share)
    rounds = blocks(programs, multiprocessors * resident)
    beside = max(min(blocks(programs, multiprocessors), resident), enough)
    return rounds * (share * beside * full + _START) + (_FINISH if share < tiles else 0)


@functools.cache
def even_share(work: int, tiles: int, resident: int, multiprocessors: int, full: float, enough: int) -> int:
    """How many tiles of each of so many pieces of work a program takes, where so many run on a multiprocessor.

    As many as have it done soonest: few multiprocessors are idle in the last round, and rounds are few.
    """

    def cost(share: int) -> float:
        return _cost(share, work, tiles, resident, multiprocessors, full, enough)

    parts = range(1, max(4 * resident * multiprocessors // max(work, 1), 1) + 1)
    return min({blocks(tiles, count) for count in parts}, key=lambda share: (cost(share), share))
