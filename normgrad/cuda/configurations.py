"""How the work is cut into tiles: pure functions of sizes, element size and chip.

What decides the order of a row's or group's sum (the tile and its warps) depends on the row or group alone, never on
how many of them there are: so a row's result has the same bits in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class StreamTile:
    """A tile of BatchNorm's steps: samples × places × channels."""

    samples: int
    places: int
    channels: int
    warps: int


def power_of_two(size: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(size - 1, 0).bit_length()


def blocks(size: int, block: int) -> int:
    """How many blocks cover a size."""
    return -(-size // block)


def _even_block(size: int, largest: int) -> int:
    """The largest power of two up to ``largest`` whose blocks cover a size with at most a quarter to spare."""
    block = min(power_of_two(size), largest)
    while block > 256 and blocks(size, block) * block > 1.25 * size:
        block //= 2
    return block


def row_tile(columns: int, itemsize: int, chip: Chip) -> RowTile:
    """The tile for rows of so many columns.

    A warp for every 256 columns: then a thread has the same columns of all of the tile's rows, and sums them without a
    word to the others. The weight sums of 8 columns take 32 registers, and 128 are there for each of 512 threads.
    """
    room = min(4096, chip.largest_tile)
    whole = power_of_two(columns)
    block = whole if whole <= room else _even_block(columns, min(2048, room))
    rows = max(2, min(1024, chip.largest_tile) // block)
    warps = max(block // 256, 1)
    return RowTile(rows, block, blocks(columns, block), warps, max(16 // warps, 1))


def group_tile(D: int, HxW: int, group: int, itemsize: int, chip: Chip, places_adjacent: bool) -> GroupTile:
    """The tile for groups of D channels of HxW places."""
    room = min(4096, chip.largest_tile)
    if places_adjacent:
        places = _even_block(HxW, room)
        channels = min(power_of_two(D), room // places)
        fits = places >= HxW and channels >= D
        groups = min(power_of_two(group), max(room // (places * channels) // 2, 1)) if fits else 1
    else:
        channels = min(power_of_two(D), room)
        adjacent = max(256 // (D * itemsize), 1)
        groups = min(power_of_two(group), power_of_two(adjacent), room // channels) if channels >= D else 1
        places = min(power_of_two(HxW), room // (channels * groups))
    return GroupTile(places, groups, channels, blocks(HxW, places), blocks(D, channels), 8, 2)


def channels_tile(D: int, HxW: int, group: int, itemsize: int, chip: Chip) -> ChannelsTile | None:
    """The tile for groups of D channels side by side; None where a group has too many for one."""
    width = max(power_of_two(D), min(128, chip.largest_tile))
    if width > min(1024, chip.largest_tile):
        return None
    most = min(group, width // D)
    aligned = [groups for groups in range(most, most // 2, -1) if groups * D * itemsize % 16 == 0]
    groups = aligned[0] if aligned else most
    channels = power_of_two(groups * D)
    places = min(power_of_two(HxW), max(min(4096, chip.largest_tile) // channels, 1))
    steps = 4
    while blocks(HxW, places * steps) > 64:
        steps *= 2
    return ChannelsTile(places, channels, groups, steps, blocks(HxW, places * steps), 8, 3)


def stream_tile(N: int, C: int, P: int, chip: Chip, places_adjacent: bool) -> StreamTile:
    """The tile for data of N samples, C channels and P places."""
    room = min(4096, chip.largest_tile)
    if places_adjacent:
        places = _even_block(P, room)
        samples = min(power_of_two(N), room // places)
        return StreamTile(samples, places, 1, 8)
    channels = min(power_of_two(C), 128, room)
    places = min(power_of_two(P), room // channels)
    samples = min(power_of_two(N), room // (channels * places))
    return StreamTile(samples, places, channels, 8)
