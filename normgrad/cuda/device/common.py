"""What the kernels share: sums of pairs, and how programs that hold parts of one row tell each other their sums."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime import JITFunction

try:
    from triton.language import target_info
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # before Triton 3.5
    target_info = gdc_launch_dependents = gdc_wait = None

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


INTERPRETED = tl.constexpr(not isinstance(float64, JITFunction))
OVERLAPS = tl.constexpr(not INTERPRETED and target_info is not None)  # launches may, as far as Triton goes


@triton.jit
def int64(number):
    """A number in 64 bits, also where Triton knows it at compile time."""
    return tl.zeros((), tl.int64) + number


@triton.jit
def float64_of_bits(bits):
    """A float64 that came as an integer: Triton narrows float arguments to float32."""
    return int64(bits).to(tl.float64, bitcast=True)


@triton.jit
def divided(value, divisor, reciprocal):
    """A quotient of float64 in less time than a division: exact where it has few digits."""
    near = value * reciprocal
    exact = near + tl.fma(-near, divisor, value) * reciprocal
    # Not `near - near == 0`: the compiler makes that a fused product, which is what rounding left out of `near`.
    return tl.where(tl.abs(near) < float("inf"), exact, near)


@triton.jit
def high(value):
    """The nearest float32 of a float64."""
    return value.to(tl.float32)


@triton.jit
def indices(block, SIZE: tl.constexpr):
    """The indices in a block, in 64 bits."""
    return (tl.zeros((SIZE,), tl.int64) + block) * SIZE + tl.arange(0, SIZE)


@triton.jit
def offsets_in(strides, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """The offsets of a tile's elements from its first, in 64 bits only where they need them."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    if WIDE:
        rows = rows.to(tl.int64)
        columns = columns.to(tl.int64)
    return rows[:, None] * strides[0] + columns[None, :] * strides[1]


@triton.jit
def put(pointers, value, mask):
    """Store float32 or float64 values, rounded to nearest even in the target's dtype; 16 bits by way of float32."""
    dtype: tl.constexpr = pointers.dtype.element_ty
    if value.dtype == tl.float64 and dtype != tl.float64:
        value = value.to(tl.float32)
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter cuts off what the GPU rounds, and spoils subnormals.
        tl.store(pointers, (_nearest_bfloat16(value) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
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


# How 16-bit data comes: as it is, or two numbers in an int32. The compiler gives every 16-bit number a register of its
# own, and takes pairs apart and puts them together more often than it has to.
SINGLE = tl.constexpr(0)
BFLOAT16_PAIRS = tl.constexpr(1)
FLOAT16_PAIRS = tl.constexpr(2)

_BFLOAT16_APART = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
_FLOAT16_APART = tl.constexpr(
    "{.reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high;}"
)


@triton.jit
def apart(pairs, KIND: tl.constexpr):
    """Pairs as float32 numbers, side by side in the last dimension; made anew wherever they are needed."""
    if INTERPRETED:
        if KIND == BFLOAT16_PAIRS:
            first = (pairs << 16).to(tl.float32, bitcast=True)
            second = (pairs & -65536).to(tl.float32, bitcast=True)
        else:
            first = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            second = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == BFLOAT16_PAIRS:
        first, second = tl.inline_asm_elementwise(
            _BFLOAT16_APART, "=r,=r,r", [pairs], (tl.float32, tl.float32), is_pure=False, pack=1
        )
    else:
        first, second = tl.inline_asm_elementwise(
            _FLOAT16_APART, "=f,=f,r", [pairs], (tl.float32, tl.float32), is_pure=False, pack=1
        )
    return tl.interleave(first, second)


@triton.jit
def first_of_pair(pair, KIND: tl.constexpr):
    """The first number of each pair in float32."""
    if KIND == BFLOAT16_PAIRS:
        first = (pair << 16).to(tl.float32, bitcast=True)
    else:
        first = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return first


@triton.jit
def _nearest_bfloat16(value):
    """The bits of the nearest bfloat16, as the high half of an int32."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(value == value, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)


@triton.jit
def together(values, SHAPE: tl.constexpr, KIND: tl.constexpr):
    """Numbers as pairs, each rounded to nearest even; SHAPE is that of the pairs, and 2."""
    first, second = tl.split(tl.reshape(values, SHAPE))
    if INTERPRETED:
        if KIND == BFLOAT16_PAIRS:
            low = (_nearest_bfloat16(first) >> 16) & 0xFFFF
            pairs = low | (_nearest_bfloat16(second) & -65536)
        else:
            low = first.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            pairs = low | (second.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    elif KIND == BFLOAT16_PAIRS:
        pairs = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], tl.int32, is_pure=True, pack=1
        )
    else:
        pairs = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], tl.int32, is_pure=True, pack=1
        )
    return pairs


@triton.jit
def numbers(data, KIND: tl.constexpr):
    """Loaded data in float32, made anew wherever it is needed rather than kept."""
    if KIND == SINGLE:
        result = wide(again(data))
    else:
        result = apart(data, KIND)
    return result


@triton.jit
def put_numbers(pointers, values, mask, SHAPE: tl.constexpr, KIND: tl.constexpr):
    """Store results as the data comes: one by one, or as pairs; SHAPE is that of the pairs, and 2."""
    if KIND == SINGLE:
        put(pointers, values, mask)
    else:
        tl.store(pointers, together(values.to(tl.float32), SHAPE, KIND), mask=mask)


@triton.jit
def again(value):
    """The same loaded values, which the compiler takes for new ones.

    What was made of 16-bit values is then made again where it is needed again, rather than kept in twice the registers.
    """
    if INTERPRETED or value.dtype == tl.float32:
        result = value
    else:
        result = tl.inline_asm_elementwise("mov.b16 $0, $1;", "=h,h", [value], value.dtype, is_pure=False, pack=1)
    return result


_LANE_ZERO = tl.constexpr(
    """{
    .reg .b32 lane, mask;
    mov.u32 lane, %laneid;
    mov.u32 mask, %lanemask_eq;
    shr.u32 mask, mask, lane;
    sub.s32 $0, mask, 1;
    }"""
)


@triton.jit
def lane_zero():
    """A 0 of which the compiler does not know that all threads of a warp have it."""
    if INTERPRETED:
        result = 0
    else:
        result = tl.inline_asm_elementwise(_LANE_ZERO, "=r", [], tl.int32, is_pure=True, pack=1)
    return result


@triton.jit
def add_with_rest(total, rest, value):
    """Add to a sum and collect in ``rest`` what rounding left out of it, if it is float32; of float64 that is nothing.

    Exactly where the sum is larger than the value, and otherwise but for a rounding or two of the value: all in all
    that is a rounding or two of the sum of the values' sizes, however many they are.
    """
    grown = total + value
    if total.dtype == tl.float32:
        rest += value - (grown - total)
    return grown, rest


@triton.jit
def rounded_sum(total, rest):
    """A sum with what rounding left out of it; that is NaN where the sum is infinite."""
    if total.dtype == tl.float32:
        total = tl.where(rest == rest, total + rest, total)
    return total


@triton.jit
def wait_for_launch_before():
    """Wait until all that the launch before this one wrote can be read; older GPUs start no launch before."""
    if OVERLAPS:  # noqa: SIM102 - Triton looks at both sides of an "and"
        if target_info.cuda_capability_geq(9):
            gdc_wait()


@triton.jit
def let_next_launch_begin():
    """Let the next launch begin where there is room; it waits for this one to end before it reads its results."""
    if OVERLAPS:  # noqa: SIM102 - Triton looks at both sides of an "and"
        if target_info.cuda_capability_geq(9):
            gdc_launch_dependents()


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
    """A value as float32 in the low half of an int64; any NaN as the usual one, so that no value looks EMPTY."""
    usual = tl.where(value == value, value, float("nan")).to(tl.float32)
    return usual.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def publish(first, second, slots, mask):
    """Write two values as float32 to a slot of 8 bytes, so that they arrive together."""
    tl.atomic_xchg(slots, _bits(first) | (_bits(second) << 32), mask=mask, sem="relaxed")


# Every thread looks for itself, since several may hold the same value. No loop of Triton's, which would keep the loop
# around it from loading ahead. A slot outside the mask gives 0.
_LOOK = tl.constexpr(
    """{
    .reg .pred wanted;
    setp.ne.s32 wanted, $2, 0;
    mov.b64 $0, 0;
    @wanted ld.relaxed.gpu.global.b64 $0, [$1];
    }"""
)
_LOOK_AGAIN = tl.constexpr(
    """{
    .reg .pred missing;
    mov.b64 $0, $1;
    look:
    setp.eq.s64 missing, $0, -1;
    @missing nanosleep.u32 32;
    @missing ld.relaxed.gpu.global.b64 $0, [$2];
    @missing bra look;
    }"""
)


@triton.jit
def look(slots, mask):
    """What is in the slots now, all asked at once so that their ways through the memory overlap; 0 outside the mask."""
    wanted = tl.broadcast_to(mask, slots.shape).to(tl.int32)
    return tl.inline_asm_elementwise(_LOOK, "=&l,l,r", [slots.to(tl.int64), wanted], tl.int64, is_pure=False, pack=1)


@triton.jit
def look_again(seen, slots):
    """What was seen in the slots, or where that was nothing, what is there as soon as it is."""
    return tl.inline_asm_elementwise(
        _LOOK_AGAIN, "=&l,l,l", [seen, slots.to(tl.int64)], tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _written(slots, mask, WAIT: tl.constexpr):
    """What is in the slots; with WAIT once all of it is there."""
    if WAIT:
        packed = look_again(look(slots, mask), slots)
    else:
        packed = tl.load(slots, mask=mask, other=0)
    return packed


@triton.jit
def two_of(packed):
    """The two float32 values of every slot, as float64."""
    first = (packed & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    second = (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return first.to(tl.float64), second.to(tl.float64)


@triton.jit
def collect(slots, mask, WAIT: tl.constexpr):
    """The two float32 values of every slot, as float64; with WAIT once all of them are there."""
    return two_of(_written(slots, mask, WAIT))


@triton.jit
def settled(values, SIZE: tl.constexpr):
    """A few values, one by one: the threads that hold what they were made of need not be those that use them.

    Otherwise the compiler has every thread collect all slots for itself, to save itself this exchange.
    """
    place = tl.arange(0, SIZE)
    result = tl.zeros((SIZE,), values.dtype)
    for item in tl.static_range(SIZE):
        result = tl.where(place == item, tl.sum(tl.where(place == item, values, 0.0)), result)
    return result


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
    if WAIT:  # both asked for before either is waited for
        seen, further = look(slots, mask), look(slots + 1, mask)
        first, second = look_again(seen, slots), look_again(further, slots + 1)
    else:
        first, second = _written(slots, mask, False), _written(slots + 1, mask, False)
    return first.to(tl.float64, bitcast=True), second.to(tl.float64, bitcast=True)
