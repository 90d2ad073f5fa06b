"""Descriptors: what a launch tells a kernel. Each is declared once, here, for the host side and for the kernels.

A descriptor is a block of 64-bit words in memory, one per field in the order of declaration. The host fills an instance
of the class and :func:`pack` turns it into words; a kernel gets a pointer to them and reads the fields by name
(:mod:`normgrad.cpu.intrinsics.structs`). Addresses are known at launch only, so a field of type `Pointer` says which
tensor or which part of the workspace it will point to. Nothing here imports Numba.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, NewType, get_type_hints

import numpy as np

_WORKSPACE = -1
_CACHE_LINE = 8  # words

#: A word that threads change by atomic operations. A kernel gets its address.
Counter = NewType("Counter", int)


@dataclass(frozen=True, slots=True)
class Pointer:
    """Memory whose address is known at launch: a tensor, by its index among the problem's views, or workspace."""

    view: int
    offset: int = 0  # bytes

    @classmethod
    def to_workspace(cls, offset: int) -> Pointer:
        return cls(_WORKSPACE, offset)

    @property
    def is_in_workspace(self) -> bool:
        return self.view == _WORKSPACE


@dataclass
class Phase:
    """The counters of a phase of a kernel: work items that threads have taken, and those that are done."""

    taken: Counter = Counter(0)
    done: Counter = Counter(0)


@dataclass
class Vector:
    """A small tensor that is read or written along one stride: parameters, statistics, small outputs."""

    address: Pointer | None = None  # None, and 0 in a kernel: absent
    stride: int = 0  # elements
    dtype: int = 0  # one of tags.CODES


# LayerNorm: tensors as rows and columns.


@dataclass
class RowAxes:
    """Up to three axes that the rows of a tensor extend over: sizes, or strides in bytes."""

    outer: int = 1
    middle: int = 1
    inner: int = 1


@dataclass
class RowTensor:
    """A large tensor of LayerNorm."""

    address: Pointer | None = None
    column_stride: int = 0  # elements
    strides: RowAxes = field(default_factory=RowAxes)


#: The scratch of a group of rows in the backward pass: byte offsets of arrays with an element per row, and room for a
#: whole vector from any row on. In float32: mean, rstd, mean(g), mean(g*x_hat); in float64: sum(g), sum(g*x_hat). Then
#: the float32 sums of both weight gradients: 32 columns of the one, 32 of the other, and so on.
MEANS, RSTDS, MEANS_G, MEANS_GX, SUMS_G, SUMS_GX, GROUP_SUMS = 0, 128, 256, 384, 512, 768, 1024


@dataclass
class LayerNormBackward:
    """The descriptor of `layer_norm_backward`."""

    rows: int = 0
    columns: int = 0
    blocks: int = 0  # blocks of rows, each with partial weight gradients of its own
    block_rows: int = 0
    splits_columns: int = 0  # long rows: threads share the columns, not the rows
    staged_pitch: int = 0  # bytes between the rows of contiguous copies that rows go through; 0: they do not
    is_large: int = 0  # grad_input does not stay in the caches
    wants_input: int = 0
    wants_weight: int = 0
    wants_bias: int = 0
    float64_terms: int = 0  # the terms of the weight gradients are computed in float64
    cached_rows: int = 0  # rows that stay in a cache between their sums and their gradients
    group_sums_size: int = 0  # bytes of a group's float32 weight gradients
    row_axes: RowAxes = field(default_factory=RowAxes)
    grad_out: RowTensor = field(default_factory=RowTensor)
    input: RowTensor = field(default_factory=RowTensor)
    grad_input: RowTensor = field(default_factory=RowTensor)
    mean: Vector = field(default_factory=Vector)
    rstd: Vector = field(default_factory=Vector)
    weight: Vector = field(default_factory=Vector)
    grad_weight: Vector = field(default_factory=Vector)
    grad_bias: Vector = field(default_factory=Vector)
    weight_lanes: Pointer | None = None  # float32 [padded columns], in lane order
    partials: Pointer | None = None  # float64 [blocks, 2, padded columns]: grad_weight, grad_bias
    row_sums: Pointer | None = None  # float64 [rows, segments, 2]: sum(g), sum(g*x_hat)
    scratch: Pointer | None = None  # [threads, scratch_size bytes]
    scratch_size: int = 0
    slots: int = 0  # threads that there is scratch for
    slot: Counter = Counter(0)
    weight_phase: Phase = field(default_factory=Phase)
    row_sum_phase: Phase = field(default_factory=Phase)
    gradient_phase: Phase = field(default_factory=Phase)
    reduce_phase: Phase = field(default_factory=Phase)


@dataclass
class LayerNormForward:
    """The descriptor of `layer_norm`."""

    rows: int = 0
    columns: int = 0
    padded_columns: int = 0
    blocks: int = 0
    block_rows: int = 0
    staged_pitch: int = 0
    is_large: int = 0  # the output does not stay in the caches
    row_axes: RowAxes = field(default_factory=RowAxes)
    input: RowTensor = field(default_factory=RowTensor)
    output: RowTensor = field(default_factory=RowTensor)
    mean: Vector = field(default_factory=Vector)
    rstd: Vector = field(default_factory=Vector)
    weight: Vector = field(default_factory=Vector)
    bias: Vector = field(default_factory=Vector)
    eps: float = 0.0
    weight_lanes: Pointer | None = None  # float32 [padded columns], in lane order
    bias_lanes: Pointer | None = None
    scratch: Pointer | None = None
    scratch_size: int = 0
    slots: int = 0
    slot: Counter = Counter(0)
    parameter_phase: Phase = field(default_factory=Phase)
    block_phase: Phase = field(default_factory=Phase)


# GroupNorm and BatchNorm: tensors as samples x channels x positions.

#: Arrays of float32 that the coefficients of channels consist of, in the order of `channel.coefficients.gradient`.
COEFFICIENTS = 6


@dataclass
class ChannelTensor:
    """A large tensor of GroupNorm or BatchNorm."""

    address: Pointer | None = None
    sample_stride: int = 0  # elements, as the other strides
    channel_stride: int = 0
    position_stride: int = 0


@dataclass
class Channel:
    """The descriptor of all kernels of GroupNorm and BatchNorm.

    Work comes in chunks, whose size depends on the shape alone. In rows (positions are contiguous) a chunk is a part of
    one channel of one sample, or several whole channels where they are short; in columns (channels are contiguous) it
    is some positions of one sample, all channels. The sums of every chunk have their own location in the workspace and
    are added in a fixed order, so the bits do not depend on the thread that computed them.
    """

    samples: int = 0
    channels: int = 0
    positions: int = 0
    groups: int = 0
    padded_channels: int = 0  # channels of arrays in the workspace
    chunk_positions: int = 0
    chunks: int = 0  # along the positions
    chunk_channels: int = 0  # whole channels in a chunk of short rows
    chunks_per_take: int = 0
    units: int = 0  # what is summed before its results are written: groups of a sample (rows), a sample (columns)
    unit_groups: int = 0
    unit_chunks: int = 0
    units_per_take: int = 0
    block_samples: int = 1  # samples whose sums a thread adds up as they come
    in_phases: int = 0  # GroupNorm: all sums before all results, where units are too large or too few
    is_contiguous: int = 0  # columns: the elements of a chunk are contiguous and share their statistics
    group_channels: int = 0
    is_large: int = 0  # the result does not stay in the caches
    eps: float = 0.0
    counts: int = 0  # elements of counter
    grad_out: ChannelTensor = field(default_factory=ChannelTensor)
    input: ChannelTensor = field(default_factory=ChannelTensor)
    result: ChannelTensor = field(default_factory=ChannelTensor)
    mean: Vector = field(default_factory=Vector)
    rstd: Vector = field(default_factory=Vector)  # BatchNorm's invstd
    weight: Vector = field(default_factory=Vector)
    bias: Vector = field(default_factory=Vector)
    sum_dy: Vector = field(default_factory=Vector)
    sum_dy_xmu: Vector = field(default_factory=Vector)
    counter: Vector = field(default_factory=Vector)
    grad_weight: Vector = field(default_factory=Vector)
    grad_bias: Vector = field(default_factory=Vector)
    partials: Pointer | None = None  # float64 [blocks of samples, chunks, 2, padded channels]
    sums: Pointer | None = None  # float64 [blocks of samples, 2, padded channels]
    statistics: Pointer | None = None  # float64: GroupNorm [samples, groups, 2], BatchNorm [2, padded channels]
    coefficients: Pointer | None = None  # float32 [.., COEFFICIENTS, padded channels]; batch_norm_stats: shifts
    parameter_lanes: Pointer | None = None  # float32 [2, padded channels]: weight and bias
    slots: int = 0
    slot: Counter = Counter(0)
    parameter_phase: Phase = field(default_factory=Phase)
    sum_phase: Phase = field(default_factory=Phase)
    statistics_phase: Phase = field(default_factory=Phase)
    result_phase: Phase = field(default_factory=Phase)
    output_phase: Phase = field(default_factory=Phase)


@dataclass
class GatherStats:
    """The descriptor of `batch_norm_gather_stats_with_counts`."""

    ranks: int = 0
    channels: int = 0
    padded_channels: int = 0
    momentum: float = 0.0
    eps: float = 0.0
    mean: Vector = field(default_factory=Vector)  # of the first rank
    mean_pitch: int = 0  # bytes from one rank to the next
    invstd: Vector = field(default_factory=Vector)
    invstd_pitch: int = 0
    counts: Vector = field(default_factory=Vector)
    running_mean: Vector = field(default_factory=Vector)
    running_var: Vector = field(default_factory=Vector)
    mean_all: Vector = field(default_factory=Vector)
    invstd_all: Vector = field(default_factory=Vector)
    results: Pointer | None = None  # float64 [4, padded channels]


# Copies.

COPY_RANK = 8


@dataclass
class CopyTensor:
    """The source or the target of a copy."""

    address: Pointer | None = None
    strides: tuple[int, ...] = (0,) * COPY_RANK


@dataclass
class Copy:
    """The descriptor of `copy`."""

    blocks: int = 0  # of rows, which are along the last axis
    blocks_per_take: int = 0
    row_blocks: int = 0
    block_rows: int = 0
    column_blocks: int = 0
    block_columns: int = 0
    sizes: tuple[int, ...] = (0,) * COPY_RANK
    source: CopyTensor = field(default_factory=CopyTensor)
    target: CopyTensor = field(default_factory=CopyTensor)
    phase: Phase = field(default_factory=Phase)


@dataclass
class Fill:
    """The descriptor of `fill`."""

    target: Vector = field(default_factory=Vector)
    count: int = 0
    value: float = 0.0


# Threads.

IDLE, POSTED = 0, 1  # a job stays posted until it is done


@dataclass
class Mailbox:
    """How a worker thread gets a job: a kernel's address and its descriptor's."""

    state: Counter = Counter(IDLE)
    function: int = 0
    descriptor: int = 0


@dataclass
class ParallelLoop:
    """A kernel that the threads of PyTorch's pool call."""

    function: int = 0
    descriptor: int = 0
    status: Counter = Counter(0)  # other than 0: what one of the threads returned
    entered: Counter = Counter(0)  # threads that have called it


@dataclass(frozen=True, slots=True)
class Field:
    """A field: its first word, how many it has, and its type: int, float, Counter, Pointer, tuple or a class."""

    offset: int
    words: int
    type: Any

    @property
    def is_struct(self) -> bool:
        return is_dataclass(self.type) and self.type is not Pointer


@cache
def layout(struct: Any) -> dict[str, Field]:
    """Return the fields of a descriptor, or of a part of one, by name."""
    found: dict[str, Field] = {}
    hints, end = get_type_hints(struct), 0
    for each in fields(struct):
        declared = hints[each.name]
        if declared is Phase and not any(other.type is Phase for other in found.values()):
            end += _CACHE_LINE  # threads write counters while others read the rest: no cache line has both
        if declared == Pointer | None:
            own = Field(end, 1, Pointer)
        elif isinstance(each.default, tuple):
            own = Field(end, len(each.default), tuple)
        else:
            is_struct = is_dataclass(declared)
            own = Field(end, size(declared) if is_struct else 1, declared)
        found[each.name] = own
        end += own.words
    return found


@cache
def size(struct: Any) -> int:
    """Return how many words a descriptor has."""
    last = list(layout(struct).values())[-1]
    return last.offset + last.words + (_CACHE_LINE if last.type is Phase else 0)


def pack(descriptor: Any) -> tuple[array[int], list[tuple[int, Pointer]]]:
    """Return a descriptor's words, and the words that are addresses, with what they point to."""
    struct: Any = type(descriptor)
    words, pointers = array("q", bytes(8 * size(struct))), list[tuple[int, Pointer]]()
    _pack_into(words, pointers, descriptor, 0)
    return words, pointers


def _pack_into(words: array[int], pointers: list[tuple[int, Pointer]], descriptor: Any, start: int) -> None:
    struct: Any = type(descriptor)
    for name, each in layout(struct).items():
        value, at = getattr(descriptor, name), start + each.offset
        if each.type is Pointer:
            if value is not None:
                pointers.append((at, value))
        elif each.type is float:
            words[at] = int(np.float64(value).view(np.int64))
        elif each.type is tuple:
            words[at : at + len(value)] = array("q", value)
        elif each.is_struct:
            _pack_into(words, pointers, value, at)
        else:
            words[at] = int(value)
