"""Tile sizes, strides, packing and CTA groups of the GPU launches: host-side choices, without a GPU."""

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
from normgrad.cuda.batch_norm.launches import Data, _halvings
from normgrad.cuda.batch_norm.tiles import (
    DataLayout,
    Workload,
    blocks_per_channel,
    channels_per_segment,
    elementwise_tile,
    reduce_tile,
    tiles_per_cta,
)
from normgrad.cuda.chip import Chip, cdiv
from normgrad.cuda.cta_groups import CtaGroups
from normgrad.cuda.device.pack16 import FP16X2, UNPACKED
from normgrad.cuda.group_norm.launches import ChannelBlocks, _backward_segments, _vector
from normgrad.cuda.group_norm.tiles import ChannelsLastTile, Sizes, channels_last_tile, group_tile
from normgrad.cuda.launch import Given
from normgrad.cuda.layer_norm.tiles import forward_row_tile, forward_segments, row_tile
from normgrad.cuda.operands import Operand, grid_strides, pack_operands, row_vector
from normgrad.cuda.steps import Steps

CHIPS = [Chip(132), Chip(2, cooperative_launch=False, max_tile_elements=128)]


def _max_active_clusters(cluster: int, ctas_per_sm: int) -> int:
    """Return what fits into seven GPCs of sixteen or eighteen multiprocessors."""
    gpcs = [18, 18, 18, 18, 18, 18, 16] if cluster <= 2 else [16] * 7 + [8]
    return sum(multiprocessors * ctas_per_sm // cluster for multiprocessors in gpcs)


WITH_CLUSTERS = Chip(132, max_active_clusters=_max_active_clusters)


def _elements(array: np.ndarray, sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Return the elements at the offsets that the strides give, in order."""
    view = as_view(array)
    first = (view.address - array.base.ctypes.data) // array.itemsize
    flat = array.base.reshape(-1)
    return [flat[first + sum(map(math.prod, zip(index, strides, strict=True)))] for index in np.ndindex(sizes)]


def _base() -> np.ndarray:
    return np.arange(2 * 3 * 4 * 6, dtype=np.int32).reshape(2, 3, 4, 6)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
@pytest.mark.parametrize(
    "sizes", [(144,), (6, 24), (24, 6), (2, 3, 24), (2, 12, 6), (1, 144), (8, 18), (144, 1), (4, 36)]
)
def test_grid_strides_reach_the_elements_in_order(order: tuple[int, ...], sizes: tuple[int, ...]) -> None:
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
    unpacked = columns % 2 == 1
    for tile in (row_tile(columns, itemsize, chip, unpacked), forward_row_tile(columns, itemsize, chip)):
        assert (tile.parts - 1) * tile.columns < columns <= tile.parts * tile.columns
        assert tile.columns <= 2 * chip.max_tile_elements


@pytest.mark.parametrize("chip", [*CHIPS, WITH_CLUSTERS])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize("D", [1, 2, 10, 12, 300, 20000])
@pytest.mark.parametrize("HxW", [1, 49, 128, 3136, 3600, 65536, 2**31])
@pytest.mark.parametrize("group", [1, 3, 32])
def test_group_tiles_cover_the_group(chip: Chip, itemsize: int, tensors: int, D: int, HxW: int, group: int) -> None:
    tile = group_tile(D, HxW, group, itemsize, chip, tensors)
    assert (tile.position_parts - 1) * tile.positions < HxW <= tile.position_parts * tile.positions
    assert (tile.channel_parts - 1) * tile.channels < D <= tile.channel_parts * tile.channels
    assert tile.groups == 1 or (tile.channels >= D and not tile.cluster)
    assert tile.positions * tile.groups * tile.channels * itemsize <= 4 * chip.max_tile_elements


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize("C", [1, 2, 10, 300, 1000])
@pytest.mark.parametrize("HxW", [1, 49, 3136, 65536, 2**31])
def test_channels_last_tiles_fit(chip: Chip, itemsize: int, tensors: int, C: int, HxW: int) -> None:
    tile = channels_last_tile(C, HxW, C, itemsize, chip, tensors)
    assert 1 <= tile.positions * tile.channels <= chip.max_tile_elements
    assert tile.positions < 2 * HxW
    assert tile.channels < 2 * C


@pytest.mark.parametrize("sizes", [(2, 320, 99, 32), (3, 64, 49, 32), (1, 330, 9, 33), (2, 1300, 8, 13), (1, 96, 5, 1)])
@pytest.mark.parametrize("width", [8, 64])
def test_every_block_of_a_group_has_an_entry(sizes: tuple[int, int, int, int], width: int) -> None:
    _, C, HxW, group = sizes
    D = C // group
    work = ChannelBlocks(Sizes(*sizes), 2, ChannelsLastTile(width, 4, 2, 4, 4, 3, 4, 4, 4), UNPACKED.value)
    assert work.parts * work.part_positions >= HxW
    assert work.blocks * width >= C
    assert max((q * D + D - 1) // width - q * D // width + 1 for q in range(group)) <= work.blocks_per_group


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (16, 320, 4096), (1, 64, 100000), (100000, 3, 1), (3, 5, 49)])
def test_batch_norm_tiles_fit(chip: Chip, contiguous: bool, itemsize: int, sizes: tuple[int, int, int]) -> None:
    for segment_nbytes in (0, itemsize, 16) if contiguous and sizes[2] > 1 else (0,):
        data = DataLayout(sizes, itemsize, contiguous, itemsize, segment_nbytes)
        for tile in (elementwise_tile(data, chip), reduce_tile(data, chip)):
            assert 1 <= tile.rows * tile.positions * tile.columns <= chip.max_tile_elements
            assert tile.segment <= tile.columns
            assert tile.segment * itemsize % max(segment_nbytes, 1) == 0


@pytest.mark.parametrize("HxW", [2, 3, 8, 9, 49, 64, 196, 1101, 4096])
@pytest.mark.parametrize("segment", [8, 24, 64, 392, 1024])
def test_bounds_on_segments_per_channel_and_channels_per_segment(HxW: int, segment: int) -> None:
    """Counted over one period, after which a channel and a segment begin together again."""
    period = math.lcm(HxW, segment)
    of_channels = [(first + HxW - 1) // segment - first // segment + 1 for first in range(0, period, HxW)]
    of_segments = [(first + segment - 1) // HxW - first // HxW + 1 for first in range(0, period, segment)]
    assert max(of_channels) <= blocks_per_channel(HxW, segment) <= max(of_channels) + 1
    assert max(of_segments) <= channels_per_segment(HxW, segment) <= max(of_segments) + 1


def test_choices_for_earlier_layouts_are_forgotten() -> None:
    """A model with inputs of any length has any number of layouts."""
    for tiles in range(1, 2000):
        tiles_per_cta(Workload(10**6, tiles, 2, 132, 1.0, 2))
    assert tiles_per_cta.cache_info().currsize < 1999


@pytest.mark.parametrize("pieces", [1, 5, 64, 320, 5000])
@pytest.mark.parametrize("tiles", [1, 16, 49, 3136])
def test_work_keeps_most_multiprocessors_busy(pieces: int, tiles: int) -> None:
    ctas_per_sm = 3
    per_cta = tiles_per_cta(Workload(pieces, tiles, ctas_per_sm, 132, 1, ctas_per_sm))
    ctas = pieces * -(-tiles // per_cta)
    waves = -(-ctas // (132 * ctas_per_sm))
    assert 1 <= per_cta <= tiles
    if pieces * tiles >= 132 * 16:
        assert pieces * tiles >= 0.75 * waves * 132 * ctas_per_sm * per_cta


@pytest.mark.parametrize(
    ("HxW", "C", "itemsize", "ctas", "second_launch"),
    [
        *((4096, 512, itemsize, 256, True) for itemsize in (2, 4)),
        *((512, 4096, itemsize, 64 * itemsize, False) for itemsize in (2, 4)),
        *((256, 1024, itemsize, 16 * itemsize, False) for itemsize in (2, 4)),  # a second launch would take longer
        (10000, 256, 2, 212, True),
        (10000, 256, 4, 252, True),
    ],
)
def test_sums_over_rows_of_channels(HxW: int, C: int, itemsize: int, ctas: int, second_launch: bool) -> None:
    """A row of a tile has 64 bytes or more; there are no more CTAs than are resident at once, and nearly as many."""
    tile = reduce_tile(DataLayout((1, C, HxW), itemsize, contiguous_positions=False), Chip(132))
    blocks, tiles = cdiv(C, tile.columns), cdiv(HxW, tile.positions)
    parts = cdiv(tiles, tiles_per_cta(Workload.of(tile, blocks, tiles, itemsize, Chip(132))))
    assert (blocks * parts, parts > 1) == (ctas, second_launch)
    assert ctas <= 132 * tile.ctas_per_sm
    assert tile.columns * itemsize >= 64


@pytest.mark.parametrize(
    ("sizes", "contiguous", "short"),
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
def test_few_short_channels_have_a_cta_each(sizes: tuple[int, int, int], contiguous: bool, short: bool) -> None:
    tile = reduce_tile(DataLayout(sizes, 2, contiguous, 2, 16 if contiguous else 0), Chip(132))
    assert (tile.columns == 1 and tile.rows * tile.positions >= sizes[0] * sizes[2]) == short


@pytest.mark.parametrize("sizes", [(1, 16, 128), (16, 256, 81), (4096, 512, 1)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_small_data_is_shared_by_many_ctas(sizes: tuple[int, int, int], itemsize: int) -> None:
    tile = elementwise_tile(DataLayout(sizes, itemsize, contiguous_positions=False), Chip(132))
    elements, room = math.prod(sizes), tile.rows * tile.positions * tile.columns
    vectors = 32 * tile.warps * 16 // itemsize
    assert vectors <= room <= 4 * vectors
    assert room == vectors or elements > 132 * room / 2


@pytest.mark.parametrize("width", [1, 4, 8])
def test_adjacent_positions_are_added_only_where_a_thread_holds_them(width: int) -> None:
    data = DataLayout((16, 32, 4096), 2, contiguous_positions=True)
    contiguous, channels_last = (
        reduce_tile(layout, Chip(132)) for layout in (data, replace(data, contiguous_positions=False))
    )
    assert 2 ** _halvings(contiguous, width)[2] == width
    assert _halvings(channels_last, width)[2] == 0
    for tile in (contiguous, channels_last):
        assert 2 ** sum(_halvings(tile, width)) == 16 if tile is contiguous or width == 1 else 32 // width


@pytest.mark.parametrize(
    ("HxW", "strides", "vector"),
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
def test_the_batch_norm_vector_divides_positions_and_strides(
    HxW: int, strides: tuple[int, int, int], vector: int
) -> None:
    assert Data((2, 3, HxW), [Operand(Given("input", FLOAT16, True), strides)]).vector == vector


def test_the_group_norm_vector_divides_words_and_strides() -> None:
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
def test_clusters_share_long_rows_and_rows_that_would_leave_tiles_empty(columns: int, itemsize: int) -> None:
    parts = CLUSTERS[columns, itemsize]
    tile = row_tile(columns, itemsize, WITH_CLUSTERS)
    assert tile.cluster
    assert tile.parts == parts
    cta_groups = CtaGroups.of(tile.parts, 10**6, tile, WITH_CLUSTERS)
    assert cta_groups.cluster
    assert cta_groups.count == _max_active_clusters(parts, tile.ctas_per_sm)
    for max_active_clusters in (None, lambda cluster, ctas_per_sm: 0):
        assert not row_tile(columns, itemsize, replace(WITH_CLUSTERS, max_active_clusters=max_active_clusters)).cluster


@pytest.mark.parametrize("columns", [40000, 50256, 262144])
def test_no_clusters_where_they_would_leave_much_of_the_gpu_idle(columns: int) -> None:
    assert not row_tile(columns, 2, WITH_CLUSTERS).cluster


@pytest.mark.parametrize("columns", [768, 1024, 1536, 2048, 4096])
def test_rows_that_fill_a_tile_are_held_by_one_cta(columns: int) -> None:
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
    cta_groups = CtaGroups.of(tile.parts, 10**6, tile, WITH_CLUSTERS)
    assert cta_groups.cluster
    assert cta_groups.count == _max_active_clusters(parts, tile.ctas_per_sm)
    for max_active_clusters in (None, lambda cluster, ctas_per_sm: 0):
        chip = replace(WITH_CLUSTERS, max_active_clusters=max_active_clusters)
        assert group_tile(D, HxW, 32, 2, chip, tensors) == group_tile(D, HxW, 32, 2, Chip(132), tensors)


@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize(("D", "HxW"), [(1, 49), (8, 1024), (4, 65536), (4, 262144), (20000, 49)])
def test_no_clusters_for_groups_that_fit_one_cta_or_exceed_a_cluster(D: int, HxW: int, tensors: int) -> None:
    assert group_tile(D, HxW, 32, 2, WITH_CLUSTERS, tensors) == group_tile(D, HxW, 32, 2, Chip(132), tensors)


@pytest.mark.parametrize("columns", [4, 12, 48, 300])
def test_a_row_by_itself_is_packed_as_in_its_batch(columns: int) -> None:
    """Even if it does not begin at a multiple of 16 bytes: packed elements are summed in another order."""
    batch = np.zeros((4, columns), np.float16)
    found = set()
    for first in range(4):
        operand = Operand(Given("input", FLOAT16, first == 0), (columns, 1), _alignment(batch[first:]))
        packing, packed = pack_operands([operand], columns)
        found.add((packing, row_vector(columns, packing, packed)))
    assert found == {(FP16X2.value, min(columns // 2 & -(columns // 2), 4))}


def test_elements_at_an_odd_address_are_not_packed() -> None:
    memory = np.zeros(33, np.float16)
    operand = Operand(Given("input", FLOAT16, False), (8, 1), _alignment(memory[1:]))
    assert pack_operands([operand], 8)[0] == UNPACKED.value


def _alignment(array: np.ndarray) -> int:
    """Return the alignment that the package finds for an array."""
    problem = mock.Mock(views={"input": as_view(array)})
    return Steps(problem, []).strided_input("input", array.shape).alignment


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_thread_adds_at_most_eight_squares_of_a_row_in_float32(chip: Chip, itemsize: int) -> None:
    for columns in [*range(1, 2000), 5000, 9000, 16384, 16385, 65536, 65537, 300000]:
        tile = forward_row_tile(columns, itemsize, chip)
        threads, segments = 32 * tile.warps, forward_segments(tile, itemsize)
        if segments == 1:
            assert tile.columns <= 8 * threads
        else:
            assert segments * (4 // itemsize) <= 8
            assert tile.columns % segments == 0
            assert tile.columns // segments >= threads * (16 // itemsize)


@pytest.mark.parametrize("chip", [*CHIPS, WITH_CLUSTERS])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("HxW", [1, 49, 1024, 2047, 3136, 4096, 16384, 65536])
@pytest.mark.parametrize("D", [1, 2, 3, 8, 10, 60])
@pytest.mark.parametrize("load_bytes", [0, 4, 16])
def test_a_thread_adds_at_most_sixteen_elements_of_a_channel_in_a_chain(
    chip: Chip, itemsize: int, HxW: int, D: int, load_bytes: int
) -> None:
    tile = group_tile(D, HxW, 8, itemsize, chip)
    segments, adjacent = _backward_segments(tile, itemsize, load_bytes).values()
    elements = max(tile.positions // (32 * tile.warps), 1)
    assert max(segments, adjacent, elements // (segments * adjacent)) <= 16
    assert elements >= segments * adjacent  # only elements that the same thread holds
    assert adjacent * itemsize <= max(load_bytes, itemsize)
