"""How the work is cut into tiles: pure functions of sizes, element size and chip.

What decides the order of a row's or group's sum (the tile and its warps) depends on the row or group alone, never on
how many of them there are: so a row's result has the same bits in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Chip:
    """What of a GPU matters here. ``concurrent``: programs of a launch can wait for each other."""

    multiprocessors: int
    concurrent: bool = True
    largest_tile: int = 8192  # elements that a program may hold of each tensor


@dataclass(frozen=True, slots=True)
class RowTile:
    """A tile of LayerNorm: ``parts`` programs hold ``rows`` rows, ``columns`` each.

    ``resident`` programs of ``warps`` warps run side by side on a multiprocessor.
    """

    rows: int
    columns: int
    parts: int
    warps: int
    resident: int
    prefetch: bool = True
    stages: int = 1


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
    prefetch: bool = True
    stages: int = 1

    @property
    def parts(self) -> int:
        return self.place_parts * self.channel_parts


@dataclass(frozen=True, slots=True)
class ChannelsTile:
    """A tile of GroupNorm with the channels side by side: places × channels of whole groups, ``steps`` in a stretch."""

    places: int
    channels: int
    groups: int
    steps: int
    parts: int
    warps: int
    resident: int
    stages: int = 3


@dataclass(frozen=True, slots=True)
class StreamTile:
    """A tile of BatchNorm's steps: samples × places × channels."""

    samples: int
    places: int
    channels: int
    warps: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A tile of LayerNorm backward, the problem it was chosen on, and its speed there in % of a device copy."""

    tile: RowTile
    problem: str
    percent: float


# Chosen on an NVIDIA H200 (driver 580.159, PyTorch 2.11, Triton 3.6) by benchmarks/cuda_tune.py; other GPUs take the
# same. By the bytes of an element; each holds rows of up to its columns.
ROW_TILES = {
    2: (
        Measured(RowTile(8, 256, 1, 1, 8, prefetch=False, stages=3), "131072×256", 83.5),
        Measured(RowTile(4, 512, 1, 2, 6, prefetch=False, stages=3), "65536×512", 85.8),
        Measured(RowTile(2, 1024, 1, 4, 4, prefetch=False, stages=3), "32768×1024", 88.3),
        Measured(RowTile(2, 2048, 1, 4, 2, prefetch=False, stages=3), "32768×2048", 93.9),
        Measured(RowTile(2, 4096, 1, 8, 1, prefetch=False, stages=4), "16384×4096", 92.3),
    ),
    4: (
        Measured(RowTile(8, 256, 1, 4, 3, prefetch=True), "131072×256", 95.4),
        Measured(RowTile(8, 512, 1, 4, 2, prefetch=True), "65536×512", 93.6),
        Measured(RowTile(4, 1024, 1, 4, 2, prefetch=True), "32768×1024", 96.1),
        Measured(RowTile(4, 2048, 1, 8, 1, prefetch=True), "32768×2048", 96.3),
        Measured(RowTile(2, 4096, 1, 8, 1, prefetch=True), "16384×4096", 90.6),
    ),
}
# For longer rows, which several programs share; docs/performance_gpu.md has later measurements of these.
SHARED_ROW_TILES = {
    2: (
        Measured(RowTile(4, 1024, 8, 4, 3, prefetch=False), "8192×8192", 51.8),
        Measured(RowTile(2, 1024, 16, 4, 4, prefetch=False), "4096×16384", 49.1),
        Measured(RowTile(4, 1024, 64, 4, 4, prefetch=False), "1024×65536", 40.9),
        Measured(RowTile(2, 4096, 64, 8, 1, prefetch=True), "512×262144", 37.0),
    ),
    4: (
        Measured(RowTile(4, 1024, 8, 4, 3, prefetch=False), "8192×8192", 86.9),
        Measured(RowTile(2, 1024, 16, 4, 4, prefetch=False), "4096×16384", 75.9),
        Measured(RowTile(2, 2048, 32, 8, 2, prefetch=False), "1024×65536", 61.0),
        Measured(RowTile(2, 4096, 64, 8, 1, prefetch=True), "512×262144", 47.5),
    ),
}


def power_of_two(size: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(size - 1, 0).bit_length()


def blocks(size: int, block: int) -> int:
    """How many blocks cover a size."""
    return -(-size // block)


def _even_block(size: int, largest: int) -> int:
    """The largest power of two up to ``largest`` whose blocks cover a size with at most a third to spare."""
    block = min(power_of_two(size), largest)
    while block > 256 and blocks(size, block) * block > 1.34 * size:
        block //= 2
    return block


def row_tile(columns: int, itemsize: int, chip: Chip) -> RowTile:
    """The tile for rows of so many columns: the narrowest measured that holds a row, or parts of the widest."""
    width = power_of_two(columns)
    whole, shared = ROW_TILES[itemsize], SHARED_ROW_TILES[itemsize]
    for measured in whole:
        tile = measured.tile
        if columns <= tile.columns and width <= chip.largest_tile:
            return replace(tile, columns=width, rows=tile.rows * (tile.columns // width))
    tile = next((found.tile for found in shared if columns <= found.tile.columns * found.tile.parts), shared[-1].tile)
    block = min(tile.columns, chip.largest_tile)
    return replace(tile, columns=block, parts=blocks(columns, block))


def forward_row_tile(columns: int, chip: Chip) -> RowTile:
    """The tile for LayerNorm's forward pass: 16 elements a thread, and as many threads as there is room for."""
    room = min(16384, chip.largest_tile)
    block = min(power_of_two(columns), room if columns <= room else room // 2)
    rows = max(min(2048, chip.largest_tile) // block, 1)
    warps = min(max(rows * block // 512, 4), 32)
    return RowTile(rows, block, blocks(columns, block), warps, 32 // warps, prefetch=False)


def group_tile(D: int, HxW: int, group: int, itemsize: int, chip: Chip, places_adjacent: bool) -> GroupTile:
    """The tile for groups of D channels of HxW places."""
    room = min(4096, chip.largest_tile)
    if places_adjacent:
        if power_of_two(HxW) * power_of_two(D) == 2 * room:
            room *= 2  # a whole group, rather than two halves that wait for each other
        places = _even_block(HxW, room)
        channels = min(power_of_two(D), room // places)
        fits = places >= HxW and channels >= D
        groups = min(power_of_two(group), max(room // (places * channels) // 2, 1)) if fits else 1
    else:
        channels = min(power_of_two(D), room)
        adjacent = max(256 // (D * itemsize), 1)
        groups = min(power_of_two(group), power_of_two(adjacent), room // channels) if channels >= D else 1
        places = min(power_of_two(HxW), room // (channels * groups))
    parts = blocks(HxW, places), blocks(D, channels)
    if parts == (1, 1) and places * groups * channels > 4096:
        return GroupTile(
            places, groups, channels, *parts, 8, 2 if itemsize == 4 else 1, False, 1 if itemsize == 4 else 3
        )
    return GroupTile(places, groups, channels, *parts, 4, 4, False)


def channels_tile(D: int, HxW: int, group: int, itemsize: int, chip: Chip) -> ChannelsTile | None:
    """The tile for groups of D channels side by side; None where a group has too many for one."""
    width = max(power_of_two(D), min(64, chip.largest_tile))
    if width > min(1024, chip.largest_tile):
        return None
    most = min(group, width // D)
    aligned = [groups for groups in range(most, most // 2, -1) if groups * D * itemsize % 16 == 0]
    groups = aligned[0] if aligned else most
    channels = power_of_two(groups * D)
    places = min(power_of_two(HxW), max(min(2048, chip.largest_tile) // channels, 1))
    steps = min(16, blocks(HxW, places))
    while blocks(HxW, places * steps) > 64:
        steps *= 2
    return ChannelsTile(places, channels, groups, steps, blocks(HxW, places * steps), 4, 4)


def stream_tile(N: int, C: int, P: int, chip: Chip, places_adjacent: bool) -> StreamTile:
    """The tile for data of N samples, C channels and P places."""
    room = min(4096, chip.largest_tile)
    if places_adjacent:
        places = _even_block(P, room)
        samples = min(power_of_two(N), room // places)
        return StreamTile(samples, places, 1, 4)
    channels = min(power_of_two(C), 64, room)
    places = min(power_of_two(P), room // channels)
    samples = min(power_of_two(N), room // (channels * places))
    return StreamTile(samples, places, channels, 4)
