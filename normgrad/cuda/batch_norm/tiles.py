"""The tiles of BatchNorm's channels."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from normgrad.cuda.chip import VECTOR_ACCESS, Chip, blocks, even_block, power_of_two, staged
from normgrad.cuda.device.clusters import LARGEST, MOST_SUMS


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
    """A tile of BatchNorm's sums: as ``StreamTile``, ``fold`` numbers of which are added up at once.

    With ``cluster`` the programs that have a block of channels are a cluster, as large as may be.
    """

    rows: int
    places: int
    channels: int
    warps: int
    resident: int
    stages: int
    fold: int
    stretch: int = 0
    cluster: bool = False


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
    nbytes: int = 64,
) -> StreamTile:
    """The tile for what BatchNorm does element by element: so many bytes of each tensor a thread.

    Fewer where multiprocessors would be idle, but a vector.
    """
    warps = 4
    room = min(32 * warps * nbytes // itemsize, chip.largest_tile)
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


def _cluster_tile(C: int, P: int, itemsize: int, chip: Chip) -> SumsTile | None:
    """Where channels lie side by side and are not many: blocks of them, a cluster each, on all multiprocessors.

    Float32 sums of (4096, 512, 1) took 11.6 µs in clusters, and 14.0 with another launch. Of more, one program on each
    multiprocessor takes more time than another launch: 22.6 µs for 20.0 on (64, 512, 196).
    """
    channels = max(power_of_two(blocks(C, max(chip.multiprocessors // LARGEST, 1))), _SECTOR // itemsize)
    length = blocks(P, LARGEST) * itemsize
    long = length * channels >= 32768
    if long:
        channels = max(channels, 128 // itemsize)  # lines of the cache
    if chip.clusters is None or channels > MOST_SUMS or length * channels > _MOST_OF_A_PART:
        return None
    nbytes = 4096 * itemsize if long else max(power_of_two(length * channels) // 4, 2048)
    places = min(nbytes // itemsize, chip.largest_tile) // channels
    tiles = blocks(P, places)
    parts = blocks(tiles, blocks(tiles, LARGEST))
    warps, resident = max(nbytes // 2048, 4), 2
    if parts < 4 or chip.clusters(parts, resident) < blocks(C, channels):
        return None
    return SumsTile(1, places, channels, warps, resident, staged(6, resident, 2 * nbytes, chip), 16, cluster=True)


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
    few = _channel_tile(N, C, P, itemsize, chip, places_adjacent)
    if few is None and N == 1 and not places_adjacent:
        few = _cluster_tile(C, P, itemsize, chip)
    if few is not None:
        return few
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
# Bytes of a tensor that a program of a cluster sums up at the most.
_MOST_OF_A_PART = 98304
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
