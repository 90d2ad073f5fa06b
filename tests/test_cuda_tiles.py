"""How the GPU's work is cut up: no GPU, and nothing computed."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from normgrad.contract.arrays import as_view
from normgrad.contract.dtypes import FLOAT16
from normgrad.cuda.batch_norm.launches import _folds
from normgrad.cuda.batch_norm.launches import _vector as batch_vector
from normgrad.cuda.batch_norm.tiles import channels_within, entries, even_share, stream_tile, sums_tile
from normgrad.cuda.chip import Chip
from normgrad.cuda.cta_groups import Teams
from normgrad.cuda.device.clusters import MOST_SUMS
from normgrad.cuda.device.common import FLOAT16_PAIRS, SINGLE
from normgrad.cuda.group_norm.channels_last_launches import Blocks
from normgrad.cuda.group_norm.launches import _folds as group_folds
from normgrad.cuda.group_norm.launches import _vector
from normgrad.cuda.group_norm.tiles import ChannelsTile, channels_tile, group_tile
from normgrad.cuda.launch import Given
from normgrad.cuda.layer_norm.tiles import forward_row_tile, row_tile
from normgrad.cuda.operands import fold_of as row_fold
from normgrad.cuda.operands import row_vector
from normgrad.cuda.steps import Operand, Steps, grid_strides, paired, zero_bits

CHIPS = [Chip(132), Chip(2, concurrent=False, largest_tile=128)]


def _clusters(programs: int, resident: int) -> int:
    """As many as seven groups of sixteen or eighteen multiprocessors have room for, so many programs on each."""
    groups = [18, 18, 18, 18, 18, 18, 16] if programs <= 2 else [16] * 7 + [8]
    return sum(group * resident // programs for group in groups)


WITH_CLUSTERS = Chip(132, clusters=_clusters)


def _elements(array: np.ndarray, sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """What lies where the strides say, in order."""
    view = as_view(array)
    first = (view.address - array.base.ctypes.data) // array.itemsize
    flat = array.base.reshape(-1)
    return [flat[first + sum(map(math.prod, zip(place, strides, strict=True)))] for place in np.ndindex(sizes)]


def _base() -> np.ndarray:
    return np.arange(2 * 3 * 4 * 6, dtype=np.int32).reshape(2, 3, 4, 6)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
@pytest.mark.parametrize(
    "sizes", [(144,), (6, 24), (24, 6), (2, 3, 24), (2, 12, 6), (1, 144), (8, 18), (144, 1), (4, 36)]
)
def test_grid_strides_lead_to_the_elements_in_order(order: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    array = _base().transpose(order)[:, ::-1]
    strides = grid_strides(as_view(array), sizes)
    if strides is not None:
        assert _elements(array, sizes, strides) == array.reshape(-1).tolist()


@pytest.mark.parametrize(
    ("array", "sizes", "strides"),
    [
        (_base(), (6, 24), (24, 1)),
        (_base()[:, :, ::2], (6, 12), None),
        (_base()[:, :, ::2], (6, 2, 6), (24, 12, 1)),
        (_base()[..., :4], (24, 4), (6, 1)),
        (_base().transpose(0, 3, 1, 2), (2, 6, 12), (72, 1, 6)),
        (_base()[0, 0, 0], (1, 6), (6, 1)),
        (_base()[:1], (1, 72), (72, 1)),
        (_base()[:, :, 0, 0], (6,), (24,)),
        (_base()[:0], (0, 72), (72, 1)),
    ],
)
def test_grid_strides_of_known_layouts(
    array: np.ndarray, sizes: tuple[int, ...], strides: tuple[int, ...] | None
) -> None:
    assert grid_strides(as_view(array), sizes) == strides


@pytest.mark.parametrize("chip", [*CHIPS, WITH_CLUSTERS])
@pytest.mark.parametrize("columns", [1, 7, 128, 129, 1000, 1280, 2560, 4096, 4097, 16384, 70000, 262144, 2**31])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_row_tiles_cover_the_row(chip: Chip, columns: int, itemsize: int) -> None:
    single = columns % 2 == 1
    for tile in (row_tile(columns, itemsize, chip, single), forward_row_tile(columns, itemsize, chip)):
        assert (tile.parts - 1) * tile.columns < columns <= tile.parts * tile.columns
        assert tile.columns <= 2 * chip.largest_tile


@pytest.mark.parametrize("chip", [*CHIPS, WITH_CLUSTERS])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize("D", [1, 2, 10, 12, 300, 20000])
@pytest.mark.parametrize("HxW", [1, 49, 128, 3136, 3600, 65536, 2**31])
@pytest.mark.parametrize("group", [1, 3, 32])
def test_group_tiles_cover_the_group(chip: Chip, itemsize: int, tensors: int, D: int, HxW: int, group: int) -> None:
    tile = group_tile(D, HxW, group, itemsize, chip, tensors)
    assert (tile.place_parts - 1) * tile.places < HxW <= tile.place_parts * tile.places
    assert (tile.channel_parts - 1) * tile.channels < D <= tile.channel_parts * tile.channels
    assert tile.groups == 1 or (tile.channels >= D and not tile.cluster)
    assert tile.places * tile.groups * tile.channels * itemsize <= 4 * chip.largest_tile


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize("C", [1, 2, 10, 300, 1000])
@pytest.mark.parametrize("HxW", [1, 49, 3136, 65536, 2**31])
def test_tiles_of_channels_fit(chip: Chip, itemsize: int, tensors: int, C: int, HxW: int) -> None:
    tile = channels_tile(C, HxW, C, itemsize, chip, tensors)
    assert 1 <= tile.places * tile.channels <= chip.largest_tile
    assert tile.places < 2 * HxW
    assert tile.channels < 2 * C


@pytest.mark.parametrize("sizes", [(2, 320, 99, 32), (3, 64, 49, 32), (1, 330, 9, 33), (2, 1300, 8, 13), (1, 96, 5, 1)])
@pytest.mark.parametrize("width", [8, 64])
def test_every_block_of_a_group_has_an_entry(sizes: tuple[int, int, int, int], width: int) -> None:
    _, C, HxW, group = sizes
    D = C // group
    cut = Blocks(sizes, 2, ChannelsTile(width, 4, 2, 4, 4, 3, 4, 4, 4))
    assert cut.parts * cut.part >= HxW
    assert cut.count * width >= C
    assert max((q * D + D - 1) // width - q * D // width + 1 for q in range(group)) <= cut.over


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("places_adjacent", [True, False])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (16, 320, 4096), (1, 64, 100000), (100000, 3, 1), (3, 5, 49)])
def test_tiles_of_samples_fit(chip: Chip, places_adjacent: bool, itemsize: int, sizes: tuple[int, int, int]) -> None:
    for flat_access in (0, itemsize, 16) if places_adjacent and sizes[2] > 1 else (0,):
        for tile in (
            stream_tile(*sizes, itemsize, chip, places_adjacent, itemsize, flat_access),
            sums_tile(*sizes, itemsize, chip, places_adjacent, itemsize, flat_access),
        ):
            assert 1 <= tile.rows * tile.places * tile.channels <= chip.largest_tile
            assert tile.stretch <= tile.channels
            assert tile.stretch * itemsize % max(flat_access, 1) == 0


@pytest.mark.parametrize("P", [2, 3, 8, 9, 49, 64, 196, 1101, 4096])
@pytest.mark.parametrize("stretch", [8, 24, 64, 392, 1024])
def test_channels_and_stretches_meet_as_often_as_is_said(P: int, stretch: int) -> None:
    """Where both go on from the first number until they begin together again."""
    every = math.lcm(P, stretch)
    of_channels = [(first + P - 1) // stretch - first // stretch + 1 for first in range(0, every, P)]
    of_stretches = [(first + stretch - 1) // P - first // P + 1 for first in range(0, every, stretch)]
    assert max(of_channels) <= entries(P, stretch) <= max(of_channels) + 1
    assert max(of_stretches) <= channels_within(P, stretch) <= max(of_stretches) + 1


@pytest.mark.parametrize("work", [1, 5, 64, 320, 5000])
@pytest.mark.parametrize("tiles", [1, 16, 49, 3136])
def test_shares_keep_most_multiprocessors_busy(work: int, tiles: int) -> None:
    resident = 3
    share = even_share(work, tiles, resident, 132, 1, resident)
    programs = work * -(-tiles // share)
    rounds = -(-programs // (132 * resident))
    assert 1 <= share <= tiles
    if work * tiles >= 132 * 16:
        assert work * tiles >= 0.75 * rounds * 132 * resident * share


@pytest.mark.parametrize(("C", "P", "channels"), [(512, 4096, 32), (256, 1296, 16), (70, 1400, 16), (1000, 2000, 64)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_clusters_sum_up_channels_side_by_side(C: int, P: int, channels: int, itemsize: int) -> None:
    tile = sums_tile(1, C, P, itemsize, WITH_CLUSTERS, False)
    assert tile.cluster
    if (C, itemsize) == (512, 2):
        channels = 64  # whose numbers are a line of the cache
    if (C, itemsize) == (70, 4):
        channels = 8  # as many bytes
    assert tile.channels == channels <= MOST_SUMS
    assert not sums_tile(1, C, P, itemsize, Chip(132), False).cluster
    assert not sums_tile(
        1, C, P, itemsize, replace(WITH_CLUSTERS, clusters=lambda programs, resident: 4), False
    ).cluster


@pytest.mark.parametrize(("C", "P"), [(512, 12544), (2048, 3136), (512, 20), (16, 128)])
def test_there_are_no_clusters_for_much_or_for_little(C: int, P: int) -> None:
    assert not sums_tile(1, C, P, 4, WITH_CLUSTERS, False).cluster


@pytest.mark.parametrize(
    ("sizes", "places_adjacent", "short"),
    [
        ((2, 16, 64), True, True),
        ((1, 16, 128), False, True),
        ((16, 256, 81), True, True),
        ((16, 2560, 81), True, False),
        ((16, 256, 810), True, False),
        ((1, 256, 1296), False, False),
        ((1, 512, 64), False, False),
    ],
)
def test_few_short_channels_have_a_program_each(
    sizes: tuple[int, int, int], places_adjacent: bool, short: bool
) -> None:
    tile = sums_tile(*sizes, 2, Chip(132), places_adjacent, 2, 16 if places_adjacent else 0)
    assert (tile.channels == 1 and tile.rows * tile.places >= sizes[0] * sizes[2]) == short


@pytest.mark.parametrize("sizes", [(1, 16, 128), (16, 256, 81), (4096, 512, 1)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_small_results_are_made_by_many_programs(sizes: tuple[int, int, int], itemsize: int) -> None:
    tile = stream_tile(*sizes, itemsize, Chip(132), False)
    elements, room = math.prod(sizes), tile.rows * tile.places * tile.channels
    vectors = 32 * tile.warps * 16 // itemsize
    assert vectors <= room <= 4 * vectors
    assert room == vectors or elements > 132 * room / 2


@pytest.mark.parametrize("width", [1, 4, 8])
def test_neighbours_are_added_up_only_where_a_thread_has_them(width: int) -> None:
    places, channels = (sums_tile(16, 32, 4096, 2, Chip(132), adjacent) for adjacent in (True, False))
    assert 2 ** _folds(places, width)[2] == width
    assert _folds(channels, width)[2] == 0
    for tile in (places, channels):
        assert 2 ** sum(_folds(tile, width)) == 16 if tile is places or width == 1 else 32 // width


@pytest.mark.parametrize(
    ("P", "strides", "vector"),
    [
        (64, (192, 64, 1), 16),
        (196, (588, 196, 1), 4),
        (49, (147, 49, 1), 1),
        (64, (200, 64, 1), 8),
        (64, (192, 1, 3), 1),
        (48, (0, 48, 1), 16),
        (64, (64, 0, 1), 1),
    ],
)
def test_what_divides_places_and_strides(P: int, strides: tuple[int, int, int], vector: int) -> None:
    assert batch_vector((2, 3, P), [Operand(Given("input", FLOAT16, True), strides)]) == vector


def test_words_that_vectors_divide_are_found() -> None:
    def operand(*strides: int) -> Operand:
        return Operand(Given("input", FLOAT16, True), strides)

    assert _vector([1800, 2048], [operand(384 * 1800, 1800, 1), operand(384 * 1800, 1800, 1)]) == 8
    assert _vector([4096, 4], [operand(4096 * 8, 4096, 1), Operand(None, (1, 1, 1))]) == 4
    assert _vector([4096], [operand(4096 * 8, 4098, 1)]) == 2
    assert _vector([4096], [operand(4096 * 8 + 1, 4096, 1)]) == 1
    assert _vector([4096], [operand(4096 * 8, 4096, 2)]) == 1


CLUSTERS = {(1280, 2): 3, (1280, 4): 3, (2560, 2): 5, (5120, 2): 5, (5120, 4): 5, (8192, 2): 2, (8192, 4): 8}
CLUSTERS |= {(10000, 4): 5, (16384, 2): 8, (16384, 4): 8, (20000, 2): 5, (32768, 2): 8, (32768, 4): 16, (65536, 2): 16}


@pytest.mark.parametrize(("columns", "itemsize"), CLUSTERS)
def test_clusters_share_long_rows_and_what_would_leave_tiles_empty(columns: int, itemsize: int) -> None:
    parts = CLUSTERS[columns, itemsize]
    tile = row_tile(columns, itemsize, WITH_CLUSTERS)
    assert tile.cluster
    assert tile.parts == parts
    teams = Teams.of(tile.parts, 10**6, tile, WITH_CLUSTERS)
    assert teams.cluster
    assert teams.count == _clusters(parts, tile.resident)
    assert not row_tile(columns, itemsize, replace(WITH_CLUSTERS, clusters=None)).cluster
    assert not row_tile(columns, itemsize, replace(WITH_CLUSTERS, clusters=lambda programs, resident: 0)).cluster


@pytest.mark.parametrize("columns", [40000, 50256, 262144])
def test_clusters_that_would_leave_much_of_the_gpu_idle_are_none(columns: int) -> None:
    assert not row_tile(columns, 2, WITH_CLUSTERS).cluster


@pytest.mark.parametrize("columns", [768, 1024, 1536, 2048, 4096])
def test_rows_that_fill_a_tile_are_one_program_s(columns: int) -> None:
    assert not row_tile(columns, 2, WITH_CLUSTERS).cluster
    assert not forward_row_tile(columns, 2, WITH_CLUSTERS).cluster


@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize(
    ("D", "HxW", "channels", "parts"),
    [(10, 4096, 2, 5), (12, 3600, 2, 6), (10, 1024, 2, 5), (40, 256, 8, 5), (8, 16384, 4, 8)],
)
def test_clusters_share_groups(D: int, HxW: int, channels: int, parts: int, tensors: int) -> None:
    tile = group_tile(D, HxW, 32, 2, WITH_CLUSTERS, tensors)
    assert tile.cluster
    assert (tile.groups, tile.channels, tile.parts) == (1, channels, parts)
    teams = Teams.of(tile.parts, 10**6, tile, WITH_CLUSTERS)
    assert teams.cluster
    assert teams.count == _clusters(parts, tile.resident)
    for clusters in (None, lambda programs, resident: 0):
        chip = replace(WITH_CLUSTERS, clusters=clusters)
        assert group_tile(D, HxW, 32, 2, chip, tensors) == group_tile(D, HxW, 32, 2, Chip(132), tensors)


@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize(("D", "HxW"), [(1, 49), (8, 1024), (4, 65536), (4, 262144), (20000, 49)])
def test_groups_for_one_program_or_more_than_a_cluster_have_none(D: int, HxW: int, tensors: int) -> None:
    assert group_tile(D, HxW, 32, 2, WITH_CLUSTERS, tensors) == group_tile(D, HxW, 32, 2, Chip(132), tensors)


@pytest.mark.parametrize("columns", [4, 12, 48, 300])
def test_a_row_by_itself_is_read_as_in_its_batch(columns: int) -> None:
    """Of rows that do not begin at multiples of 16 bytes too: pairs are summed in another order than single numbers."""
    batch = np.zeros((4, columns), np.float16)
    found = set()
    for first in range(4):
        operand = Operand(Given("input", FLOAT16, first == 0), (columns, 1), _alignment(batch[first:]))
        kind, words = paired([operand], columns)
        found.add((kind, row_vector(columns, kind, words)))
    assert found == {(FLOAT16_PAIRS.value, min(columns // 2 & -(columns // 2), 4))}


def test_numbers_at_an_odd_place_are_no_pairs() -> None:
    memory = np.zeros(33, np.float16)
    operand = Operand(Given("input", FLOAT16, False), (8, 1), _alignment(memory[1:]))
    assert paired([operand], 8)[0] == SINGLE.value


@pytest.mark.parametrize(("address", "bits"), [(32, 15), (24, 7), (20, 3), (18, 0), (17, 0)])
def test_code_counts_on_no_more_alignment_than_there_was(address: int, bits: int) -> None:
    assert zero_bits(address) == bits


def _alignment(array: np.ndarray) -> int:
    """What the package finds of an array's address."""
    problem = mock.Mock(views={"input": as_view(array)})
    return Steps(problem, []).data("input", array.shape).alignment


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_thread_adds_up_eight_squares_of_a_row_at_the_most(chip: Chip, itemsize: int) -> None:
    for columns in [*range(1, 2000), 5000, 9000, 16384, 16385, 65536, 65537, 300000]:
        tile = forward_row_tile(columns, itemsize, chip)
        threads, fold = 32 * tile.warps, row_fold(tile, itemsize)
        if fold == 1:
            assert tile.columns <= 8 * threads
        else:
            assert fold * (4 // itemsize) <= 8
            assert tile.columns % fold == 0
            assert tile.columns // fold >= threads * (16 // itemsize)


@pytest.mark.parametrize("chip", [*CHIPS, WITH_CLUSTERS])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("HxW", [1, 49, 1024, 2047, 3136, 4096, 16384, 65536])
@pytest.mark.parametrize("D", [1, 2, 3, 8, 10, 60])
@pytest.mark.parametrize("at_once", [0, 4, 16])
def test_a_thread_adds_up_sixteen_numbers_of_a_channel_at_the_most(
    chip: Chip, itemsize: int, HxW: int, D: int, at_once: int
) -> None:
    tile = group_tile(D, HxW, 8, itemsize, chip)
    stretches, neighbours = group_folds(tile, itemsize, at_once).values()
    numbers = max(tile.places // (32 * tile.warps), 1)
    assert max(stretches, neighbours, numbers // (stretches * neighbours)) <= 16
    assert numbers >= stretches * neighbours  # a thread adds up what it has itself
    assert neighbours * itemsize <= max(at_once, itemsize)
