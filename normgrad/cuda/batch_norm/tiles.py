"""Tile sizes of BatchNorm; called by ``launches``.

A tile is [rows, positions, columns]. Columns are channels; a row is a block of positions of a sample. Where channels
have few positions a *segment tile* spans several of them as they are contiguous in memory: its columns are then
consecutive elements of a sample, and its positions the samples.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from normgrad.cuda.chip import VECTOR_BYTES, Chip, cdiv, fit_stages, low_waste_block, next_power_of_2


@dataclass(frozen=True, slots=True)
class ElementwiseTile:
    """A tile of the elementwise kernels."""

    rows: int
    positions: int
    columns: int
    warps: int
    segment: int = 0  # of a segment tile: elements of a sample that a block covers, at most the columns; 0 for others


@dataclass(frozen=True, slots=True)
class ReduceTile:
    """A tile of the kernels that reduce channels."""

    rows: int
    positions: int
    columns: int
    warps: int
    ctas_per_sm: int
    stages: int
    pairwise: int  # elements of a thread that are added up two and two before they join its float64 sum
    segment: int = 0


@dataclass(frozen=True)
class TileSpec:
    """The constexpr TILE of all kernels on the data."""

    rows: int
    positions: int
    columns: int
    segment: int  # columns of a block: as many as the tile's, or fewer
    one_sample: bool  # N is 1
    one_position_block: bool  # a tile covers all positions of a sample
    mask_positions: bool  # the tiles exceed the positions
    mask_columns: bool  # the tiles exceed the columns
    offset64: bool  # offsets within a tile, or the number of rows, need 64 bits
    vector: int  # elements that divide what is contiguous and all other strides, where the compiler cannot know it


@dataclass(frozen=True)
class ReduceSpec:
    """The constexpr REDUCE of the kernels that reduce channels."""

    channels: int  # of a block, at the most
    channel_elements: int  # columns of a block that belong to one channel, at the most: 1 unless it is a segment
    #: How often the elements of a thread are added up two and two: along rows, far positions, adjacent positions.
    halvings: tuple[int, int, int]
    stages: int  # of the software pipeline through shared memory; 0 where a CTA reduces a single tile
    one_part: bool  # a CTA has all rows of its block of channels


@dataclass(frozen=True, slots=True)
class DataLayout:
    """What a tile is chosen by, beside the GPU: the sizes of a call, and how its elements can be loaded."""

    sizes: tuple[int, int, int]  # N, C, HxW
    itemsize: int
    contiguous_positions: bool  # the positions of a channel are adjacent; else its channels are
    nbytes: int = VECTOR_BYTES  # of a load within a channel, or across channels where those are contiguous
    segment_nbytes: int = 0  # of a load of a segment tile; 0 where the elements of a sample are not contiguous


# Up to this many positions of a channel, elementwise segment tiles are used even if their loads are not wider.
_FEW_POSITIONS = 256


def tile_shape(N: int, C: int, HxW: int, room: int, contiguous_positions: bool) -> tuple[int, int, int]:
    """Return rows, positions and columns of a tile of at most ``room`` elements."""
    if contiguous_positions:
        divisor = min(HxW & -HxW, room)  # a power of two
        positions = divisor if divisor >= 64 else low_waste_block(HxW, room, max_ratio=1.07, smallest=64)
        return min(next_power_of_2(N * cdiv(HxW, positions)), room // positions), positions, 1
    columns = min(next_power_of_2(C), 64, room)
    positions = min(next_power_of_2(HxW), room // columns)
    return min(next_power_of_2(N), room // (columns * positions)), positions, columns


def elementwise_tile(data: DataLayout, chip: Chip, thread_bytes: int = 64) -> ElementwiseTile:
    """Choose the tile of the elementwise kernels: ``thread_bytes`` of each tensor a thread.

    Fewer where multiprocessors would be idle, but at least a vector.
    """
    warps = 4
    N, _, HxW = data.sizes
    room = min(32 * warps * thread_bytes // data.itemsize, chip.max_tile_elements)
    smallest = 32 * warps * VECTOR_BYTES // data.itemsize
    while room > smallest and room // 2 * chip.multiprocessors >= math.prod(data.sizes):
        room //= 2
    narrow = data.segment_nbytes and data.nbytes < VECTOR_BYTES and HxW <= _FEW_POSITIONS
    if data.segment_nbytes > data.nbytes or narrow:
        width = room // 16  # 32 bytes a thread
        return ElementwiseTile(1, min(next_power_of_2(N), 8), width, warps, width)
    return ElementwiseTile(*tile_shape(*data.sizes, room, data.contiguous_positions), warps)


def blocks_per_channel(HxW: int, segment: int) -> int:
    """Return how many segments, laid end to end from the first channel on, one channel is in at the most."""
    return max(HxW // segment, 1) if segment % HxW == 0 or HxW % segment == 0 else (HxW - 2) // segment + 2


def channels_per_segment(HxW: int, segment: int) -> int:
    """Return of how many channels such a segment has elements at the most."""
    return max(segment // HxW, 1) if segment % HxW == 0 or HxW % segment == 0 else (segment - 2) // HxW + 2


def segment_choices(HxW: int, itemsize: int, width: int, nbytes: int) -> list[int]:
    """Return the segments that a tile of some width may cover: whole channels that begin with a load, or all of it."""
    channels = nbytes // math.gcd(nbytes, HxW * itemsize)
    whole = width // (channels * HxW) * channels * HxW
    return [whole] * (2 * whole > width) + [width]


@functools.lru_cache(1024)
def segment_reduce_tile(data: DataLayout, chip: Chip) -> ReduceTile:
    """Choose the segment tile of a reduction: each thread loads one vector of each sample.

    So a thread's sums meet no other thread's before those of a channel are added up at the end.
    """
    warps = 4
    (N, C, HxW), itemsize = data.sizes, data.itemsize
    samples, ctas_per_sm, stages = (8, 2, 4) if itemsize == 2 else (4, 3, 4)
    width = min(32 * warps * VECTOR_BYTES // itemsize, chip.max_tile_elements // samples)
    stages = fit_stages(stages, ctas_per_sm, 2 * samples * width * itemsize, chip)

    def cost(segment: int) -> float:
        tile = replace(widest, segment=segment)
        work = Workload.of(tile, cdiv(C * HxW, segment), cdiv(N, tile.positions), itemsize, chip)
        return work.cost(tiles_per_cta(work)) + (_SECOND_LAUNCH if blocks_per_channel(HxW, segment) > 1 else 0)

    widest = ReduceTile(1, min(next_power_of_2(N), samples), width, warps, ctas_per_sm, stages, 16, width)
    return replace(widest, segment=min(segment_choices(HxW, itemsize, width, data.segment_nbytes), key=cost))


def _fewer_columns(tile: ReduceTile, data: DataLayout, chip: Chip) -> ReduceTile:
    """Return a tile of fewer contiguous channels, where one launch then suffices and is faster."""
    (_, C, HxW), itemsize = data.sizes, data.itemsize

    def workload(tile: ReduceTile) -> Workload:
        return Workload.of(tile, cdiv(C, tile.columns), cdiv(HxW, tile.positions), itemsize, chip)

    found = [tile]
    for fewer in (2, 4):
        if tile.columns * itemsize >= 64 * fewer:
            narrow = replace(tile, positions=tile.positions * fewer, columns=tile.columns // fewer)
            found += [narrow] * (tiles_per_cta(workload(narrow)) == cdiv(HxW, narrow.positions))
    return min(found, key=lambda tile: workload(tile).cost(tiles_per_cta(workload(tile))))


def _whole_channel_tile(data: DataLayout, chip: Chip) -> ReduceTile | None:
    """Return a tile of a whole channel, where channels are so few and short that only the latency of a CTA matters."""
    N, C, HxW = data.sizes
    rows, positions = next_power_of_2(N), next_power_of_2(HxW)
    room = min(_SHORT_CHANNEL, chip.max_tile_elements)
    per_sector = 1 if data.contiguous_positions else _SECTOR // data.itemsize  # elements that are read with each one
    if rows * positions > room or 4 * chip.multiprocessors < C or C * HxW * per_sector > _FEW_ELEMENTS:
        return None
    warps = max(min(rows * positions // 1024, 4), 1)
    return ReduceTile(rows, positions, 1, warps, 4, 1, 16)


def reduce_tile(data: DataLayout, chip: Chip) -> ReduceTile:
    """Choose the tile of a reduction: 64 bytes of each tensor a thread.

    A segment tile, where its loads are wider or it has room for whole channels. Where channels are contiguous, a CTA
    has many sums to add up at its end, so there are few CTAs.

    On (16, 320, 4096), (64, 64, 3136) and (8, 128, 65536): statistics in 16 bits 88, 66, 90 % of a copy, in float32 91,
    79, 99; sums in 16 bits 89, 74, 97, in float32 94, 85, 102. With contiguous channels: 65, 54, 82 and 75, 67, 94; 72,
    66, 92 and 87, 76, 100.
    """
    (N, _, HxW), itemsize = data.sizes, data.itemsize
    small = _whole_channel_tile(data, chip)
    if small is not None:
        return small
    if data.segment_nbytes:
        tile = segment_reduce_tile(data, chip)
        segment = segment_choices(HxW, itemsize, tile.columns, data.segment_nbytes)[0]
        if data.segment_nbytes > data.nbytes or segment % HxW == 0:
            return tile
    warps = 4
    room = min(warps * 2048 // itemsize, chip.max_tile_elements)
    if not data.contiguous_positions:
        ctas_per_sm, stages = 2, 6
    else:
        ctas_per_sm, stages = (3, 4) if data.nbytes > itemsize else (4, 3)
    stages = fit_stages(stages, ctas_per_sm, 2 * room * itemsize, chip)
    shape = tile_shape(*data.sizes, room, data.contiguous_positions)
    tile = ReduceTile(*shape, warps, ctas_per_sm, stages, 16)
    return tile if data.contiguous_positions or N > 1 else _fewer_columns(tile, data, chip)


_SHORT_CHANNEL = 2048  # elements
_FEW_ELEMENTS = 2**15  # that are read from memory for short channels
_SECTOR = 32  # bytes that a GPU reads from memory at once
_IN_FLIGHT = 32768  # bytes in flight that keep an SM busy
# The cost of starting and ending a CTA of a reduction, and of a second launch that combines the parts; in the time that
# memory takes for a tile of 64 bytes a thread.
_START = 12
_SECOND_LAUNCH = 10


@dataclass(frozen=True)
class Workload:
    """Pieces of work (blocks of channels) of several tiles each, which CTAs share out."""

    pieces: int
    tiles: int  # of a piece
    ctas_per_sm: int
    multiprocessors: int
    tile_cost: float  # bytes of a tile, in those of a tile of 64 bytes a thread
    saturating_ctas: int  # CTAs that keep an SM busy

    @classmethod
    def of(cls, tile: ReduceTile, pieces: int, tiles: int, itemsize: int, chip: Chip) -> Workload:
        """Return the workload of a reduction."""
        tile_cost, saturating_ctas = 1.0, tile.ctas_per_sm
        if tile.segment:
            nbytes = tile.segment * tile.positions * itemsize
            tile_cost = nbytes / 8192
            saturating_ctas = min(cdiv(_IN_FLIGHT, (tile.stages - 1) * nbytes), tile.ctas_per_sm)
        return cls(pieces, tiles, tile.ctas_per_sm, chip.multiprocessors, tile_cost, saturating_ctas)

    def cost(self, tiles: int) -> float:
        """Return the estimated time where each CTA reduces ``tiles`` tiles; in tiles of 64 bytes a thread."""
        ctas = self.pieces * cdiv(self.tiles, tiles)
        waves = cdiv(ctas, self.multiprocessors * self.ctas_per_sm)
        sharing = max(min(cdiv(ctas, self.multiprocessors), self.ctas_per_sm), self.saturating_ctas)
        second_launch = _SECOND_LAUNCH if tiles < self.tiles else 0
        return waves * (tiles * sharing * self.tile_cost + _START) + second_launch


@functools.lru_cache(1024)
def tiles_per_cta(work: Workload) -> int:
    """Return how many tiles of a piece a CTA reduces: as many as cost least.

    Then waves are few, and few multiprocessors are idle in the last one.
    """
    parts = range(1, max(4 * work.ctas_per_sm * work.multiprocessors // max(work.pieces, 1), 1) + 1)
    return min({cdiv(work.tiles, count) for count in parts}, key=lambda tiles: (work.cost(tiles), tiles))
