"""Exchange of partial sums between CTAs through a mailbox in global memory.

Each CTA of a CTA group publishes the two sums of its part of a row or group in a slot of its own, and every CTA of the
group receives all slots and adds them up in the same order: so the result does not depend on which CTA came first.
Slots start as UNWRITTEN (``clear_mailbox``); a written slot is never UNWRITTEN, and is read until it is written. No
fence is needed: a slot is a single 8-byte word that holds the value itself. Two float64 sums take two slots.

CTAs may wait for each other only in a cooperative launch. Elsewhere the work is divided into two launches, and the
second reads what the first has written (see PHASE).
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from normgrad.cuda.device.compiler_barriers import block_rematerialization
from normgrad.cuda.device.formulas import merge_moments

# PHASE of a launch on rows or groups that several CTAs share. FUSED: one launch reduces and applies. Otherwise one
# launch computes the sums (REDUCE), and the next reads the data a second time and writes the results (APPLY).
FUSED = tl.constexpr(0)
REDUCE = tl.constexpr(1)
APPLY = tl.constexpr(2)

#: The bits of a slot before it is written: two NaNs with a payload that ``publish`` never writes.
UNWRITTEN = tl.constexpr(-1)


@triton.jit
def _float32_bits(value):
    """Return float32 bits in the low half of an int64; every NaN as the canonical one, which is not UNWRITTEN."""
    canonical = tl.where(value == value, value, float("nan")).to(tl.float32)
    return canonical.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def publish(first, second, slots, mask):
    """Write each pair of values as float32 to one 8-byte slot, so that both arrive together."""
    tl.atomic_xchg(slots, _float32_bits(first) | (_float32_bits(second) << 32), mask=mask, sem="relaxed")


@triton.jit
def publish_float64(first, second, slots, mask):
    """Write each pair of float64 values to two consecutive slots."""
    canonical = tl.where(first == first, first, float("nan")).to(tl.float64)
    tl.atomic_xchg(slots, canonical.to(tl.int64, bitcast=True), mask=mask, sem="relaxed")
    canonical = tl.where(second == second, second, float("nan")).to(tl.float64)
    tl.atomic_xchg(slots + 1, canonical.to(tl.int64, bitcast=True), mask=mask, sem="relaxed")


# Every thread polls for itself, since several may hold the same element. Not a loop of Triton's, which would keep the
# loop around it from being software-pipelined. A slot outside the mask reads as 0.
_POLL = tl.constexpr(
    """{
    .reg .pred wanted;
    setp.ne.s32 wanted, $2, 0;
    mov.b64 $0, 0;
    @wanted ld.relaxed.gpu.global.b64 $0, [$1];
    }"""
)
_SPIN = tl.constexpr(
    """{
    .reg .pred missing;
    mov.b64 $0, $1;
    poll:
    setp.eq.s64 missing, $0, -1;
    @missing nanosleep.u32 32;
    @missing ld.relaxed.gpu.global.b64 $0, [$2];
    @missing bra poll;
    }"""
)


@triton.jit
def _poll(slots, mask):
    """Read all slots once, without waiting, so that their latencies overlap."""
    wanted = tl.broadcast_to(mask, slots.shape).to(tl.int32)
    return tl.inline_asm_elementwise(_POLL, "=&l,l,r", [slots.to(tl.int64), wanted], tl.int64, is_pure=False, pack=1)


@triton.jit
def _spin(polled, slots):
    """Return what was polled, or where a slot was UNWRITTEN, what is there as soon as it is written."""
    return tl.inline_asm_elementwise(_SPIN, "=&l,l,l", [polled, slots.to(tl.int64)], tl.int64, is_pure=False, pack=1)


@triton.jit
def publish_sums(first, second, slots, index, mask, FLOAT64: tl.constexpr):
    """Write each pair of sums to the slot of this index as float32, or for FLOAT64 to two slots as float64."""
    if FLOAT64:
        publish_float64(first, second, slots + index * 2, mask)
    else:
        publish(first, second, slots + index, mask)


@triton.jit
def receive_sums(slots, mask, WAIT: tl.constexpr, FLOAT64: tl.constexpr):
    """Return what was published in slots at these addresses, as float64. With WAIT as soon as all are written."""
    if FLOAT64:
        if WAIT:  # both are polled before either is waited for
            first_polled, second_polled = _poll(slots, mask), _poll(slots + 1, mask)
            first, second = _spin(first_polled, slots), _spin(second_polled, slots + 1)
        else:
            first, second = tl.load(slots, mask=mask, other=0), tl.load(slots + 1, mask=mask, other=0)
        first, second = first.to(tl.float64, bitcast=True), second.to(tl.float64, bitcast=True)
    else:
        words = _spin(_poll(slots, mask), slots) if WAIT else tl.load(slots, mask=mask, other=0)
        first = (words & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
        second = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return first.to(tl.float64), second.to(tl.float64)


@triton.jit
def receive_parts(slots, index, inside, WAIT: tl.constexpr, FLOAT64: tl.constexpr, TILE: tl.constexpr):
    """Return the sums [rows, padded parts] of all parts of rows or groups, and which of the parts there are.

    ``index``: of each row or group among all; ``inside``: which of them there are.
    """
    parts = tl.arange(0, TILE.padded_parts)
    slots += (index[:, None] * TILE.parts + parts[None, :]) * (2 if FLOAT64 else 1)
    mask = inside[:, None] & (parts < TILE.parts)[None, :]
    first, second = receive_sums(slots, mask, WAIT, FLOAT64)
    return first, second, mask


@triton.jit
def receive_totals(slots, index, inside, WAIT: tl.constexpr, FLOAT64: tl.constexpr, TILE: tl.constexpr):
    """Return both sums [rows] of rows or groups over all parts, in their order; arguments of ``receive_parts``."""
    first, second, _ = receive_parts(slots, index, inside, WAIT, FLOAT64, TILE)
    first = block_rematerialization(tl.sum(first, axis=1))
    return first, block_rematerialization(tl.sum(second, axis=1))


@triton.jit
def receive_moments(slots, index, inside, part_counts, count, WAIT: tl.constexpr, TILE: tl.constexpr):
    """Return means and sums of squares about these, [rows], of rows or groups over all parts.

    Arguments of ``receive_parts``; ``part_counts`` and ``count`` as for ``merge_moments``.
    """
    sums, squares, mask = receive_parts(slots, index, inside, WAIT, True, TILE)
    mean, squares = merge_moments(sums, squares, part_counts, mask, count)
    return block_rematerialization(mean), block_rematerialization(squares)
