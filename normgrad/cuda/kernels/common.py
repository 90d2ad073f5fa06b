"""What the kernels share: sums of pairs, and how programs that hold parts of one row tell each other their sums."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# What a launch does with rows that several programs share. One launch does it all where the programs run side by side
# and can wait for each other; otherwise one launch makes the sums, and the next reads the data again.
WHOLE = tl.constexpr(0)
SUMS = tl.constexpr(1)
OUTPUTS = tl.constexpr(2)

# A slot that nobody has written yet: two NaNs of a kind that no sum is.
EMPTY = tl.constexpr(-1)


@triton.jit
def float64(number):
    """A size as float64, also where Triton knows it at compile time."""
    return tl.zeros((), tl.float64) + number


@triton.jit
def int64(number):
    """A number in 64 bits, also where Triton knows it at compile time."""
    return tl.zeros((), tl.int64) + number


@triton.jit
def float64_of_bits(bits):
    """A float64 that came as an integer: Triton narrows float arguments to float32."""
    return int64(bits).to(tl.float64, bitcast=True)


@triton.jit
def high(value):
    """The nearest float32 of a float64."""
    return value.to(tl.float32)


@triton.jit
def low(value):
    """What the nearest float32 of a float64 leaves out; nothing where that is infinite."""
    rest = (value - value.to(tl.float32).to(tl.float64)).to(tl.float32)
    return tl.where(rest == rest, rest, 0.0)


@triton.jit
def indices(block, SIZE: tl.constexpr):
    """The indices in a block, in 64 bits."""
    return (tl.zeros((SIZE,), tl.int64) + block) * SIZE + tl.arange(0, SIZE)


@triton.jit
def put(pointers, value, mask):
    """Store float32 values, rounded to nearest even in the target's dtype."""
    dtype: tl.constexpr = pointers.dtype.element_ty
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter cuts off what the GPU rounds, and spoils subnormals.
        bits = value.to(tl.int32, bitcast=True)
        nearest = tl.where(value == value, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        tl.store(pointers, (nearest >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(pointers, value.to(dtype), mask=mask)


@triton.jit
def wide(value):
    """Loaded values in float32."""
    if INTERPRETED and value.dtype == tl.bfloat16:
        # The interpreter spoils subnormals.
        result = (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        result = value.to(tl.float32)
    return result


@triton.jit
def again(value):
    """The same loaded values, which the compiler takes for new ones.

    What was made of 16-bit values is then made again where it is needed again, rather than kept in twice the registers.
    """
    if INTERPRETED or value.dtype == tl.float32:
        result = value
    else:
        result = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], value.dtype, is_pure=False, pack=2)
    return result


@triton.jit
def add_exactly(total, rest, value):
    """Add to a float32 sum and collect in ``rest`` what rounding left out."""
    grown = total + value
    added = grown - total
    return grown, rest + ((total - (grown - added)) + (value - added))


@triton.jit
def rounded_sum(total, rest):
    """A sum with what rounding left out of it; that is NaN where the sum is infinite."""
    return tl.where(rest == rest, total + rest, total)


@triton.jit
def wait_for_launch_before():
    """Wait until all that the launch before this one wrote can be read."""
    if not INTERPRETED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def sum_pair(first, second, axis: tl.constexpr):
    """The sums of two tensors over an axis, in one tree."""
    if INTERPRETED:
        sums = tl.sum(first, axis=axis), tl.sum(second, axis=axis)
    else:
        sums = tl.reduce((first, second), axis, _add_pairs)
    return sums


@triton.jit
def _bits(value):
    """float32 as the low half of an int64; any NaN as the usual one, so that no value looks EMPTY."""
    usual = tl.where(value == value, value, float("nan"))
    return usual.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def publish(first, second, slots, mask):
    """Write two float32 values to a slot of 8 bytes, so that they arrive together."""
    tl.atomic_xchg(slots, _bits(first) | (_bits(second) << 32), mask=mask, sem="relaxed")


# A value may be held by several threads, each of which loaded it for itself, while the sum over all values asks only
# one of them: the others look again here.
_OWN_COPY = tl.constexpr(
    """{
    .reg .pred written;
    mov.b64 $0, $1;
    look:
    setp.ne.s64 written, $0, -1;
    @written bra done;
    ld.relaxed.gpu.global.b64 $0, [$2];
    bra look;
    done:
    }"""
)


@triton.jit
def _written(slots, mask, WAIT: tl.constexpr):
    """What is in the slots; with WAIT once it is there."""
    packed = tl.load(slots, mask=mask, other=0, volatile=True)
    if WAIT:
        while tl.sum((packed == EMPTY).to(tl.int32)) > 0:
            packed = tl.load(slots, mask=mask, other=0, volatile=True)
        packed = tl.inline_asm_elementwise(
            _OWN_COPY, "=&l,l,l", [packed, slots.to(tl.int64)], tl.int64, is_pure=False, pack=1
        )
    return packed


@triton.jit
def collect(slots, mask, WAIT: tl.constexpr):
    """The two float32 values of every slot, as float64; with WAIT once all of them are there."""
    packed = _written(slots, mask, WAIT)
    first = (packed & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    second = (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return first.to(tl.float64), second.to(tl.float64)


@triton.jit
def publish_wide(first, second, slots, mask):
    """Write two float64 values to two slots, one after the other."""
    usual = tl.where(first == first, first, float("nan")).to(tl.float64)
    tl.atomic_xchg(slots, usual.to(tl.int64, bitcast=True), mask=mask, sem="relaxed")
    usual = tl.where(second == second, second, float("nan")).to(tl.float64)
    tl.atomic_xchg(slots + 1, usual.to(tl.int64, bitcast=True), mask=mask, sem="relaxed")


@triton.jit
def collect_wide(slots, mask, WAIT: tl.constexpr):
    """The float64 values of every pair of slots; with WAIT once all of them are there."""
    first = _written(slots, mask, WAIT)
    second = _written(slots + 1, mask, WAIT)
    return first.to(tl.float64, bitcast=True), second.to(tl.float64, bitcast=True)


@triton.jit
def empty_slots(
    slots,  # int64 [count]
    count,
    BLOCK: tl.constexpr,
):
    """Mark slots as not yet written."""
    place = indices(tl.program_id(0), BLOCK)
    tl.store(slots + place, tl.full((BLOCK,), EMPTY, tl.int64), mask=place < count)


@triton.jit
def copy_strided(
    source,
    target,
    count,
    sizes,  # of both, the last dimension fastest
    source_strides,
    target_strides,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a strided tensor to one of other strides."""
    place = indices(tl.program_id(0), BLOCK)
    inside = place < count
    rest = place
    read = tl.zeros((BLOCK,), tl.int64)
    written = tl.zeros((BLOCK,), tl.int64)
    for step in tl.static_range(RANK):
        index = rest % sizes[RANK - 1 - step]
        rest = rest // sizes[RANK - 1 - step]
        read += index * source_strides[RANK - 1 - step]
        written += index * target_strides[RANK - 1 - step]
    tl.store(target + written, tl.load(source + read, mask=inside), mask=inside)


@triton.jit
def sum_columns(
    partial,  # float32 [which, K, N]
    first,  # [segments, N]
    second,  # [segments, N], or None
    K,
    N,
    segment,  # rows of `partial` per program
    first_stride,
    second_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum a stretch of rows in float64, in the order of the rows: a block of columns per program."""
    wait_for_launch_before()
    columns = indices(tl.program_id(0), COLUMNS)
    stretch = tl.program_id(1)
    which = tl.program_id(2)
    inside = columns < N
    begin = stretch.to(tl.int64) * segment
    end = tl.minimum(begin + segment, K)
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    base = partial + which.to(tl.int64) * K * N
    for start in range(begin, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & inside[None, :]
        total += tl.load(base + rows.to(tl.int64)[:, None] * N + columns[None, :], mask=mask, other=0.0).to(tl.float64)
    result = tl.sum(total, axis=0).to(tl.float32)
    target = stretch.to(tl.int64) * N + columns
    if which == 0:
        put(first + target * first_stride, result, inside)
    else:
        if second is not None:
            put(second + target * second_stride, result, inside)
