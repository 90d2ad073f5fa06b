"""Pairs of vectors: 32 elements at a time, in the lane order that converts fastest.

A bfloat16 pair is one 64-byte load split into even and odd columns (a shift and a mask, no shuffles). So vectors that
meet the data lane by lane (weight, weight gradients) are kept in the same order in the workspace.
"""

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core.types import UniTuple, boolean, float32, int64, void

from normgrad.cpu.intrinsics.llvm import (
    FLOAT_TYPE,
    HAS_AVX512,
    I16_TYPE,
    I32_TYPE,
    I64_TYPE,
    LANES,
    STORAGE,
    TAG,
    BFloatType,
    call_intrinsic,
    emitted,
    narrowed,
    pointer_to,
    prefetch,
    size_of,
    splat_constant,
    splatted,
    type_suffix,
    vector_of,
    widened,
)
from normgrad.cpu.intrinsics.vectors import f32x16
from normgrad.cpu.tags import BF16, CODES, F16, F32, TAGS

PAIR = 2 * LANES
_ROUNDS_BFLOAT = HAS_AVX512 and bool(get_host_cpu_features().get("avx512bf16"))
pair_type = UniTuple(f32x16, 2)


def _lane_order(tag):
    """Return the elements in the order of lanes: of bfloat16 the even ones, then the odd ones."""
    return [*range(0, PAIR, 2), *range(1, PAIR, 2)] if tag == BF16 else list(range(PAIR))


def _inverse(order):
    return [order.index(i) for i in range(PAIR)]


def _shuffled(builder, low, high, order):
    """Return these lanes of two vectors as one vector."""
    return builder.shuffle_vector(low, high, ir.Constant(vector_of(I32_TYPE, len(order)), order))


def _shuffled_pair(builder, low, high, order):
    return [_shuffled(builder, low, high, order[:LANES]), _shuffled(builder, low, high, order[LANES:])]


def _are_below(builder, elements, count):
    """Return which of these elements are among the first `count`."""
    narrow = splatted(builder, builder.trunc(count, I32_TYPE), len(elements))
    return builder.icmp_signed("<", ir.Constant(narrow.type, elements), narrow)


def _split(builder, tag, raw):
    """32 storage elements -> two f32x16."""
    if tag == BF16:
        words = builder.bitcast(raw, vector_of(I32_TYPE))
        even = builder.shl(words, splat_constant(words.type, 16))
        odd = builder.and_(words, splat_constant(words.type, 0xFFFF0000))
        return [builder.bitcast(v, vector_of(FLOAT_TYPE)) for v in (even, odd)]
    undefined = ir.Constant(raw.type, ir.Undefined)
    return [widened(builder, tag, half) for half in _shuffled_pair(builder, raw, undefined, list(range(PAIR)))]


def _round_bits(builder, value):
    """float32 bits rounded to bfloat16 in the high half. A NaN gets its quiet bit, so that it stays a NaN."""
    bits = builder.bitcast(value, vector_of(I32_TYPE))
    odd = builder.and_(builder.lshr(bits, splat_constant(bits.type, 16)), splat_constant(bits.type, 1))
    rounded = builder.add(builder.add(bits, splat_constant(bits.type, 0x7FFF)), odd)
    quiet = builder.or_(bits, splat_constant(bits.type, 0x400000))
    return builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)


def _join(builder, tag, low, high):
    """Two f32x16 -> 32 storage elements. The instruction that rounds to bfloat16 flushes subnormal numbers to zero."""
    if tag == BF16 and _ROUNDS_BFLOAT:
        name, halves = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", vector_of(BFloatType(), PAIR)
        words = builder.bitcast(call_intrinsic(builder, name, halves, [high, low]), vector_of(I16_TYPE, PAIR))
        return _shuffled(builder, words, words, _inverse(_lane_order(BF16)))
    if tag == BF16:
        even = builder.lshr(_round_bits(builder, low), splat_constant(vector_of(I32_TYPE), 16))
        odd = builder.and_(_round_bits(builder, high), splat_constant(vector_of(I32_TYPE), 0xFFFF0000))
        return builder.bitcast(builder.or_(even, odd), vector_of(I16_TYPE, PAIR))
    low, high = narrowed(builder, tag, low), narrowed(builder, tag, high)
    return _shuffled(builder, low, high, list(range(PAIR)))


def _float_to_half_bits(builder, value):
    """f32x16 -> the bits of 16 float16, rounded to nearest even."""
    half_bits = vector_of(I16_TYPE)
    arguments = [value, ir.Constant(I32_TYPE, 0), ir.Constant(half_bits, None), ir.Constant(I16_TYPE, 0xFFFF)]
    return call_intrinsic(builder, "llvm.x86.avx512.mask.vcvtps2ph.512", half_bits, arguments)


def _store_halves(builder, pointer, values, align):
    """Store two f32x16 as float16, one after the other: the conversion stores half a pair at half the cost of a pair
    that is joined first. As integers: LLVM has no non-temporal store of float16, and would fold a bitcast.
    """
    halves = builder.bitcast(pointer, vector_of(I16_TYPE).as_pointer())
    return [
        builder.store(_float_to_half_bits(builder, value), builder.gep(halves, [ir.Constant(I32_TYPE, i)]), align=align)
        for i, value in enumerate(values)
    ]


def _masked_store(builder, pointer, values, count, align):
    """Store the first `count` lanes."""
    name, lanes = f"llvm.masked.store.{type_suffix(values.type)}.p0", values.type.count
    arguments = [values, pointer, ir.Constant(I32_TYPE, align), _are_below(builder, list(range(lanes)), count)]
    call_intrinsic(builder, name, ir.VoidType(), arguments)


def _store_first_floats(builder, pointer, values, count):
    """Store the first `count` of 32 float32, in two halves. Where the second half has none of them, it is "stored" to
    the address of the first: a masked store fetches the cache line at its address even if it writes no lane, and that
    would be the next row's.
    """
    low = builder.bitcast(pointer, vector_of(FLOAT_TYPE).as_pointer())
    rest = builder.sub(count, ir.Constant(count.type, LANES))
    is_needed = builder.icmp_signed(">", rest, ir.Constant(count.type, 0))
    high = builder.select(is_needed, builder.gep(low, [ir.Constant(I32_TYPE, 1)]), low)
    for half, value, lanes in ((low, values[0], count), (high, values[1], rest)):
        _masked_store(builder, half, value, lanes, 4)


def _pair_pointer(builder, dtype, address, index):
    return pointer_to(builder, address, index, STORAGE[dtype], PAIR)


def _masked_load(builder, dtype, address, index, count):
    """Load the first `count` of 32 elements, zeros after, and split them."""
    vector, align = vector_of(STORAGE[dtype], PAIR), ir.Constant(I32_TYPE, size_of(STORAGE[dtype]))
    pointer, mask = _pair_pointer(builder, dtype, address, index), _are_below(builder, list(range(PAIR)), count)
    arguments = [pointer, align, mask, ir.Constant(vector, None)]
    raw = call_intrinsic(builder, f"llvm.masked.load.{type_suffix(vector)}.p0", vector, arguments)
    return _split(builder, dtype, raw)


@emitted(pair_type, TAG, int64, int64)
def load_pair(builder, dtype, address, index):
    pointer = _pair_pointer(builder, dtype, address, index)
    return _split(builder, dtype, builder.load(pointer, align=size_of(STORAGE[dtype])))


@emitted(void, TAG, int64, int64)
def prefetch_pair(builder, dtype, address, index):
    """Prefetch 32 elements into the L2 cache; any address is safe."""
    element = STORAGE[dtype]
    for line in range(0, PAIR, 64 // size_of(element)):
        at = builder.add(index, ir.Constant(index.type, line))
        prefetch(builder, builder.bitcast(pointer_to(builder, address, at, element), ir.IntType(8).as_pointer()))


@emitted(pair_type, TAG, int64, int64, int64)
def load_pair_first(builder, dtype, address, index, count):
    """Load the first `count` of 32 elements, zeros after; nothing beyond is read."""
    return _masked_load(builder, dtype, address, index, count)


def _selected(builder, tag, count, first, second):
    """Return a pair: of its first `count` elements from one pair, of those after from another."""
    order = _lane_order(tag)
    masks = (_are_below(builder, half, count) for half in (order[:LANES], order[LANES:]))
    return [builder.select(*each) for each in zip(masks, first, second)]


@emitted(pair_type, TAG, int64, int64, int64, float32)
def load_pair_or(builder, dtype, address, index, count, other):
    """Load the first `count` of 32 elements, `other` in the lanes after; nothing beyond is read."""
    loaded, filling = _masked_load(builder, dtype, address, index, count), [splatted(builder, other)] * 2
    return _selected(builder, dtype, count, loaded, filling)


@emitted(pair_type, TAG, int64, float32, float32)
def split_pair(builder, dtype, columns, first, second):
    """Return a pair with one value in the first `columns` elements, another in those after."""
    before, after = ([splatted(builder, value)] * 2 for value in (first, second))
    return _selected(builder, dtype, columns, before, after)


@emitted(void, TAG, int64, int64, f32x16, f32x16)
def store_pair(builder, dtype, address, index, low, high):
    """Store 32 elements."""
    pointer, align = _pair_pointer(builder, dtype, address, index), size_of(STORAGE[dtype])
    if dtype == F16 and HAS_AVX512:
        _store_halves(builder, pointer, (low, high), align)
    else:
        builder.store(_join(builder, dtype, low, high), pointer, align=align)


@emitted(void, TAG, int64, int64, f32x16, f32x16, int64)
def store_pair_first(builder, dtype, address, index, low, high, count):
    """Store the first `count` of 32 elements."""
    pointer = _pair_pointer(builder, dtype, address, index)
    if dtype == F32:
        _store_first_floats(builder, pointer, (low, high), count)
    else:
        _masked_store(builder, pointer, _join(builder, dtype, low, high), count, size_of(STORAGE[dtype]))


def _make_non_temporal(builder, stores):
    for stored in stores:
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32_TYPE, 1)]))


@emitted(void, TAG, int64, int64, f32x16, f32x16)
def stream_pair(builder, dtype, address, index, low, high):
    """Store 32 elements by non-temporal stores; the address must be a multiple of 64."""
    pointer = _pair_pointer(builder, dtype, address, index)
    if dtype == F16 and HAS_AVX512:
        stores = _store_halves(builder, pointer, (low, high), 32)
    else:
        lanes = vector_of(FLOAT_TYPE, PAIR * size_of(STORAGE[dtype]) // 4)
        raw = builder.bitcast(_join(builder, dtype, low, high), lanes)
        stores = [builder.store(raw, builder.bitcast(pointer, lanes.as_pointer()), align=64)]
    _make_non_temporal(builder, stores)


@emitted(void, int64, int64, f32x16)
def stream_vector(builder, address, index, value):
    """Store 16 float32 by a non-temporal store; the address must be a multiple of 64."""
    stored = builder.store(value, pointer_to(builder, address, index, FLOAT_TYPE, LANES), align=64)
    _make_non_temporal(builder, [stored])


@emitted(pair_type, TAG, int64, int64)
def load_ordered(builder, dtype, address, index):
    """Load 32 float32 in the lane order of a dtype's pairs."""
    low, high = _split(builder, F32, builder.load(_pair_pointer(builder, F32, address, index), align=4))
    return _shuffled_pair(builder, low, high, _lane_order(dtype))


@emitted(void, TAG, int64, int64, f32x16, f32x16)
def store_ordered(builder, dtype, address, index, low, high):
    """Store 32 float32 that are in the lane order of a dtype's pairs in the order of elements."""
    low, high = _shuffled_pair(builder, low, high, _inverse(_lane_order(dtype)))
    builder.store(_join(builder, F32, low, high), _pair_pointer(builder, F32, address, index), align=4)


@emitted(boolean, TAG)
def is_bfloat16(builder, dtype):
    return ir.Constant(ir.IntType(1), int(dtype == BF16))


@emitted(int64, TAG)
def code_of(builder, dtype):
    """Return the number that a dtype has in descriptors."""
    return ir.Constant(I64_TYPE, next(CODES[known] for known, tag in TAGS.items() if tag == dtype))


@emitted(void, TAG, int64, int64, int64, int64)
def copy_element(builder, dtype, source, source_index, target, target_index):
    """Copy an element bit for bit."""
    element = STORAGE[dtype]
    value = builder.load(pointer_to(builder, source, source_index, element), align=size_of(element))
    builder.store(value, pointer_to(builder, target, target_index, element), align=size_of(element))
