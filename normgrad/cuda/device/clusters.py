"""How the programs of a cluster, which reach each other's shared memory, tell each other their rows' sums.

In its shared memory a program has two barriers that count the bytes it is told, and a slot of 16 bytes for every row of
a tile and every program: one set for even turns, one for odd ones. Who writes for a turn has heard from all others in
the turn before, and so have they read what was in these slots.

Programs that have sums once, at their end, tell the first of them alone. It does not end before it has heard from all,
and they do not write before it has begun, so that nothing is written to a program that is not there.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

# Programs in a cluster that every GPU with clusters has room for.
LARGEST = 8
MOST_ROWS = 4
# Sums that are told to the first program: no more than a program has threads.
MOST_SUMS = 64


def opening(nbytes: int) -> str:
    """Assembly that sets two barriers up, with room for so many bytes after them, and waits for the whole cluster.

    The threads are to have the address before a barrier is counted on, and the cluster is to be there.
    """
    return f""".shared .align 16 .b8 told[{16 + nbytes}];
    {{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 $0, told;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first mbarrier.init.shared::cta.b64 [told], 1;
    @first mbarrier.init.shared::cta.b64 [told + 8], 1;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.acquire.aligned;
    }}"""


def telling(thread: str, values: str) -> str:
    """Assembly that writes two values to a slot of every program: the thread of its number does so."""
    return f"""{{
    .reg .pred mine;
    .reg .b32 program, place, barrier;
    mov.u32 program, %{thread};
    setp.lt.u32 mine, program, $5;
    @mine mapa.shared::cluster.u32 place, $1, program;
    @mine mapa.shared::cluster.u32 barrier, $2, program;
    @mine st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.{values} [place], {{$3, $4}}, [barrier];
    mov.b32 $0, 0;
    }}"""


_OPEN = tl.constexpr(opening(2 * 16 * MOST_ROWS * LARGEST))
# The barrier counts on the bytes before anyone can write them. What follows need not wait until the cluster is there.
_OPEN_FIRST = tl.constexpr(
    f""".shared .align 16 .b8 told[{16 + 16 * MOST_SUMS * LARGEST}];
    {{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 $0, told;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first mbarrier.init.shared::cta.b64 [told], 1;
    @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [told], $1;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned;
    }}"""
)
_KEEP = tl.constexpr("st.shared.v2.f64 [$1], {$2, $3}; mov.b32 $0, 0;")
# A thread for every slot, once all threads have written to theirs: several may hold the same sums.
_TELL_FIRST = tl.constexpr(
    """{
    .reg .pred mine;
    .reg .b32 thread, place, there, barrier;
    .reg .b64 first, second;
    barrier.cluster.wait.acquire.aligned;
    bar.sync 0;
    mov.u32 thread, %tid.x;
    setp.lt.u32 mine, thread, $3;
    setp.ne.and.u32 mine, $4, 0, mine;
    mad.lo.u32 place, thread, $5, $2;
    @mine ld.shared.v2.b64 {first, second}, [place];
    @mine mapa.shared::cluster.u32 there, place, 0;
    @mine mapa.shared::cluster.u32 barrier, $1, 0;
    @mine st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [there], {first, second}, [barrier];
    mov.b32 $0, 0;
    }"""
)
_EXPECT = tl.constexpr(
    """{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2;
    mov.b32 $0, 0;
    }"""
)
_TELL = tl.constexpr(telling("tid.x", "b64"))
_WAIT = tl.constexpr(
    """{
    .reg .pred done;
    wait:
    mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2;
    @!done bra wait;
    mov.b32 $0, 0;
    }"""
)
BARRIERS = tl.constexpr(16)
_SLOT = tl.constexpr(16)


@triton.jit
def open_slots():
    """The address of a program's barriers and slots in its shared memory; it is the same in all of a cluster."""
    return tl.inline_asm_elementwise(_OPEN, "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def expect(slots, turn, nbytes: tl.constexpr):
    """Have a turn's barrier count so many bytes."""
    barrier = slots + 8 * (turn % 2)
    tl.inline_asm_elementwise(_EXPECT, "=r,r,r", [barrier, nbytes], tl.int32, is_pure=False, pack=1)
    return barrier


@triton.jit
def wait(slots, turn):
    """Wait until a turn's barrier has counted all bytes."""
    barrier = slots + 8 * (turn % 2)
    tl.inline_asm_elementwise(_WAIT, "=r,r,r", [barrier, turn // 2 % 2], tl.int32, is_pure=False, pack=1)


@triton.jit
def _slots_of(slots, turn, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Where the slots of rows begin."""
    return slots + BARRIERS + _SLOT * PARTS * (turn % 2 * ROWS + tl.arange(0, ROWS))


@triton.jit
def tell(first, second, slots, part, turn, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Write two float64 values for each row to a slot of every program: the thread of that program's number does so.

    Every thread has all rows' values, as the sums over rows whose columns all threads share are.
    """
    barrier = expect(slots, turn, _SLOT * ROWS * PARTS)
    place = _slots_of(slots, turn, ROWS, PARTS) + _SLOT * part
    values = [place, barrier, first.to(tl.float64), second.to(tl.float64), PARTS]
    tl.inline_asm_elementwise(_TELL, "=r,r,r,d,d,r", values, tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_for_all(slots, turn, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Where the slots of rows begin, once all programs have written to them."""
    wait(slots, turn)
    return _slots_of(slots, turn, ROWS, PARTS)


@triton.jit
def told_by(part, places):
    """What a program has told: two values for each row."""
    return tl.inline_asm_elementwise(
        "ld.shared.v2.f64 {$0, $1}, [$2];",
        "=d,=d,r",
        [places + _SLOT * part],
        (tl.float64, tl.float64),
        is_pure=False,
        pack=1,
    )


@triton.jit
def sums_of_all(places, PARTS: tl.constexpr):
    """Both values summed up over the programs, in their order."""
    first, second = told_by(0, places)
    for part in tl.static_range(1, PARTS):
        one, other = told_by(part, places)
        first += one
        second += other
    return first, second


@triton.jit
def open_slots_of_first(SUMS: tl.constexpr, PARTS: tl.constexpr):
    """As ``open_slots``, where all tell the first program so many pairs of sums, once."""
    nbytes: tl.constexpr = _SLOT * SUMS * (PARTS - 1)
    return tl.inline_asm_elementwise(_OPEN_FIRST, "=r,r", [nbytes], tl.int32, is_pure=False, pack=1)


@triton.jit
def tell_first(first, second, slots, part, SUMS: tl.constexpr, PARTS: tl.constexpr):
    """Write pairs of float64 values to slots of the first program; whichever threads have them."""
    place = _slots_of(slots, 0, SUMS, PARTS) + _SLOT * part
    tl.inline_asm_elementwise(_KEEP, "=r,r,d,d", [place, first, second], tl.int32, is_pure=False, pack=1)
    own = slots + BARRIERS + _SLOT * part
    stride: tl.constexpr = _SLOT * PARTS
    told = [slots, own, SUMS, part, stride]
    tl.inline_asm_elementwise(_TELL_FIRST, "=r,r,r,r,r,r", told, tl.int32, is_pure=False, pack=1)
