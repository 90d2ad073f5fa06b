"""The tiles of GroupNorm's groups."""

from __future__ import annotations

from dataclasses import dataclass

from normgrad.cuda.chip import Chip, blocks, even_block, power_of_two, staged
from normgrad.cuda.device.clusters import LARGEST


@dataclass(frozen=True, slots=True)
class GroupTile:
    """A tile of GroupNorm: places × groups × channels of a group, and in how many parts a group is cut either way.

    ``cluster``: the parts are the programs of one.
    """

    places: int
    groups: int
    channels: int
    place_parts: int
    channel_parts: int
    warps: int
    resident: int
    stages: int = 1
    cluster: bool = False

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
_MOST_PLACES = 4096
# For groups that a program alone is slower with, or has no room for: the first of which a cluster has enough. Each has
# a tile and the next in registers.
CLUSTER_GROUP_WORK = {
    (1, 2): (
        GroupWork(4096, 2, 6, "32×512×1024", 89),
        GroupWork(8192, 4, 3, "16×320×4096", 90),
        GroupWork(16384, 8, 1, "4×256×16384", 72),
    ),
    (1, 4): (GroupWork(4096, 4, 3, "32×512×1024", 92),),
    (2, 2): (
        GroupWork(2048, 1, 8, "32×512×1024", 85),
        GroupWork(4096, 2, 4, "32×512×1024", 83),
        GroupWork(8192, 4, 2, "16×320×4096", 89),
        GroupWork(16384, 8, 1, "4×256×16384", 83),
    ),
    (2, 4): (
        GroupWork(2048, 4, 4, "32×512×1024", 93.5),
        GroupWork(4096, 8, 2, "32×512×1024", 92),
        GroupWork(8192, 16, 1, "16×320×4096", 92),
    ),
}
_ALONE = 8192


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
    places = even_block(HxW, room if tensors == 1 else min(room, _MOST_PLACES))
    channels = min(power_of_two(D), room // places)
    fits = places >= HxW and channels >= D
    if not fits or places * channels > _ALONE:
        tile = _in_cluster(D, HxW, itemsize, chip, tensors)
        if tile is not None:
            return tile
    groups = min(power_of_two(group), max(room // (places * channels) // 2, 1)) if fits else 1
    parts = blocks(HxW, places), blocks(D, channels)
    nbytes = groups * channels * (tensors * places * itemsize + 8)  # with a channel's weight and bias
    stages = staged(3, work.resident, nbytes, chip)
    return GroupTile(places, groups, channels, *parts, work.warps, work.resident, stages)


def _in_cluster(D: int, HxW: int, itemsize: int, chip: Chip, tensors: int) -> GroupTile | None:
    """The tile for groups that the programs of a cluster share; None where there is none.

    It has the most channels of those that leave the least of themselves empty.
    """
    if chip.clusters is None:
        return None
    for work in CLUSTER_GROUP_WORK[tensors, itemsize]:
        places = even_block(HxW, min(work.elements, _MOST_PLACES))
        channels = min(power_of_two(D), work.elements // places)
        fitting = []
        while channels:
            parts = blocks(HxW, places), blocks(D, channels)
            tile = GroupTile(places, 1, channels, *parts, work.warps, work.resident, cluster=True)
            if 1 < tile.parts <= LARGEST and chip.clusters(tile.parts, tile.resident):
                fitting.append(tile)
            channels //= 2
        if fitting:
            return min(fitting, key=lambda tile: tile.channel_parts * tile.channels)
    return None


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
