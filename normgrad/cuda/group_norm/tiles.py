"""Tile sizes of GroupNorm, for each of its three memory layouts; called by ``launches``.

``group_tile``          contiguous positions: a tile holds whole groups, or a part of one
``channels_last_tile``  contiguous channels: a tile holds a block of channels, whatever groups they belong to
``group_row_tile``      a group of a sample is one contiguous row, and takes tiles like LayerNorm's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from normgrad.contract.plan import Problem
from normgrad.cuda.chip import Chip, cdiv, fit_stages, low_waste_block, next_power_of_2
from normgrad.cuda.device.cluster_exchange import MAX_CLUSTER, MAX_EXCHANGE_CLUSTER
from normgrad.cuda.layer_norm.tiles import RowTile, element_key, whole_or_shared

#: Up to this many elements of a group, sums of float32 data are computed in float64: one float32 rounding would be a
#: visible share of the error bound.
FEW_ELEMENTS = 512


class Sizes(NamedTuple):
    """The sizes of a call, by their names in the contract."""

    N: int
    C: int
    HxW: int
    group: int

    @classmethod
    def of(cls, problem: Problem) -> Sizes:
        """Return a problem's sizes."""
        return cls(*(problem.attributes[name] for name in cls._fields))

    @property
    def D(self) -> int:  # noqa: N802 - the kernels' name
        """Channels of a group."""
        return self.C // self.group


# Contiguous positions.


@dataclass(frozen=True, slots=True)
class GroupTile:
    """A tile [groups, channels, positions], and into how many parts a group is split."""

    positions: int
    groups: int  # whole groups of a sample; 1 where a group is split
    channels: int  # of a group
    position_parts: int
    parts: int  # CTAs that share a group: position parts × channel parts, the position parts fastest
    warps: int
    ctas_per_sm: int
    stages: int = 1  # of Triton's software pipeline through shared memory
    cluster: bool = False  # the CTAs that share a group form a cluster; the next tile is prefetched into registers

    @property
    def channel_parts(self) -> int:
        return self.parts // self.position_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTileSpec(GroupTile):
    """The constexpr TILE of the kernels for contiguous positions: a tile, and how it maps to memory."""

    D: int  # channels of a group
    words: int  # positions in words: elements, or packed pairs of them
    padded_parts: int  # the next power of two
    vector: int  # words that divide a channel's words and the strides of samples and channels, counted in vectors
    packing: int  # of ``device.pack16``
    masked: bool  # the tiles exceed the groups
    offset64: bool  # offsets within a tile, or the number of work items, need 64 bits


@dataclass(frozen=True, slots=True)
class CtaWork:
    """Elements of each tensor that a CTA holds, its warps, and CTAs per SM.

    With the problem N×C×HxW in 32 groups (8 of the smallest) that it was chosen on, and its speed there in % of a
    device copy of the same bytes.
    """

    elements: int
    warps: int
    ctas_per_sm: int
    problem: str
    percent: float


# Chosen as LayerNorm's ROW_TILES are. By the tensors that are read (1 forward, 2 backward) and the bytes of an element.
# Each CTA holds whole groups.
GROUP_WORK = {
    (1, 2): (
        CtaWork(4096, 4, 4, "2×64×64", 77),
        CtaWork(8192, 4, 3, "64×64×3136", 90),
        CtaWork(16384, 8, 2, "32×512×1024", 89),
    ),
    (1, 4): (CtaWork(4096, 4, 3, "2×64×64", 69), CtaWork(8192, 8, 2, "64×64×3136", 89)),
    (2, 2): (CtaWork(4096, 4, 4, "2×64×64", 58), CtaWork(8192, 4, 3, "64×64×3136", 79)),
    (2, 4): (CtaWork(4096, 4, 2, "2×64×64", 65), CtaWork(8192, 8, 1, "64×64×3136", 82)),
}
# For larger groups, which the CTAs of a cooperative launch share: of few positions, and of more.
SHARED_GROUP_WORK = {
    (1, 2): (CtaWork(4096, 2, 6, "32×512×1024", 78), CtaWork(8192, 4, 3, "16×320×4096", 79)),
    (1, 4): (CtaWork(4096, 4, 4, "32×512×1024", 88), CtaWork(4096, 4, 4, "16×320×4096", 86)),
    (2, 2): (CtaWork(4096, 2, 4, "32×512×1024", 77), CtaWork(8192, 4, 2, "16×320×4096", 77)),
    (2, 4): (CtaWork(2048, 4, 4, "32×512×1024", 87), CtaWork(2048, 4, 4, "16×320×4096", 89)),
}
_FEW_POSITIONS = 4095
_MAX_POSITIONS = 4096  # of a tile, backward or in a cluster: a thread adds up no more than 64 elements of a channel
# For groups that one CTA is slower with, or has no room for: the first whose cluster of up to 8 CTAs holds the group;
# or else the first of all, in a cluster of up to sixteen (6×384×3600 forward in float32, twelve CTAs: 22.6 µs, and 28.8
# without a cluster). Each CTA holds a tile and the next one in registers.
CLUSTER_GROUP_WORK = {
    (1, 2): (
        CtaWork(4096, 2, 6, "32×512×1024", 89),
        CtaWork(8192, 4, 3, "16×320×4096", 90),
        CtaWork(16384, 8, 1, "4×256×16384", 72),
    ),
    (1, 4): (CtaWork(4096, 4, 3, "32×512×1024", 92),),
    (2, 2): (
        CtaWork(2048, 1, 8, "32×512×1024", 85),
        CtaWork(4096, 2, 4, "32×512×1024", 83),
        CtaWork(8192, 4, 2, "16×320×4096", 89),
        CtaWork(16384, 8, 1, "4×256×16384", 83),
    ),
    (2, 4): (
        CtaWork(2048, 4, 4, "32×512×1024", 93.5),
        CtaWork(4096, 8, 2, "32×512×1024", 92),
        CtaWork(8192, 16, 1, "16×320×4096", 92),
    ),
}
# For the backward pass of float32 gradients beside 16-bit data.
MIXED_CLUSTER_GROUP_WORK = (CtaWork(4096, 4, 3, "32×640×1024", 88),)
_ONE_CTA = 8192  # elements of a group up to which one CTA is faster than a cluster


def _cta_work(D: int, HxW: int, itemsize: int, tensors: int, chip: Chip) -> CtaWork:
    """Return the smallest work that holds a whole group, or that for parts of one; no more than a CTA has room for."""
    size = next_power_of_2(HxW) * next_power_of_2(D)
    room = chip.max_tile_elements * (2 if itemsize == 2 else 1)
    few, more = SHARED_GROUP_WORK[tensors, itemsize]
    whole = (work for work in GROUP_WORK[tensors, itemsize] if size <= min(work.elements, room))
    work = next(whole, few if HxW <= _FEW_POSITIONS else more)
    return replace(work, elements=min(work.elements, room))


def group_tile(
    D: int, HxW: int, group: int, itemsize: int, chip: Chip, tensors: int = 2, mixed: bool = False
) -> GroupTile:
    """Choose the tile for groups of D channels and HxW positions, read from one or two tensors.

    ``mixed``: the two have different dtypes, and ``itemsize`` is the wider one's.
    """
    work = _cta_work(D, HxW, itemsize, tensors, chip)
    positions = low_waste_block(HxW, work.elements if tensors == 1 else min(work.elements, _MAX_POSITIONS))
    channels = min(next_power_of_2(D), work.elements // positions)
    fits = positions >= HxW and channels >= D
    if not fits or positions * channels > _ONE_CTA:
        tile = _cluster_tile(D, HxW, chip, MIXED_CLUSTER_GROUP_WORK if mixed else CLUSTER_GROUP_WORK[tensors, itemsize])
        if tile is not None:
            return tile
    groups = min(next_power_of_2(group), max(work.elements // (positions * channels) // 2, 1)) if fits else 1
    position_parts = cdiv(HxW, positions)
    parts = position_parts * cdiv(D, channels)
    nbytes = groups * channels * (tensors * positions * itemsize + 8)  # with a channel's weight and bias
    stages = fit_stages(3, work.ctas_per_sm, nbytes, chip)
    return GroupTile(positions, groups, channels, position_parts, parts, work.warps, work.ctas_per_sm, stages)


def _cluster_tile(D: int, HxW: int, chip: Chip, works: Sequence[CtaWork]) -> GroupTile | None:
    """Return the tile for groups that a cluster shares; None where there is none.

    Of the tiles with the least padding along the channels, it is the one with the most channels.
    """
    if chip.max_active_clusters is None:
        return None
    for work, largest in [*((work, MAX_CLUSTER) for work in works), (works[0], MAX_EXCHANGE_CLUSTER)]:
        positions = low_waste_block(HxW, min(work.elements, _MAX_POSITIONS))
        channels, position_parts = min(next_power_of_2(D), work.elements // positions), cdiv(HxW, positions)
        fitting = []
        while channels:
            shape = positions, 1, channels, position_parts, position_parts * cdiv(D, channels)
            tile = GroupTile(*shape, work.warps, work.ctas_per_sm, cluster=True)
            if 1 < tile.parts <= largest and chip.max_active_clusters(tile.parts, tile.ctas_per_sm):
                fitting.append(tile)
            channels //= 2
        if fitting:
            return min(fitting, key=lambda tile: tile.channel_parts * tile.channels)
    return None


# Contiguous channels.


@dataclass(frozen=True, slots=True)
class ChannelsLastTile:
    """Tiles [positions, channels]: a CTA reduces ``steps`` of them; results are computed in tiles of their own."""

    channels: int
    positions: int
    steps: int  # tiles that a CTA reduces
    warps: int
    ctas_per_sm: int
    stages: int
    apply_positions: int  # of a tile of results, which has as many channels
    apply_warps: int
    apply_ctas_per_sm: int


@dataclass(frozen=True)
class ChannelsLastTileSpec:
    """The constexpr TILE of the kernels for contiguous channels."""

    D: int  # channels of a group
    channels: int  # of a block
    words: int  # the same in words: elements, or packed pairs of them
    positions: int  # of a tile
    groups: int  # that may have channels in a block
    rows: int  # positions of a tile that different threads hold
    steps: int  # tiles of a part
    stages: int  # of the software pipeline through shared memory; 1 for none
    packing: int  # of ``device.pack16``
    masked: bool  # the tiles exceed the positions or the channels
    offset64: bool  # offsets within a tile, or channel indices, need 64 bits


@dataclass(frozen=True)
class EntrySpec:
    """The constexpr ENTRIES of the kernels for contiguous channels: which partial sums a group has.

    An entry is the sum over the channels that a group has in one block and over one part of the positions. The entries
    of all groups are [N, group, parts, blocks_per_group].
    """

    D: int  # channels of a group
    channels: int  # of a block
    parts: int  # of a sample's positions
    blocks_per_group: int  # blocks in which a group may have channels, at the most


#: Into how many parts the positions of a sample are split at the most.
MAX_PARTS = 64


def channels_last_tile(C: int, HxW: int, group: int, itemsize: int, chip: Chip, tensors: int = 2) -> ChannelsLastTile:
    """Choose the tiles for contiguous channels of one or two tensors: blocks of 128 bytes.

    On (16, 320, 4096), (32, 512, 1024), (8, 128, 65536), (64, 64, 3136) and (6, 384, 3600) in 32 groups: backward in 16
    bits 50, 49, 56, 50, 47 % of a copy, in float32 57, 56, 61, 54, 53; forward 52, 53, 58, 49, 52 and 58, 60, 63, 54,
    53.
    """
    channels = min(next_power_of_2(C), 128 // itemsize, max(chip.max_tile_elements // 16, 1))
    # Many groups in a block are many sums to receive from each part, so the parts are fewer.
    many_groups = channels // (C // group) >= 32
    many_positions = HxW > 16384
    part = 512 if tensors == 1 or many_groups else 256
    in_registers = tensors == itemsize == 2 and (many_groups or many_positions)  # not loaded ahead to shared memory
    positions = min(
        next_power_of_2(HxW), 128 if tensors == 1 or in_registers else 64, chip.max_tile_elements // channels
    )
    steps = max(cdiv(min(HxW, part), positions), cdiv(HxW, MAX_PARTS * positions))
    nbytes = tensors * positions * channels * itemsize
    if tensors == 1:
        return ChannelsLastTile(channels, positions, steps, 4, 5, fit_stages(3, 5, nbytes, chip), positions, 4, 4)
    stages = 1 if in_registers else fit_stages(3, 4, nbytes, chip)
    if in_registers and many_positions:
        return ChannelsLastTile(channels, positions, steps, 4, 4, stages, positions, 4, 3)
    return ChannelsLastTile(channels, positions, steps, 4, 4, stages, min(positions, 64), 4, 5)


# Contiguous rows.


# For groups that are contiguous rows. Results of float32 are computed in float64, and an unpacked 16-bit element takes
# as many registers as a float32 one, so tiles are small. Chosen as LayerNorm's ROW_TILES are, in 32 groups.
GROUP_ROW_TILES = {
    "float32": (
        RowTile(8, 256, 1, 4, 3, prefetch=False, stages=3),  # 4096×512×1: not timed
        RowTile(4, 512, 1, 4, 3, prefetch=False, stages=3),  # 4×256×49: 45 %
        RowTile(2, 1024, 1, 4, 3, prefetch=False, stages=3),  # 256×512×49: 68 %
        RowTile(1, 2048, 1, 8, 1, prefetch=False, stages=3),  # 32×1024×49: 51 %
        RowTile(1, 4096, 1, 8, 1, prefetch=False, stages=4),  # 64×2048×49: 57 %
    ),
    "packed16": (
        RowTile(8, 256, 1, 1, 8, prefetch=False, stages=3),  # 4096×512×1: 42 %
        RowTile(4, 512, 1, 2, 6, prefetch=False, stages=3),  # 4×256×49: 47 %
        RowTile(2, 1024, 1, 2, 4, prefetch=False, stages=3),  # 256×512×49: 58 %
        RowTile(2, 2048, 1, 4, 2, prefetch=False, stages=3),  # 32×1024×49: 43 %
        RowTile(2, 4096, 1, 8, 1, prefetch=False, stages=3),  # 64×2048×49: 53 %
    ),
}
# For longer ones, which several CTAs share.
SHARED_GROUP_ROW_TILES = {
    "float32": RowTile(1, 1024, 0, 4, 3, prefetch=False, stages=4),  # 64×64×3025: not timed
    "packed16": RowTile(1, 2048, 0, 4, 3, prefetch=False, stages=3),  # 64×64×3025: 40 %
}


def group_row_tile(columns: int, itemsize: int, chip: Chip) -> RowTile:
    """Choose the tile of the backward pass for groups of ``columns`` elements of ``itemsize`` bytes in registers."""
    key = element_key(itemsize, unpacked=False)
    return whole_or_shared(columns, itemsize, GROUP_ROW_TILES[key], [SHARED_GROUP_ROW_TILES[key]], chip)


def forward_group_row_tile(columns: int, itemsize: int, chip: Chip) -> RowTile:
    """Choose the tile of the forward pass: sixteen elements a thread, which also holds their weights and biases."""
    width = next_power_of_2(columns)
    block = min(width, chip.max_tile_elements)
    if width > block:
        block = min(4096 if itemsize == 2 else 2048, chip.max_tile_elements)
    rows = min(max(min(512, chip.max_tile_elements) // block, 1), 32)
    warps = max(rows * block // 512, 1)
    ctas_per_sm = 12 // warps if itemsize == 4 and warps <= 4 else 16 // warps
    stages = fit_stages(3, ctas_per_sm, rows * block * itemsize, chip)
    return RowTile(rows, block, cdiv(columns, block), warps, ctas_per_sm, False, stages)


_CACHE_LINE = 128  # bytes


def prefer_rows(D: int, HxW: int, itemsize: int, tensors: int) -> bool:
    """Return whether contiguous groups of D channels and HxW positions are faster as rows than as [D, HxW].

    They are where channels begin at multiples of 4 bytes at the best. Elements of [D, HxW] would then be loaded one by
    one, each with its address in registers: backward, 64×2048×49 in 32 groups takes 23 and 36 µs as rows (16 bits and
    float32) instead of 196 and 259, 256×512×49 takes 21 and 30 instead of 50 and 92. Forward, rows shorter than a cache
    line are not: 4096×512×1 takes 11 µs as rows, and 10 otherwise. ``tensors``: 1 forward, 2 backward.
    """
    unaligned = HxW * itemsize % 8 != 0
    return D > 1 and unaligned and (tensors == 2 or D * HxW * itemsize >= _CACHE_LINE)
