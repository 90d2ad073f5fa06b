"""Blocks of channels that lie side by side in memory: items of work, what a tile has, and sums by group.

A block has CHANNELS channels, whatever groups they belong to. A section of a sample is the fewest blocks that no group
reaches beyond, SECTION of them. An item is PARTS-th of the places of a block; items are numbered with the blocks of a
section fastest, then its parts, then the sections of a sample.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.kernels.common import EMPTY, INTERPRETED, int64, sum_pair


@triton.jit
def item_at(item, sections, PARTS: tl.constexpr, SECTION: tl.constexpr):
    """The sample, the section of it, the part of its places and the block of its channels."""
    whole = item // (PARTS * SECTION)
    section = whole % sections
    return whole // sections, section, item // SECTION % PARTS, section * SECTION + item % SECTION


@triton.jit
def tile_offsets(channel_stride, place_stride, PLACES: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr):
    """The offsets of a tile's elements from its first, in 64 bits only where they need them."""
    places = tl.arange(0, PLACES)
    channels = tl.arange(0, CHANNELS)
    if WIDE:
        places = places.to(tl.int64)
        channels = channels.to(tl.int64)
    return places[:, None] * place_stride + channels[None, :] * channel_stride


@triton.jit
def tile_at(
    pointer,
    sample,
    part,
    block,
    sample_stride,
    channel_stride,
    place_stride,
    PLACES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Where an item's tile begins."""
    first = int64(block) * WORDS * channel_stride + int64(part) * PLACES * place_stride
    return pointer + int64(sample) * sample_stride + first


@triton.jit
def tile_mask(given, part, block, HxW, C, PLACES: tl.constexpr, CHANNELS: tl.constexpr, MASKED: tl.constexpr):
    """Which elements of a tile there are: all of a ``given`` item where MASKED is off."""
    if MASKED:
        places = tl.arange(0, PLACES) < tl.minimum(HxW - int64(part) * PLACES, PLACES).to(tl.int32)
        channels = (tl.arange(0, CHANNELS) < C - block * CHANNELS) & given
        mask = places[:, None] & channels[None, :]
    else:
        mask = (tl.zeros((PLACES, CHANNELS), tl.int32) == 0) & given
    return mask


@triton.jit
def of_groups(first, second, block, D: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr):
    """Sums of two values per channel of a block over the channels of each of its groups."""
    if CHANNELS % D == 0:
        first = tl.reshape(first, (CHANNELS // D, D))
        second = tl.reshape(second, (CHANNELS // D, D))
    else:
        begin = block * CHANNELS
        channels = begin + tl.arange(0, CHANNELS)
        member = (channels // D)[None, :] == (begin // D + tl.arange(0, GROUPS))[:, None]
        first = tl.where(member, first[None, :], 0.0)
        second = tl.where(member, second[None, :], 0.0)
    return sum_pair(first, second, 1)


@triton.jit
def entries_of(
    block,
    part,
    sample,
    group,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    OVER: tl.constexpr,
):
    """The entries of an item in the list [N, group, PARTS, OVER] of the sums of groups, and which of them there are."""
    begin = block * CHANNELS
    groups = begin // D + tl.arange(0, GROUPS)
    entry = ((int64(sample) * group + groups) * PARTS + part) * OVER + block - groups * D // CHANNELS
    return entry, (groups < group) & (groups * D < begin + CHANNELS)


@triton.jit
def section_groups(
    section, group, D: tl.constexpr, CHANNELS: tl.constexpr, SECTION: tl.constexpr, PADDED: tl.constexpr
):
    """The groups of a section, and which of them there are."""
    groups = section * (SECTION * CHANNELS) // D + tl.arange(0, PADDED)
    return groups, (groups < group) & (groups * D < (section + 1) * (SECTION * CHANNELS))


@triton.jit
def blocks_of(groups, D: tl.constexpr, CHANNELS: tl.constexpr):
    """How many blocks have channels of these groups."""
    return (groups * D + D - 1) // CHANNELS - groups * D // CHANNELS + 1


@triton.jit
def of_channels(values, block, D: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr):
    """For each channel of a block the value of its group."""
    begin = block * CHANNELS
    return tl.gather(values, tl.minimum((begin + tl.arange(0, CHANNELS)) // D - begin // D, GROUPS - 1), 0)


# How many items of a section are done is counted from EMPTY on, until the sums of its groups are there.
READY = tl.constexpr(-2)

# A barrier of Triton's would keep the loop around it from loading ahead.
_ALL_THREADS = tl.constexpr("bar.sync 0; mov.b64 $0, $1;")
_WAIT = tl.constexpr(
    """{
    .reg .pred missing;
    .reg .b64 seen;
    setp.ne.s32 missing, $2, 0;
    wait:
    @missing ld.acquire.gpu.global.b64 seen, [$1];
    @missing setp.ne.s64 missing, seen, -2;
    @missing nanosleep.u32 32;
    @missing bra wait;
    mov.b32 $0, 0;
    }"""
)
_TOTALS = tl.constexpr(
    """{
    .reg .pred wanted;
    setp.ne.s32 wanted, $3, 0;
    mov.f64 $0, 0d0000000000000000;
    mov.f64 $1, 0d0000000000000000;
    @wanted ld.relaxed.gpu.global.v2.f64 {$0, $1}, [$2];
    }"""
)


@triton.jit
def _after_all_threads(number):
    """The same int64, once all threads of the program are here."""
    if not INTERPRETED:
        number = tl.inline_asm_elementwise(_ALL_THREADS, "=l,l", [int64(number)], tl.int64, is_pure=False, pack=1)
    return int64(number)


@triton.jit
def last_to_arrive(arrivals, given, COUNT: tl.constexpr):
    """Say that this program is done with an item of a section of COUNT, and whether all the others were before it.

    What they wrote until then can be read.
    """
    arrived = tl.atomic_add(arrivals, _after_all_threads(1), mask=given, sem="acq_rel")
    return given & (arrived == EMPTY + COUNT - 1)


@triton.jit
def say_ready(arrivals):
    """Say that the sums of a section's groups are there."""
    tl.atomic_xchg(arrivals, _after_all_threads(READY), sem="release")


@triton.jit
def totals_of(totals, statistic, known, arrivals, given, WAIT: tl.constexpr):
    """The two float64 of each statistic; with WAIT once its section says that they are there."""
    place = totals + statistic * 2
    if WAIT:
        wanted = (tl.zeros((), tl.int32) + given).to(tl.int32)
        tl.inline_asm_elementwise(_WAIT, "=r,l,r", [arrivals.to(tl.int64), wanted], tl.int32, is_pure=False, pack=1)
        first, second = tl.inline_asm_elementwise(
            _TOTALS,
            "=&d,=&d,l,r",
            [place.to(tl.int64), known.to(tl.int32)],
            (tl.float64, tl.float64),
            is_pure=False,
            pack=1,
        )
    else:
        first = tl.load(place, mask=known, other=0.0)
        second = tl.load(place + 1, mask=known, other=0.0)
    return first, second


@triton.jit
def put_totals(totals, statistic, first, second, known):
    """Two float64 for each statistic."""
    tl.store(totals + statistic * 2, first, mask=known)
    tl.store(totals + statistic * 2 + 1, second, mask=known)
