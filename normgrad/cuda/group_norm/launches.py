"""The launches of GroupNorm: the backend calls ``backward`` and ``forward``, which choose the layout of a call.

- *rows*: the channels and positions of a group are contiguous, but channels begin at addresses that 8 does not divide
  (``tiles.prefer_rows``). A group of a sample is then one row, as in LayerNorm. CTA groups stay with one group and walk
  over the samples: so the weights of a row's columns are loaded once, and their gradients are summed column by column;
- *channels_last*: the channels of a position are closer together than the positions of a channel;
- *contiguous*: all others. Positions may have any stride, but stride 1 is what the kernels are made for.

Each layout has a function for either direction, which adds its launches to ``steps``. ``operands`` are the data over
(N, C, HxW), or as rows: grad_out, input and grad_input backward, input and output forward. Backward, ``outputs`` are
the weight gradients that are wanted; forward, ``statistics`` are mean and rstd.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.plan import Problem
from normgrad.cuda.chip import VECTOR_BYTES, Chip, cdiv, next_power_of_2
from normgrad.cuda.cta_groups import CtaGroups
from normgrad.cuda.device.pack16 import UNPACKED
from normgrad.cuda.group_norm import channels_last_kernels, contiguous_kernels, rows_kernels, tiles
from normgrad.cuda.group_norm.tiles import Sizes
from normgrad.cuda.launch import FLOAT64, INT64, Argument, Options, Scratch, Step, float64_bits
from normgrad.cuda.layer_norm.tiles import RowTile, RowTileSpec, forward_segments
from normgrad.cuda.operands import Operand, all_vector_aligned, pack_operands, present, row_vector, strides_in_vectors
from normgrad.cuda.steps import Steps, backward_steps


def backward(problem: Problem, chip: Chip) -> Steps:
    """Plan GroupNorm backward: launches over the groups, one that adds up the partial sums of the weight gradients."""
    sizes = Sizes.of(problem)
    data = sizes[:3]
    steps, outputs, has_work = backward_steps(problem, sizes.C)
    if has_work:
        inputs = [steps.strided_input(name, data) for name in ("grad_out", "input")]
        layout, operands = _layout(sizes, steps, [*inputs, steps.output("grad_input", data)], tensors=2)
        plan = {"contiguous": _contiguous_backward, "channels_last": _channels_last_backward, "rows": _rows_backward}
        plan[layout](sizes, chip, steps, operands, outputs)
    return steps


def forward(problem: Problem, chip: Chip) -> Steps:
    """Plan GroupNorm forward."""
    sizes = Sizes.of(problem)
    data = sizes[:3]
    steps = Steps(problem, ["output", "mean", "rstd"])
    if sizes.N:
        operands = [steps.strided_input("input", data), steps.output("output", data)]
        statistics = [steps.output(name, (sizes.N * sizes.group,)) for name in ("mean", "rstd")]
        layout, operands = _layout(sizes, steps, operands, tensors=1)
        plan = {"contiguous": _contiguous_forward, "channels_last": _channels_last_forward, "rows": _rows_forward}
        plan[layout](sizes, chip, steps, operands, statistics, float64_bits(problem.attributes["eps"]))
    return steps


def _layout(sizes: Sizes, steps: Steps, operands: list[Operand], tensors: int) -> tuple[str, list[Operand]]:
    """Return the layout of the operands, and these as its functions take them.

    The first ``tensors`` of the operands are read: 1 forward, 2 backward. The input is the last of them.
    """
    if sizes.C * sizes.HxW and tiles.prefer_rows(sizes.D, sizes.HxW, steps.itemsize, tensors):
        rows = as_rows(sizes, operands)
        if rows is not None:
            return "rows", rows
    _, channel, position = operands[tensors - 1].strides
    is_channels_last = sizes.C > 1 and sizes.HxW > 0 and abs(position) > abs(channel)
    return "channels_last" if is_channels_last else "contiguous", operands


# The layout contiguous.

_MAX_VECTOR = 8  # words of the widest access: of 16-bit elements
_CHAIN = 16  # float32 elements that a thread adds up one by one at the most: equal ones may all be rounded the same way


def _choose_tile(sizes: Sizes, chip: Chip, inputs: Sequence[Operand], itemsize: int, packed: bool) -> tiles.GroupTile:
    """Choose the tile for these inputs, whose elements have ``itemsize`` bytes at the most.

    ``packed``: 16-bit elements are loaded in vectors. Otherwise each takes a register, as a float32 one does, and its
    address another: so tiles are those of float32, and a thread has no more than 16 elements. Clusters take contiguous
    positions only.
    """
    dimensions, tensors = (max(sizes.D, 1), max(sizes.HxW, 1), sizes.group), len(inputs)
    if _positions_strided(inputs):
        chip = replace(chip, max_active_clusters=None)
    if packed or itemsize == FLOAT32.itemsize:
        mixed = len({operand.pointer.dtype for operand in inputs if operand.pointer is not None}) > 1
        return tiles.group_tile(*dimensions, itemsize, chip, tensors, mixed)
    tile = tiles.group_tile(*dimensions, FLOAT32.itemsize, chip, tensors)
    warps = max(tile.positions * tile.groups * tile.channels // 512, tile.warps)
    return replace(tile, warps=warps, ctas_per_sm=min(tile.ctas_per_sm, max(16 // warps, 1)))


def _positions_strided(operands: Sequence[Operand]) -> bool:
    return any(operand.strides[2] != 1 for operand in operands)


def _group_spec(sizes: Sizes, tile: tiles.GroupTile, packing: int, operands: Sequence[Operand]) -> tiles.GroupTileSpec:
    """Describe a tile of packed operands.

    Offsets have 64 bits where those within a tile, or the count of work items or channels a round further, need them.
    """

    def extent(operand: Operand) -> int:
        _, channel, position = operand.strides
        return tile.positions * abs(position) + (tile.groups * sizes.D + tile.channels) * abs(channel)

    many = sizes.N * sizes.group >= 2**30 or sizes.C >= 2**30
    per_word = 1 if packing == UNPACKED.value else 2
    padded = tile.positions * tile.position_parts, tile.channels * tile.channel_parts
    return tiles.GroupTileSpec(
        **asdict(tile),
        D=sizes.D,
        words=tile.positions // per_word,
        padded_parts=next_power_of_2(tile.parts),
        vector=_vector([sizes.HxW // per_word, tile.positions // per_word], operands),
        packing=packing,
        masked=padded != (sizes.HxW, sizes.D),
        offset64=max(map(extent, operands)) >= 2**31 or many,
    )


def _vector(words: Sequence[int], operands: Sequence[Operand]) -> int:
    """Return the words of the largest vector that divides these counts of words and the strides of all tensors.

    The kernels tell the compiler so: of an argument it sees only whether 16 divides it.
    """
    strides = [operand.strides for operand in present(operands)]
    if any(position != 1 for _, _, position in strides):
        return 1
    return math.gcd(_MAX_VECTOR, *words, *(stride for found in strides for stride in found[:2]))


def _backward_segments(tile: tiles.GroupTile, itemsize: int, load_bytes: int) -> dict[str, int]:
    """Return how the positions of a tile are summed: a thread adds up no more than sixteen float32 elements in a chain.

    ``load_bytes``: of a thread's loads, 0 if unknown. Where these are whole vectors, a thread adds up the elements of a
    vector first; otherwise its elements of each of several segments, in which every thread holds some.
    """
    threads = tile.warps * 32
    if tile.positions <= _CHAIN * threads:
        return {"SEGMENTS": 1, "ADJACENT": 1}
    if load_bytes >= VECTOR_BYTES:
        return {"SEGMENTS": 1, "ADJACENT": VECTOR_BYTES // itemsize}
    return {"SEGMENTS": tile.positions * itemsize // (threads * VECTOR_BYTES), "ADJACENT": 1}


def _forward_segments(tile: tiles.GroupTile, itemsize: int, contiguous: bool) -> int:
    """Return into how many segments a tile of one group falls, in each of which every thread holds a vector; up to 8.

    Not where adjacent lanes may hold different channels (several groups, strided positions): after a sum over segments
    the lanes with different elements are not adjacent there, and Triton 3.6 reduces over the wrong ones.
    """
    if not contiguous:
        return 1
    segment = tile.warps * 32 * VECTOR_BYTES // itemsize
    return max(min(tile.positions * tile.channels // segment, 8), 1) if tile.groups == 1 else 1


def _contiguous_backward(
    sizes: Sizes, chip: Chip, steps: Steps, operands: list[Operand], outputs: list[Operand]
) -> None:
    """Add the launch over the groups, and one that adds up the partial sums of the weight gradients."""
    N, HxW = sizes.N, sizes.HxW
    parameters = [steps.contiguous_input(name) for name in ("mean", "rstd", "weight")]
    packing, operands = pack_operands(operands, HxW)
    tile = _choose_tile(sizes, chip, operands[:2], steps.itemsize, packing != UNPACKED.value)
    strided = _positions_strided(operands[:2])
    if strided:  # the results go through shared memory, which pipelined data would fill
        tile = replace(tile, stages=1)
    group_blocks = cdiv(sizes.group, tile.groups)
    cta_groups = CtaGroups.of(tile.parts if steps.wants("grad_input") else 1, N * group_blocks, tile, chip)
    # The roundings of few terms are a visible share of the bound, and of strided positions a thread may add up many.
    few = (
        steps.itemsize == FLOAT32.itemsize and tile.parts == 1 and tile.channels * tile.positions <= tiles.FEW_ELEMENTS
    )
    float64 = few or strided
    partial = steps.partial_sums(len(outputs), N * tile.position_parts, sizes.C, float64)
    mailbox = cta_groups.mailbox(steps, N * sizes.group)
    grad_out, x, grad_input = operands
    tensors = [grad_out.pointer, x.pointer, *parameters, grad_input.pointer, partial, mailbox]
    spec = _group_spec(sizes, replace(tile, cluster=cta_groups.cluster), packing, operands)
    per_word = tile.positions // spec.words
    load_bytes = spec.vector * per_word * steps.itemsize if all_vector_aligned(operands[:2]) else 0
    constants: dict[str, Any] = {
        "TILE": spec,
        **_backward_segments(tile, steps.itemsize, load_bytes),
        "FLOAT64": float64,
        "SAME_STRIDES": len({operand.strides[1:] for operand in present(operands)}) == 1,
        "WANT": steps.wanted_gradients,
    }
    counts = [N, sizes.group, group_blocks, HxW, cta_groups.count]
    arguments = [*tensors, *counts, *strides_in_vectors(operands, spec.vector)]
    cta_groups.add_launches(steps, contiguous_kernels.group_norm_backward_contiguous, arguments, constants)
    if outputs:
        steps.sum_partials(partial, N * tile.position_parts, sizes.C, outputs)


def _contiguous_forward(
    sizes: Sizes, chip: Chip, steps: Steps, operands: list[Operand], statistics: list[Operand], eps_bits: int
) -> None:
    """Add the launch over the groups."""
    N, HxW = sizes.N, sizes.HxW
    dtypes = [operand.pointer.dtype for operand in operands if operand.pointer is not None]
    # Mixed dtypes are not packed, but 16-bit data beside a float32 output is loaded in vectors all the same.
    loaded = operands if len(set(dtypes)) == 1 else operands[:1]
    packed = pack_operands(loaded, HxW)[0] != UNPACKED.value
    itemsize = dtypes[0].itemsize
    tile = _choose_tile(sizes, chip, operands[:1], itemsize, packed)
    packing, operands = pack_operands(operands, HxW)
    group_blocks = cdiv(sizes.group, tile.groups)
    cta_groups = CtaGroups.of(tile.parts, N * group_blocks, tile, chip)
    parameters = [steps.contiguous_input(name) for name in ("weight", "bias")]
    mailbox = cta_groups.mailbox(steps, 2 * N * sizes.group)
    x, output = operands
    mean, rstd = statistics
    tensors = [x.pointer, *parameters, output.pointer, mean.pointer, rstd.pointer, mailbox]
    spec = _group_spec(sizes, tile, packing, operands)
    constants = {"TILE": spec, "SEGMENTS": _forward_segments(tile, itemsize, x.strides[2] == 1)}
    counts = [N, sizes.group, group_blocks, HxW, eps_bits, cta_groups.count]
    arguments = [*tensors, *counts, *strides_in_vectors(operands, spec.vector), mean.strides[0], rstd.strides[0]]
    cta_groups.add_launches(steps, contiguous_kernels.group_norm_forward_contiguous, arguments, constants)


# The layout channels_last. A program is a CTA here, as in Triton.

_ENTRY_TILE = 1024  # entries of all groups of a program that are added up at a time
_STATISTICS_GROUPS = 4  # of a program of the statistics kernel


class ChannelBlocks:
    """How the data is split into blocks of channels, parts of positions and tiles; see ``channels_last_kernels``."""

    def __init__(self, sizes: Sizes, itemsize: int, tile: tiles.ChannelsLastTile, packing: int) -> None:
        D, channels = sizes.D, tile.channels
        self.sizes, self.itemsize, self.tile, self.packing = sizes, itemsize, tile, packing
        self.blocks = cdiv(sizes.C, channels)  # of channels
        self.part_positions = tile.positions * tile.steps  # of a part, which one program reduces
        self.parts = cdiv(sizes.HxW, self.part_positions)  # of a sample's positions
        self.apply_tiles = cdiv(sizes.HxW, tile.apply_positions)  # of a sample's positions
        # Groups that may have channels in a block, a power of two; and blocks in which a group may have channels.
        self.groups = channels // D if channels % D == 0 else next_power_of_2((channels - 1) // D + 2)
        self.blocks_per_group = min(cdiv(D - 1, channels) + 1, self.blocks)
        if channels % D == 0 or D % channels == 0:
            self.blocks_per_group = cdiv(D, channels)
        self.entries = tiles.EntrySpec(D, channels, self.parts, self.blocks_per_group)
        self.entry_count = sizes.N * sizes.group * self.parts * self.blocks_per_group

    def entries_at_once(self, groups: int, smallest: int = 1) -> int:
        """Return how many entries of each group a program with ``groups`` groups adds up at a time."""
        return min(max(_ENTRY_TILE // groups, smallest), next_power_of_2(self.parts * self.blocks_per_group))

    def _tile_spec(self, positions: int, steps: int, operands: Sequence[Operand]) -> tiles.ChannelsLastTileSpec:
        """Describe tiles of ``positions`` positions, ``steps`` of them to a program; ``operands`` are packed."""
        channels = self.tile.channels
        rows = self.tile.warps * 32 * (VECTOR_BYTES // self.itemsize) // channels
        strides = [operand.strides for operand in present(operands)]
        extent = max(positions * abs(position) + channels * abs(channel) for _, channel, position in strides)
        return tiles.ChannelsLastTileSpec(
            D=self.sizes.D,
            channels=channels,
            words=channels if self.packing == UNPACKED.value else channels // 2,
            positions=positions,
            groups=self.groups,
            rows=min(max(rows, 1), positions),
            steps=steps,
            stages=self.tile.stages,
            packing=self.packing,
            masked=self.sizes.HxW % (positions * steps) != 0 or self.sizes.C % channels != 0,
            offset64=max(extent, 2 * self.sizes.C) >= 2**31,
        )

    def reduce_step(
        self, kernel: Any, arguments: Sequence[Argument], operands: Sequence[Operand], **constants: Any
    ) -> Step:
        """Return the launch that computes the entries; ``operands`` are packed."""
        tile = self.tile
        constants |= {"TILE": self._tile_spec(tile.positions, tile.steps, operands), "ENTRIES": self.entries}
        grid = self.sizes.N * self.parts * self.blocks, 1, 1
        arguments = [*arguments, *(operand.strides for operand in operands)]
        return Step(kernel, grid, arguments, constants, Options(tile.warps, tile.ctas_per_sm))

    def apply_step(
        self, kernel: Any, arguments: Sequence[Argument], operands: Sequence[Operand], **constants: Any
    ) -> Step:
        """Return the launch that computes the results; ``operands`` are packed."""
        tile = self.tile
        constants["TILE"] = self._tile_spec(tile.apply_positions, 1, operands)
        grid = self.sizes.N * self.apply_tiles * self.blocks, 1, 1
        arguments = [*arguments, *(operand.strides for operand in operands)]
        return Step(kernel, grid, arguments, constants, Options(tile.apply_warps, tile.apply_ctas_per_sm, pdl=True))


def _channels_last_backward(
    sizes: Sizes, chip: Chip, steps: Steps, operands: list[Operand], outputs: list[Operand]
) -> None:
    """Add launches that reduce, compute grad_input, and add up the partial sums of the weight gradients."""
    N, C, HxW, group = sizes
    itemsize = steps.narrowest_itemsize
    packing, operands = pack_operands(operands, C, axis=1)
    work = ChannelBlocks(sizes, itemsize, tiles.channels_last_tile(C, HxW, group, itemsize, chip, 2), packing)
    one_entry = work.parts * work.blocks_per_group == 1
    few = steps.itemsize == FLOAT32.itemsize and one_entry and sizes.D * work.part_positions <= tiles.FEW_ELEMENTS
    parameters = [steps.contiguous_input(name) for name in ("mean", "rstd", "weight")]
    partial = steps.partial_sums(len(outputs), N * work.parts, C, float64=few)
    sums = steps.scratch(work.entry_count * (2 if few else 1), INT64)
    grad_out, x, grad_input = operands
    inputs = [grad_out.pointer, x.pointer, *parameters]
    arguments = [*inputs, partial, sums, N, group, work.blocks, HxW]
    kernel = channels_last_kernels.group_norm_backward_channels_last_reduce
    steps.add(work.reduce_step(kernel, arguments, [grad_out, x], FLOAT64=few, WANT=steps.wanted_gradients))
    if steps.wants("grad_input"):
        arguments = [*inputs, grad_input.pointer, sums, group, work.blocks, work.apply_tiles, HxW]
        at_once = work.entries_at_once(work.groups, smallest=16)
        constants = {"ENTRIES": work.entries, "ENTRIES_AT_ONCE": at_once, "FLOAT64": few}
        kernel = channels_last_kernels.group_norm_backward_channels_last_apply
        steps.add(work.apply_step(kernel, arguments, operands, **constants))
    if outputs:
        steps.sum_partials(partial, N * work.parts, C, outputs)


def _channels_last_forward(
    sizes: Sizes, chip: Chip, steps: Steps, operands: list[Operand], statistics: list[Operand], eps_bits: int
) -> None:
    """Add launches for the moments of blocks, the statistics of groups, and the output."""
    N, C, HxW, group = sizes
    itemsize = steps.narrowest_itemsize
    packing, operands = pack_operands(operands, C, axis=1)
    work = ChannelBlocks(sizes, itemsize, tiles.channels_last_tile(C, HxW, group, itemsize, chip, 1), packing)
    moments = steps.scratch(2 * work.entry_count, INT64)
    statistics64 = steps.scratch(2 * N * group, FLOAT64)
    parameters = [steps.contiguous_input(name) for name in ("weight", "bias")]
    x, output = operands
    arguments: list[Argument] = [x.pointer, moments, group, work.blocks, HxW]
    steps.add(work.reduce_step(channels_last_kernels.group_norm_forward_channels_last_moments, arguments, [x]))
    mean, rstd = statistics
    arguments = [moments, statistics64, mean.pointer, rstd.pointer, group, HxW, eps_bits]
    constants = {
        "ENTRIES": work.entries,
        "GROUPS": _STATISTICS_GROUPS,
        "PART_POSITIONS": work.part_positions,
        "ENTRIES_AT_ONCE": work.entries_at_once(_STATISTICS_GROUPS),
    }
    grid = N * cdiv(group, _STATISTICS_GROUPS), 1, 1
    kernel = channels_last_kernels.group_norm_forward_channels_last_statistics
    steps.add(Step(kernel, grid, [*arguments, mean.strides[0], rstd.strides[0]], constants, Options(pdl=True)))
    arguments = [x.pointer, *parameters, output.pointer, statistics64, group, work.blocks, work.apply_tiles, HxW]
    steps.add(work.apply_step(channels_last_kernels.group_norm_forward_channels_last_apply, arguments, operands))


# The layout rows.

_MIN_SAMPLES = 8  # of a CTA group: with fewer, its partial sums, written and read again, are much of the traffic
# Of the second-stage reduction over CTA groups and positions: elements of a tile, elements of a channel that a program
# adds up, and warps.
_SUM_TILE = 2048
_SUM_SEGMENT = 16384
_SUM_WARPS = 4


def as_rows(sizes: Sizes, operands: Sequence[Operand]) -> list[Operand] | None:
    """Return the operands as rows with strides (sample, 1); None where the elements of a group are not contiguous."""
    _, C, HxW, _ = sizes
    found = []
    for operand in operands:
        sample, channel, position = operand.strides
        if operand.pointer is not None and ((HxW > 1 and position != 1) or (C > 1 and channel != HxW)):
            return None
        found.append(replace(operand, strides=(sample, 1)))
    return found


def _register_bytes(steps: Steps, operands: Sequence[Operand], columns: int) -> int:
    """Return the bytes that an element takes in registers: an unpacked 16-bit one takes as many as float32."""
    return FLOAT32.itemsize if pack_operands(operands, columns)[0] == UNPACKED.value else steps.itemsize


class RowWork:
    """What both passes have in common: how groups and samples are shared out to CTA groups, packing and strides."""

    def __init__(
        self, sizes: Sizes, tile: RowTile, chip: Chip, operands: Sequence[Operand], parts: int, partial_sums: bool
    ) -> None:
        """Share out the work; ``parts`` CTAs of a CTA group exchange sums.

        ``partial_sums``: each CTA group writes a row of partial weight gradients, so there should not be many.
        """
        N, _, HxW, group = sizes
        columns = sizes.D * HxW
        room = chip.multiprocessors * tile.ctas_per_sm // tile.parts  # CTA groups that are resident at once
        self.groups_at_once = cdiv(group, cdiv(group, max(room, 1)))  # groups that have CTA groups at the same time
        sample_tiles = cdiv(N, tile.rows)
        per_group = min(max(room // self.groups_at_once, 1), sample_tiles)
        if partial_sums and tile.parts == 1:  # no more than leave no SM idle, or have enough samples each
            needed = min(max(chip.multiprocessors // self.groups_at_once, 1), sample_tiles)
            per_group = min(per_group, max(cdiv(N, _MIN_SAMPLES), needed))
        self.per_group = cdiv(sample_tiles, cdiv(sample_tiles, per_group))  # CTA groups that share a group's samples
        count = self.groups_at_once * self.per_group
        self.cta_groups = replace(CtaGroups.of(parts, N, tile, chip), count=count)
        packing, self.operands = pack_operands(operands, columns)
        vector = row_vector(columns, packing, self.operands)
        self.strides = strides_in_vectors(self.operands, vector)
        extent = max(tile.rows * abs(operand.strides[0]) for operand in self.operands) + columns
        self.spec = RowTileSpec.of(tile, columns, vector, packing, extent >= 2**31)


def _rows_backward(
    sizes: Sizes, chip: Chip, steps: Steps, operands: Sequence[Operand], outputs: Sequence[Operand]
) -> None:
    """Add one launch over the rows, and one that adds up the weight gradients over CTA groups and positions."""
    N, C, HxW, group = sizes
    columns = sizes.D * HxW
    tile = tiles.group_row_tile(columns, _register_bytes(steps, operands, columns), chip)
    parts = tile.parts if steps.wants("grad_input") else 1
    work = RowWork(sizes, tile, chip, operands, parts, partial_sums=bool(outputs))
    # Results of float32 data are computed in float64, so its sums take no conversions more.
    float64 = steps.itemsize == FLOAT32.itemsize
    partial = steps.partial_sums(len(outputs), work.per_group, C * HxW, float64)
    parameters = [steps.contiguous_input(name) for name in ("mean", "rstd", "weight")]
    mailbox = work.cta_groups.mailbox(steps, 2 * N * group if float64 else N * group)
    grad_out, x, grad_input = (operand.pointer for operand in work.operands)
    tensors = [grad_out, x, *parameters, grad_input, partial, mailbox]
    arguments = [*tensors, N, group, HxW, columns, work.groups_at_once, work.per_group, *work.strides]
    constants = {"TILE": work.spec, "D": sizes.D, "FLOAT64": float64, "WANT": steps.wanted_gradients}
    work.cta_groups.add_launches(steps, rows_kernels.group_norm_backward_rows, arguments, constants)
    if outputs:
        _add_sums(steps, partial, work.per_group, sizes, outputs)


def _add_sums(steps: Steps, partial: Scratch, cta_groups: int, sizes: Sizes, outputs: Sequence[Operand]) -> None:
    """Sum [outputs, cta_groups, C, HxW] over CTA groups and positions, in float64 and in a fixed order."""
    C, HxW = sizes.C, sizes.HxW
    positions = min(next_power_of_2(HxW), _SUM_TILE // 2)
    at_once = min(next_power_of_2(cta_groups), _SUM_TILE // positions)
    channels = max(min(_SUM_TILE // (positions * at_once), next_power_of_2(C) // 64), 1)
    segment = cdiv(_SUM_SEGMENT, cta_groups * positions) * positions
    segments = cdiv(HxW, segment)
    targets = outputs
    if segments > 1:
        shorter = steps.scratch(len(outputs) * segments * C, partial.dtype)
        targets = [Operand(shorter.part(index, segments * C), (1,)) for index in range(len(outputs))]
    first, second = (*targets, Operand(None, (1,)))[:2]
    arguments = [partial, first.pointer, second.pointer, *first.strides, *second.strides, cta_groups, C, HxW, segment]
    constants = {"CTA_GROUPS": at_once, "CHANNELS": channels, "POSITIONS": positions}
    grid = (cdiv(C, channels), segments, len(outputs))
    options = Options(_SUM_WARPS, ctas_per_sm=4, pdl=True)
    steps.add(Step(rows_kernels.group_norm_backward_rows_sum_partials, grid, arguments, constants, options))
    if segments > 1:
        steps.sum_partials(shorter, segments, C, outputs)


def _rows_forward(
    sizes: Sizes, chip: Chip, steps: Steps, operands: Sequence[Operand], statistics: list[Operand], eps_bits: int
) -> None:
    """Add one launch over the rows."""
    N, _, HxW, group = sizes
    columns = sizes.D * HxW
    tile = tiles.forward_group_row_tile(columns, _register_bytes(steps, operands, columns), chip)
    work = RowWork(sizes, tile, chip, operands, tile.parts, partial_sums=False)
    parameters = [steps.contiguous_input(name) for name in ("weight", "bias")]
    mailbox = work.cta_groups.mailbox(steps, 2 * N * group)
    x, output = (operand.pointer for operand in work.operands)
    mean, rstd = statistics
    tensors = [x, *parameters, output, mean.pointer, rstd.pointer, mailbox]
    counts = [N, group, HxW, columns, eps_bits, work.groups_at_once, work.per_group]
    arguments = [*tensors, *counts, *work.strides, mean.strides[0], rstd.strides[0]]
    few = steps.itemsize == FLOAT32.itemsize and tile.parts == 1 and tile.columns <= tiles.FEW_ELEMENTS
    constants = {"TILE": work.spec, "D": sizes.D, "FLOAT64": few, "SEGMENTS": forward_segments(tile, steps.itemsize)}
    work.cta_groups.add_launches(steps, rows_kernels.group_norm_forward_rows, arguments, constants)
