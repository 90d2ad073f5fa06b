"""How the warps of a cluster tell each other their rows' sums.

As in ``clusters``, but every warp writes what it has of the sums to all programs, in slots of 8 bytes, and every warp
adds up all slots: no warp waits for those of its own program more than for any other.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.clusters import BARRIERS, MOST_ROWS, expect, opening, telling, wait
from normgrad.cuda.device.common import sum_pair

# Warps in a cluster.
MOST_WARPS = 128

_OPEN = tl.constexpr(opening(2 * 8 * MOST_ROWS * MOST_WARPS))
_TELL = tl.constexpr(telling("laneid", "b32"))
_HEAR = tl.constexpr(
    """{
    .reg .pred given;
    setp.ne.b32 given, $3, 0;
    mov.f32 $0, 0f00000000;
    mov.f32 $1, 0f00000000;
    @given ld.shared.v2.f32 {$0, $1}, [$2];
    }"""
)
_SLOT = tl.constexpr(8)
_LANES = tl.constexpr(32)


@triton.jit
def open_slots():
    """The address of a program's barriers and slots in its shared memory; it is the same in all of a cluster."""
    return tl.inline_asm_elementwise(_OPEN, "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def of_warps(first, second, WIDTH: tl.constexpr, WARPS: tl.constexpr):
    """Of a tile's sums of rows what each warp has, [rows, warps]; of WIDTH columns side by side it has all."""
    SHAPE: tl.constexpr = (first.shape[0], first.shape[1] // (WARPS * WIDTH), WARPS, WIDTH)
    first, second = sum_pair(tl.reshape(first, SHAPE), tl.reshape(second, SHAPE), 1)
    return sum_pair(first, second, 2)


@triton.jit
def tell(first, second, slots, part, turn, PARTS: tl.constexpr):
    """Write two float32 values for each row and warp to a slot of every program: the lane of its number does so.

    Every lane has its warp's values, and no other warp has them.
    """
    ROWS: tl.constexpr = first.shape[0]
    WARPS: tl.constexpr = first.shape[1]
    barrier = expect(slots, turn, _SLOT * ROWS * PARTS * WARPS)
    row, warp = tl.arange(0, ROWS)[:, None], tl.arange(0, WARPS)[None, :]
    place = slots + BARRIERS + _SLOT * (((turn % 2 * ROWS + row) * PARTS + part) * WARPS + warp)
    tl.inline_asm_elementwise(
        _TELL, "=r,r,r,f,f,r", [place, barrier, first, second, PARTS], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def sums_of_all(slots, turn, ROWS: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr):
    """Both values of each row summed up over the warps of the PARTS programs, once all have written them.

    They are [rows, warps], all warps' the same: so each has its own. A lane adds up the slots of some warps.
    """
    wait(slots, turn)
    SLOTS: tl.constexpr = PARTS * WARPS
    SHAPE: tl.constexpr = (ROWS, WARPS, _LANES)
    row, lane = tl.arange(0, ROWS)[:, None, None], tl.arange(0, _LANES)[None, None, :]
    begin = slots + BARRIERS + _SLOT * ((turn % 2 * ROWS + row) * SLOTS + lane)
    first = tl.zeros(SHAPE, tl.float32)
    second = tl.zeros(SHAPE, tl.float32)
    for start in tl.static_range(0, SLOTS, _LANES):
        places = tl.broadcast_to(begin + _SLOT * start, SHAPE)
        given = tl.broadcast_to((lane + start < SLOTS).to(tl.int32), SHAPE)
        one, other = tl.inline_asm_elementwise(
            _HEAR, "=f,=f,r,r", [places, given], (tl.float32, tl.float32), is_pure=False, pack=1
        )
        first += one
        second += other
    return sum_pair(first, second, 2)


@triton.jit
def over_columns(values, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Of [rows, warps] for each of a tile's columns what its warp has; WIDTH as in ``of_warps``."""
    ROWS: tl.constexpr = values.shape[0]
    WARPS: tl.constexpr = values.shape[1]
    SHAPE: tl.constexpr = (ROWS, COLUMNS // (WARPS * WIDTH), WARPS, WIDTH)
    return tl.reshape(tl.broadcast_to(values[:, None, :, None], SHAPE), (ROWS, COLUMNS))
