"""The launches of GroupNorm where the positions of a channel are contiguous, or on any stride but channels_last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from normgrad.contract.dtypes import FLOAT32
from normgrad.cuda.chip import VECTOR_BYTES, Chip, cdiv, next_power_of_2
from normgrad.cuda.cta_groups import CtaGroups, Mailbox, add_launches
from normgrad.cuda.device.pack16 import UNPACKED
from normgrad.cuda.group_norm.contiguous_kernels import group_norm_backward_contiguous, group_norm_forward_contiguous
from normgrad.cuda.group_norm.tiles import FEW_ELEMENTS, GroupTile, GroupTileSpec, Sizes, group_tile
from normgrad.cuda.operands import Operand, all_vector_aligned, pack_operands, present, strides_in_vectors
from normgrad.cuda.steps import Steps

_MAX_VECTOR = 8  # words of the widest access: of 16-bit elements
_CHAIN = 16  # float32 elements that a thread adds up one by one at the most: equal ones may all be rounded the same way


def _choose_tile(sizes: Sizes, chip: Chip, inputs: Sequence[Operand], itemsize: int, packed: bool) -> GroupTile:
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
        return group_tile(*dimensions, itemsize, chip, tensors, mixed)
    tile = group_tile(*dimensions, FLOAT32.itemsize, chip, tensors)
    warps = max(tile.positions * tile.groups * tile.channels // 512, tile.warps)
    return replace(tile, warps=warps, ctas_per_sm=min(tile.ctas_per_sm, max(16 // warps, 1)))


def _positions_strided(operands: Sequence[Operand]) -> bool:
    return any(operand.strides[2] != 1 for operand in operands)


def _tile_spec(
    sizes: Sizes, tile: GroupTile, packing: int, operands: Sequence[Operand], cluster: bool
) -> GroupTileSpec:
    """Describe a tile of packed operands.

    Offsets have 64 bits where those within a tile, or the count of work items or channels a round further, need them.
    """

    def extent(operand: Operand) -> int:
        _, channel, position = operand.strides
        return tile.positions * abs(position) + (tile.groups * sizes.D + tile.channels) * abs(channel)

    many = sizes.N * sizes.group >= 2**30 or sizes.C >= 2**30
    per_word = 1 if packing == UNPACKED.value else 2
    vector = _vector([sizes.HxW // per_word, tile.positions // per_word], operands)
    padded = tile.positions * tile.position_parts, tile.channels * tile.channel_parts
    return GroupTileSpec(
        D=sizes.D,
        groups=tile.groups,
        channels=tile.channels,
        positions=tile.positions,
        words=tile.positions // per_word,
        position_parts=tile.position_parts,
        parts=tile.parts,
        padded_parts=next_power_of_2(tile.parts),
        vector=vector,
        packing=packing,
        masked=padded != (sizes.HxW, sizes.D),
        offset64=max(map(extent, operands)) >= 2**31 or many,
        stages=tile.stages,
        cluster=cluster,
    )


def _vector(words: Sequence[int], operands: Sequence[Operand]) -> int:
    """Return the words of the largest vector that divides these counts of words and the strides of all tensors.

    The kernels tell the compiler so: of an argument it sees only whether 16 divides it.
    """
    strides = [operand.strides for operand in present(operands)]
    if any(position != 1 for _, _, position in strides):
        return 1
    return math.gcd(_MAX_VECTOR, *words, *(stride for found in strides for stride in found[:2]))


def _backward_segments(tile: GroupTile, itemsize: int, load_bytes: int) -> dict[str, int]:
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


def _forward_segments(tile: GroupTile, itemsize: int, contiguous: bool) -> int:
    """Return into how many segments a tile of one group falls, in each of which every thread holds a vector; up to 8.

    Not where adjacent lanes may hold different channels (several groups, strided positions): after a sum over segments
    the lanes with different elements are not adjacent there, and Triton 3.6 reduces over the wrong ones.
    """
    if not contiguous:
        return 1
    segment = tile.warps * 32 * VECTOR_BYTES // itemsize
    return max(min(tile.positions * tile.channels // segment, 8), 1) if tile.groups == 1 else 1


def backward(sizes: Sizes, chip: Chip, steps: Steps, operands: list[Operand], outputs: list[Operand]) -> None:
    """Add the launch over the groups, and one that adds up the partial sums of the weight gradients.

    ``operands``: grad_out, input, grad_input over (N, C, HxW); ``outputs``: the weight gradients that are wanted.
    """
    N, HxW = sizes.N, sizes.HxW
    parameters = [steps.contiguous_input(name) for name in ("mean", "rstd", "weight")]
    packing, operands = pack_operands(operands, HxW)
    tile = _choose_tile(sizes, chip, operands[:2], steps.itemsize, packing != UNPACKED.value)
    strided = _positions_strided(operands[:2])
    if strided:  # the results take the way through shared memory that the pipelined data would
        tile = replace(tile, stages=1)
    group_blocks = cdiv(sizes.group, tile.groups)
    cta_groups = CtaGroups.of(tile.parts if steps.wants("grad_input") else 1, N * group_blocks, tile, chip)
    # The roundings of few terms are a visible share of the bound, and of strided positions a thread may add up many.
    few = steps.itemsize == FLOAT32.itemsize and tile.parts == 1 and tile.channels * tile.positions <= FEW_ELEMENTS
    float64 = few or strided
    partial = steps.partial_sums(len(outputs), N * tile.position_parts, sizes.C, float64)
    mailbox = Mailbox.of(steps, cta_groups, N * sizes.group)
    grad_out, x, grad_input = operands
    tensors = [grad_out.pointer, x.pointer, *parameters, grad_input.pointer, partial, mailbox.memory]
    spec = _tile_spec(sizes, tile, packing, operands, cta_groups.cluster)
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
    add_launches(steps, cta_groups, mailbox, tile, group_norm_backward_contiguous, arguments, constants)
    if outputs:
        steps.sum_partials(partial, N * tile.position_parts, sizes.C, outputs)


def forward(
    sizes: Sizes, chip: Chip, steps: Steps, operands: list[Operand], statistics: list[Operand], eps_bits: int
) -> None:
    """Add the launch over the groups. ``operands``: input, output over (N, C, HxW); ``statistics``: mean, rstd."""
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
    mailbox = Mailbox.of(steps, cta_groups, 2 * N * sizes.group)
    parameters = [steps.contiguous_input(name) for name in ("weight", "bias")]
    x, output = operands
    mean, rstd = statistics
    tensors = [x.pointer, *parameters, output.pointer, mean.pointer, rstd.pointer, mailbox.memory]
    spec = _tile_spec(sizes, tile, packing, operands, cta_groups.cluster)
    constants = {"TILE": spec, "SEGMENTS": _forward_segments(tile, itemsize, x.strides[2] == 1)}
    counts = [N, sizes.group, group_blocks, HxW, eps_bits, cta_groups.count]
    arguments = [*tensors, *counts, *strides_in_vectors(operands, spec.vector), mean.strides[0], rstd.strides[0]]
    add_launches(steps, cta_groups, mailbox, tile, group_norm_forward_contiguous, arguments, constants)
