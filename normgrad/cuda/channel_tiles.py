"""The tiles of BatchNorm's channels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from normgrad.cuda.configurations import VECTOR_ACCESS, Chip, blocks, even_block, power_of_two, staged
from normgrad.cuda.kernels.clusters import LARGEST, MOST_SUMS


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


# Up to so many places of a channel, a tile of results goes over several channels even if that makes no larger vectors.
_FEW_CHANNEL_PLACES = 256


def _stream_shape(N: int, C: int, P: int, room: int, places_adjacent: bool) -> tuple[int, int, int]:
    """Rows, places and channels of a tile of ``room`` elements at most, for N samples, C channels and P places."""
    if places_adjacent:
        divisor = min(P & -P, room)  # a power of two
        places = divisor if divisor >= 64 else even_block(P, room, spare=1.07, smallest=64)
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
    """The tile for what BatchNorm does element by element: 64 bytes of each tensor a thread, as for its sums.

    Fewer where multiprocessors would be idle, but a vector.
    """
    warps = 4
    room = min(warps * 2048 // itemsize, chip.largest_tile)
    while room > 32 * warps * VECTOR_ACCESS // itemsize and room // 2 * chip.multiprocessors >= N * C * P:
        room //= 2
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
        given = blocks(C * P, stretch), blocks(N, tile.places), Room.of(tile, P, itemsize, chip)
        return _cost(even_share(*given), *given) + (_FINISH if entries(P, stretch) > 1 else 0)

    widest = SumsTile(1, min(power_of_two(N), samples), width, warps, resident, stages, 16, width)
    return replace(widest, stretch=min(stretches(P, itemsize, width, access), key=cost))


@dataclass(frozen=True, slots=True)
class Room:
    """What programs that sum up have of a GPU: so many run on a multiprocessor, and ``enough`` of them keep it busy.

    A tile has ``full`` of what those of 64 bytes a thread have, and takes the time of ``alone`` where no other program
    runs on the multiprocessor. ``clusters`` as a chip has them; None where a cluster's first program could not take the
    sums of the others.
    """

    multiprocessors: int
    resident: int
    full: float
    enough: int
    alone: float
    clusters: Callable[[int, int], int] | None

    @classmethod
    def of(cls, tile: SumsTile, P: int, itemsize: int, chip: Chip) -> Room:
        """That of a tile."""
        stretch = tile.stretch or tile.channels
        nbytes = stretch * tile.rows * tile.places * itemsize
        busy = min(blocks(_ON_THEIR_WAY, max(tile.stages - 1, 1) * nbytes), tile.resident)
        alone = max(busy, _ALONE)
        full, enough, sums, whole = 1.0, tile.resident, tile.channels, True
        if tile.stretch:
            full, enough = nbytes / 8192, busy
            sums, whole = channels_within(P, stretch), entries(P, stretch) == 1
        told = whole and power_of_two(sums) <= MOST_SUMS
        return cls(chip.multiprocessors, tile.resident, full, enough, alone, chip.clusters if told else None)

    def has_clusters(self, work: int, parts: int) -> bool:
        """Whether each of so many pieces of work may have a cluster with a program for each of its parts.

        Where these are more than the multiprocessors, another launch takes less time than clusters that share them.
        """
        if self.clusters is None or not 1 < parts <= LARGEST or work * parts > self.multiprocessors:
            return False
        return self.clusters(parts, self.resident) >= work


def _fewer_channels(tile: SumsTile, C: int, P: int, itemsize: int, chip: Chip) -> SumsTile:
    """Where channels lie side by side: as many a program as one launch takes, where that has it done sooner."""

    def given(tile: SumsTile) -> tuple[int, int, Room]:
        return blocks(C, tile.channels), blocks(P, tile.places), Room.of(tile, P, itemsize, chip)

    found = [tile]
    for fewer in (2, 4):
        if tile.channels * itemsize >= 64 * fewer:
            narrow = replace(tile, places=tile.places * fewer, channels=tile.channels // fewer)
            work, tiles, room = given(narrow)
            parts = blocks(tiles, even_share(work, tiles, room))
            lines = narrow.channels * itemsize >= _LINE
            found += [narrow] * (parts == 1 or (lines and room.has_clusters(work, parts)))
    return min(found, key=lambda tile: _cost(even_share(*given(tile)), *given(tile)))


def _channel_tile(N: int, C: int, P: int, itemsize: int, chip: Chip, places_adjacent: bool) -> SumsTile | None:
    """A whole channel, where those are so few and so short that starting and ending a program is all that counts."""
    rows, places = power_of_two(N), power_of_two(P)
    room = min(_SHORT, chip.largest_tile)
    sparse = 1 if places_adjacent else _SECTOR // itemsize  # of the numbers that come from memory with one
    if rows * places > room or 4 * chip.multiprocessors < C or C * P * sparse > _FEW:
        return None
    warps = max(min(rows * places // 1024, 4), 1)
    return SumsTile(rows, places, 1, warps, 4, 1, 16)


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
    if short := _channel_tile(N, C, P, itemsize, chip, places_adjacent):
        return short
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


# Elements of a short channel, those that come from memory for few of them, and bytes that come with the one asked for.
_SHORT = 2048
_FEW = 2**15
_SECTOR = 32
_LINE = 128
# Bytes that keep a multiprocessor busy while they are on their way.
_ON_THEIR_WAY = 32768
# As many tiles at a time as a program by itself on a multiprocessor brings one.
_ALONE = 1.5
# What the start and the end of a program that sums up cost, in tiles that the memory could have brought meanwhile, and
# another launch, which takes the parts together. That a cluster's first program does so costs next to nothing.
_START = 12
_FINISH = 10


def _cost(share: int, work: int, tiles: int, room: Room) -> float:
    """The time of sums, in tiles of 64 bytes a thread; see ``even_share``."""
    parts = blocks(tiles, share)
    if room.has_clusters(work, parts):
        return share * room.alone * room.full + _START
    rounds = blocks(work * parts, room.multiprocessors * room.resident)
    beside = max(min(blocks(work * parts, room.multiprocessors), room.resident), room.enough)
    return rounds * (share * beside * room.full + _START) + (_FINISH if parts > 1 else 0)


@functools.cache
def even_share(work: int, tiles: int, room: Room) -> int:
    """How many tiles of each of so many pieces of work a program takes.

    As many as have it done soonest: few multiprocessors are idle in the last round, and rounds are few.
    """

    def cost(share: int) -> float:
        return _cost(share, work, tiles, room)

    parts = range(1, max(4 * room.resident * room.multiprocessors // max(work, 1), 1) + 1)
    return min({blocks(tiles, count) for count in parts}, key=lambda share: (cost(share), share))
