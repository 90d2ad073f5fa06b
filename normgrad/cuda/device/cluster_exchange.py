"""Exchange of partial sums between the CTAs of a cluster, through distributed shared memory (DSMEM; Hopper and later).

A CTA has an exchange buffer in its shared memory: mbarriers that count the bytes it receives, then slots. The buffer is
declared in inline assembly, beside the shared memory that Triton allocates; its address is the same in all CTAs of a
cluster, so that ``mapa`` translates it to another CTA's. Two protocols:

- *CTA exchange* (``init_cta_exchange`` …): each CTA sends two float64 sums for each row to every CTA. Sums are received
  in the order of the CTAs, so every CTA computes the same bits.
- *warp exchange* (``init_warp_exchange`` …): each warp sends two float32 sums for each row to every CTA, and every warp
  adds up all slots. No warp waits for the others of its own CTA more than for any other.

Both are used once per iteration and double-buffered by its parity: there are two mbarriers and two sets of slots. A CTA
sends for iteration i only after it has received all of i−1, so every reader is done with i−2.

Senders rely on Triton's layouts: all threads (or all lanes of one warp) must hold every value that is sent, or too many
or too few bytes arrive and the mbarrier never completes. ``layout_checks`` reads the compiled layouts.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.sums import sum_pair

MAX_CLUSTER = 8  # CTAs of a CTA exchange of MAX_ROWS rows: the portable cluster size
MAX_EXCHANGE_CLUSTER = 16  # CTAs of a CTA exchange of one row, and of a warp exchange: what Hopper allows
MAX_ROWS = 4  # rows of a tile
MAX_CLUSTER_WARPS = 128  # warps in all CTAs of a cluster, in a warp exchange

_BARRIERS = tl.constexpr(16)  # bytes of the two mbarriers
_SLOT = tl.constexpr(16)  # bytes of a slot of two float64 values
_WARP_SLOT = tl.constexpr(8)  # bytes of a slot of two float32 values
_LANES = tl.constexpr(32)


def _init_asm(nbytes: int) -> str:
    """Return PTX that declares an exchange buffer with ``nbytes`` of slots, initializes it and syncs the cluster.

    After it, all threads may use the barriers, and all CTAs of the cluster have started.
    """
    return f""".shared .align 16 .b8 exchange[{16 + nbytes}];
    {{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 $0, exchange;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first mbarrier.init.shared::cta.b64 [exchange], 1;
    @first mbarrier.init.shared::cta.b64 [exchange + 8], 1;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.acquire.aligned;
    }}"""


def _send_asm(thread: str, dtype: str) -> str:
    """Return PTX that sends two values to the same slot of every CTA: the thread with index i sends to CTA i."""
    return f"""{{
    .reg .pred sends;
    .reg .b32 cta, slot, barrier;
    mov.u32 cta, %{thread};
    setp.lt.u32 sends, cta, $5;
    @sends mapa.shared::cluster.u32 slot, $1, cta;
    @sends mapa.shared::cluster.u32 barrier, $2, cta;
    @sends st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.{dtype} [slot], {{$3, $4}}, [barrier];
    mov.b32 $0, 0;
    }}"""


_INIT_CTA_EXCHANGE = tl.constexpr(_init_asm(2 * 16 * MAX_ROWS * MAX_CLUSTER))
_INIT_WARP_EXCHANGE = tl.constexpr(_init_asm(2 * 8 * MAX_ROWS * MAX_CLUSTER_WARPS))
_SEND_TO_CTAS = tl.constexpr(_send_asm("tid.x", "b64"))
_SEND_FROM_WARPS = tl.constexpr(_send_asm("laneid", "b32"))
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
_WAIT = tl.constexpr(
    """{
    .reg .pred done;
    wait:
    mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2;
    @!done bra wait;
    mov.b32 $0, 0;
    }"""
)
_LOAD_WARP_SLOT = tl.constexpr(
    """{
    .reg .pred inside;
    setp.ne.b32 inside, $3, 0;
    mov.f32 $0, 0f00000000;
    mov.f32 $1, 0f00000000;
    @inside ld.shared.v2.f32 {$0, $1}, [$2];
    }"""
)


@triton.jit
def _expect_bytes(exchange, iteration, nbytes: tl.constexpr):
    """Have the iteration's mbarrier expect ``nbytes``; return its address."""
    barrier = exchange + 8 * (iteration % 2)
    tl.inline_asm_elementwise(_EXPECT, "=r,r,r", [barrier, nbytes], tl.int32, is_pure=False, pack=1)
    return barrier


@triton.jit
def _wait_for_bytes(exchange, iteration):
    """Wait until the iteration's mbarrier has counted all expected bytes."""
    barrier = exchange + 8 * (iteration % 2)
    tl.inline_asm_elementwise(_WAIT, "=r,r,r", [barrier, iteration // 2 % 2], tl.int32, is_pure=False, pack=1)


@triton.jit
def _row_slots(exchange, iteration, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Return the addresses [ROWS] of each row's first slot; a row has PARTS of them."""
    return exchange + _BARRIERS + _SLOT * PARTS * (iteration % 2 * ROWS + tl.arange(0, ROWS))


@triton.jit
def init_cta_exchange():
    """Set up the buffer of a CTA exchange, synchronize the cluster, and return the buffer's address."""
    return tl.inline_asm_elementwise(_INIT_CTA_EXCHANGE, "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def send_to_ctas(first, second, exchange, part, iteration, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Send two float64 values for each row, [ROWS] each, to slot ``part`` of every CTA of the cluster.

    Thread i sends to CTA i. Every thread must hold all rows' values, as it does after a sum over columns that all
    threads share.
    """
    barrier = _expect_bytes(exchange, iteration, _SLOT * ROWS * PARTS)
    slot = _row_slots(exchange, iteration, ROWS, PARTS) + _SLOT * part
    values = [slot, barrier, first.to(tl.float64), second.to(tl.float64), PARTS]
    tl.inline_asm_elementwise(_SEND_TO_CTAS, "=r,r,r,d,d,r", values, tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_for_ctas(exchange, iteration, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Wait until all CTAs have sent; return the addresses [ROWS] of each row's first slot."""
    _wait_for_bytes(exchange, iteration)
    return _row_slots(exchange, iteration, ROWS, PARTS)


@triton.jit
def received_from(part, row_slots):
    """Return the two float64 values for each row that a CTA has sent."""
    return tl.inline_asm_elementwise(
        "ld.shared.v2.f64 {$0, $1}, [$2];",
        "=d,=d,r",
        [row_slots + _SLOT * part],
        (tl.float64, tl.float64),
        is_pure=False,
        pack=1,
    )


@triton.jit
def sum_received(row_slots, PARTS: tl.constexpr):
    """Return both values summed over the CTAs, in their order."""
    first, second = received_from(0, row_slots)
    for part in tl.static_range(1, PARTS):
        more_first, more_second = received_from(part, row_slots)
        first += more_first
        second += more_second
    return first, second


@triton.jit
def init_warp_exchange():
    """Set up the buffer of a warp exchange, synchronize the cluster, and return the buffer's address."""
    return tl.inline_asm_elementwise(_INIT_WARP_EXCHANGE, "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def sum_by_warp(first, second, WIDTH: tl.constexpr, WARPS: tl.constexpr):
    """Sum each row over the columns that a warp holds, [rows, WARPS]; a warp holds all of WIDTH adjacent columns."""
    SHAPE: tl.constexpr = (first.shape[0], first.shape[1] // (WARPS * WIDTH), WARPS, WIDTH)
    first, second = sum_pair(tl.reshape(first, SHAPE), tl.reshape(second, SHAPE), 1)
    return sum_pair(first, second, 2)


@triton.jit
def send_from_warps(first, second, exchange, part, iteration, PARTS: tl.constexpr):
    """Send two float32 values for each row and warp, [rows, warps] each, to every CTA of the cluster.

    Lane i of a warp sends to CTA i. Every lane must hold its warp's values, and no other warp may hold them.
    """
    ROWS: tl.constexpr = first.shape[0]
    WARPS: tl.constexpr = first.shape[1]
    barrier = _expect_bytes(exchange, iteration, _WARP_SLOT * ROWS * PARTS * WARPS)
    row, warp = tl.arange(0, ROWS)[:, None], tl.arange(0, WARPS)[None, :]
    slot = exchange + _BARRIERS + _WARP_SLOT * (((iteration % 2 * ROWS + row) * PARTS + part) * WARPS + warp)
    tl.inline_asm_elementwise(
        _SEND_FROM_WARPS, "=r,r,r,f,f,r", [slot, barrier, first, second, PARTS], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def sum_received_from_warps(exchange, iteration, ROWS: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr):
    """Wait until all warps have sent, and return both values of each row summed over the warps of PARTS CTAs.

    The sums are [ROWS, WARPS] with the same value for all warps: each warp computes its own copy. A lane adds up the
    slots lane, lane + 32, …; then a tree adds up the lanes.
    """
    _wait_for_bytes(exchange, iteration)
    SLOTS: tl.constexpr = PARTS * WARPS
    SHAPE: tl.constexpr = (ROWS, WARPS, _LANES)
    row, lane = tl.arange(0, ROWS)[:, None, None], tl.arange(0, _LANES)[None, None, :]
    begin = exchange + _BARRIERS + _WARP_SLOT * ((iteration % 2 * ROWS + row) * SLOTS + lane)
    first = tl.zeros(SHAPE, tl.float32)
    second = tl.zeros(SHAPE, tl.float32)
    for start in tl.static_range(0, SLOTS, _LANES):
        slots = tl.broadcast_to(begin + _WARP_SLOT * start, SHAPE)
        inside = tl.broadcast_to((lane + start < SLOTS).to(tl.int32), SHAPE)
        more_first, more_second = tl.inline_asm_elementwise(
            _LOAD_WARP_SLOT, "=f,=f,r,r", [slots, inside], (tl.float32, tl.float32), is_pure=False, pack=1
        )
        first += more_first
        second += more_second
    return sum_pair(first, second, 2)


@triton.jit
def expand_to_columns(values, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Expand [rows, warps] to [rows, COLUMNS]: each column gets the value of the warp that holds it.

    WIDTH as for ``sum_by_warp``.
    """
    ROWS: tl.constexpr = values.shape[0]
    WARPS: tl.constexpr = values.shape[1]
    SHAPE: tl.constexpr = (ROWS, COLUMNS // (WARPS * WIDTH), WARPS, WIDTH)
    return tl.reshape(tl.broadcast_to(values[:, None, :, None], SHAPE), (ROWS, COLUMNS))
