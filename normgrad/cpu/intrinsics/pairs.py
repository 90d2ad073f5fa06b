"""Pairs of vectors: 32 elements at a time, in the lane order that converts fastest.

A bfloat16 pair is one 64-byte load, split into even and odd elements by a shift and a mask, without shuffles. So what
meets such a pair lane by lane (weights, weight gradients) is kept in the same order in the workspace. Pairs of other
dtypes have the order of memory.
"""

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core.types import UniTuple, boolean, float32, int64, void

from normgrad.cpu.intrinsics import llvm
from normgrad.cpu.intrinsics.llvm import TAG, emitted
from normgrad.cpu.intrinsics.vectors import f32x16
from normgrad.cpu.tags import BF16, CODES, F16, F32, TAGS

PAIR = 2 * llvm.LANES
_ROUNDS_BFLOAT = llvm.HAS_AVX512 and bool(get_host_cpu_features().get("avx512bf16"))
pair_type = UniTuple(f32x16, 2)


def _lane_order(tag):
    """Return which element each lane of a pair holds: of bfloat16 the even ones, then the odd ones."""
    return [*range(0, PAIR, 2), *range(1, PAIR, 2)] if tag == BF16 else list(range(PAIR))


def _inverse(order):
    """Return which lane holds each element."""
    return [order.index(i) for i in range(PAIR)]


def _shuffled(builder, low, high, order):
    """Return these lanes of two vectors as one vector."""
    return builder.shuffle_vector(low, high, ir.Constant(llvm.vector_of(llvm.I32_TYPE, len(order)), order))


def _shuffled_pair(builder, low, high, order):
    """Return these lanes of two vectors as two vectors."""
    return [_shuffled(builder, low, high, order[: llvm.LANES]), _shuffled(builder, low, high, order[llvm.LANES :])]


def _are_below(builder, elements, count):
    """Return which of these elements are among the first `count`."""
    narrow = llvm.splatted(builder, builder.trunc(count, llvm.I32_TYPE), len(elements))
    return builder.icmp_signed("<", ir.Constant(narrow.type, elements), narrow)


def _split(builder, tag, raw):
    """Convert 32 elements as they are stored to a pair of f32x16."""
    if tag == BF16:
        words = builder.bitcast(raw, llvm.vector_of(llvm.I32_TYPE))
        even = builder.shl(words, llvm.constant(words.type, 16))
        odd = builder.and_(words, llvm.constant(words.type, 0xFFFF0000))
        return [builder.bitcast(v, llvm.vector_of(llvm.FLOAT_TYPE)) for v in (even, odd)]
    undefined = ir.Constant(raw.type, ir.Undefined)
    return [llvm.widened(builder, tag, half) for half in _shuffled_pair(builder, raw, undefined, list(range(PAIR)))]


def _join(builder, tag, low, high):
    """Round a pair of f32x16 to 32 elements as they are stored.

    The instruction that rounds to bfloat16 flushes subnormal numbers to zero; its first operand is the upper half.
    """
    if tag == BF16 and _ROUNDS_BFLOAT:
        name, halves = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", llvm.vector_of(llvm.BFloatType(), PAIR)
        rounded = llvm.call_intrinsic(builder, name, halves, [high, low])
        words = builder.bitcast(rounded, llvm.vector_of(llvm.I16_TYPE, PAIR))
        return _shuffled(builder, words, words, _inverse(_lane_order(BF16)))
    if tag == BF16:
        low, high = llvm.rounded_to_bfloat(builder, low), llvm.rounded_to_bfloat(builder, high)
        even = builder.lshr(low, llvm.constant(low.type, 16))
        odd = builder.and_(high, llvm.constant(high.type, 0xFFFF0000))
        return builder.bitcast(builder.or_(even, odd), llvm.vector_of(llvm.I16_TYPE, PAIR))
    low, high = llvm.narrowed(builder, tag, low), llvm.narrowed(builder, tag, high)
    return _shuffled(builder, low, high, list(range(PAIR)))


def _float_to_half_bits(builder, value):
    """Round f32x16 to the bits of 16 float16, to nearest even."""
    half_bits = llvm.vector_of(llvm.I16_TYPE)
    arguments = [value, ir.Constant(llvm.I32_TYPE, 0), ir.Constant(half_bits, None), ir.Constant(llvm.I16_TYPE, 0xFFFF)]
    return llvm.call_intrinsic(builder, "llvm.x86.avx512.mask.vcvtps2ph.512", half_bits, arguments)


def _store_halves(builder, pointer, values, align):
    """Store a pair of f32x16 as float16, one vector after the other, and return the two stores.

    One instruction converts and stores 16 elements; to join the pair first would cost twice as much. The elements are
    stored as integers, because LLVM has no non-temporal store of float16, and folds a bitcast of float16 into one.
    """
    halves = builder.bitcast(pointer, llvm.vector_of(llvm.I16_TYPE).as_pointer())
    return [
        builder.store(
            _float_to_half_bits(builder, value), builder.gep(halves, [ir.Constant(llvm.I32_TYPE, i)]), align=align
        )
        for i, value in enumerate(values)
    ]


def _masked_store(builder, pointer, values, count, align):
    """Store the first `count` lanes."""
    name, lanes = f"llvm.masked.store.{llvm.type_suffix(values.type)}.p0", values.type.count
    arguments = [values, pointer, ir.Constant(llvm.I32_TYPE, align), _are_below(builder, list(range(lanes)), count)]
    llvm.call_intrinsic(builder, name, ir.VoidType(), arguments)


def _store_first_floats(builder, pointer, values, count):
    """Store the first `count` of 32 float32, as two masked stores.

    Where no lane of the second vector is stored, it gets the address of the first: a masked store fetches the cache
    line at its address even if it writes no lane, and that would be the next row's line.
    """
    low = builder.bitcast(pointer, llvm.vector_of(llvm.FLOAT_TYPE).as_pointer())
    rest = builder.sub(count, ir.Constant(count.type, llvm.LANES))
    is_needed = builder.icmp_signed(">", rest, ir.Constant(count.type, 0))
    high = builder.select(is_needed, builder.gep(low, [ir.Constant(llvm.I32_TYPE, 1)]), low)
    for half, value, lanes in ((low, values[0], count), (high, values[1], rest)):
        _masked_store(builder, half, value, lanes, 4)


def _masked_load(builder, dtype, address, index, count):
    """Load the first `count` of 32 elements, zeros after, and split them."""
    vector, align = llvm.vector_of(llvm.STORAGE[dtype], PAIR), ir.Constant(llvm.I32_TYPE, llvm.size_of(dtype))
    pointer, mask = llvm.pointer_to(builder, dtype, address, index, PAIR), _are_below(builder, list(range(PAIR)), count)
    arguments = [pointer, align, mask, ir.Constant(vector, None)]
    raw = llvm.call_intrinsic(builder, f"llvm.masked.load.{llvm.type_suffix(vector)}.p0", vector, arguments)
    return _split(builder, dtype, raw)


@emitted(pair_type, TAG, int64, int64)
def load_pair(builder, dtype, address, index):
    """Load 32 elements; no alignment needed."""
    return _split(builder, dtype, llvm.load_raw(builder, dtype, address, index, PAIR))


@emitted(void, TAG, int64, int64)
def prefetch_pair(builder, dtype, address, index):
    """Prefetch 32 elements into the L2 cache; any address is safe."""
    for line in range(0, PAIR, 64 // llvm.size_of(dtype)):
        pointer = llvm.pointer_to(builder, dtype, address, builder.add(index, ir.Constant(index.type, line)))
        llvm.prefetch(builder, builder.bitcast(pointer, ir.IntType(8).as_pointer()))


@emitted(pair_type, TAG, int64, int64, int64)
def load_pair_first(builder, dtype, address, index, count):
    """Load the first `count` of 32 elements, zeros after; nothing beyond is read."""
    return _masked_load(builder, dtype, address, index, count)


def _selected(builder, tag, count, first, second):
    """Return a pair with the first `count` elements of one pair, and the elements after these of another."""
    order = _lane_order(tag)
    masks = (_are_below(builder, half, count) for half in (order[: llvm.LANES], order[llvm.LANES :]))
    return [builder.select(*each) for each in zip(masks, first, second)]


@emitted(pair_type, TAG, int64, int64, int64, float32)
def load_pair_or(builder, dtype, address, index, count, other):
    """Load the first `count` of 32 elements, `other` in the lanes after; nothing beyond is read."""
    loaded, filling = _masked_load(builder, dtype, address, index, count), [llvm.splatted(builder, other)] * 2
    return _selected(builder, dtype, count, loaded, filling)


@emitted(pair_type, TAG, int64, float32, float32)
def split_pair(builder, dtype, columns, first, second):
    """Return a pair with one value in the first `columns` elements, another in those after."""
    before, after = ([llvm.splatted(builder, value)] * 2 for value in (first, second))
    return _selected(builder, dtype, columns, before, after)


@emitted(void, TAG, int64, int64, f32x16, f32x16)
def store_pair(builder, dtype, address, index, low, high):
    """Store 32 elements."""
    pointer, align = llvm.pointer_to(builder, dtype, address, index, PAIR), llvm.size_of(dtype)
    if dtype == F16 and llvm.HAS_AVX512:
        _store_halves(builder, pointer, (low, high), align)
    else:
        builder.store(_join(builder, dtype, low, high), pointer, align=align)


@emitted(void, TAG, int64, int64, f32x16, f32x16, int64)
def store_pair_first(builder, dtype, address, index, low, high, count):
    """Store the first `count` of 32 elements."""
    pointer = llvm.pointer_to(builder, dtype, address, index, PAIR)
    if dtype == F32:
        _store_first_floats(builder, pointer, (low, high), count)
    else:
        _masked_store(builder, pointer, _join(builder, dtype, low, high), count, llvm.size_of(dtype))


def _make_non_temporal(builder, stores):
    for stored in stores:
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(llvm.I32_TYPE, 1)]))


@emitted(void, TAG, int64, int64, f32x16, f32x16)
def stream_pair(builder, dtype, address, index, low, high):
    """Store 32 elements by non-temporal stores; the address must be a multiple of 64."""
    pointer = llvm.pointer_to(builder, dtype, address, index, PAIR)
    if dtype == F16 and llvm.HAS_AVX512:
        stores = _store_halves(builder, pointer, (low, high), 32)
    else:
        lanes = llvm.vector_of(llvm.FLOAT_TYPE, PAIR * llvm.size_of(dtype) // 4)
        raw = builder.bitcast(_join(builder, dtype, low, high), lanes)
        stores = [builder.store(raw, builder.bitcast(pointer, lanes.as_pointer()), align=64)]
    _make_non_temporal(builder, stores)


@emitted(void, int64, int64, f32x16)
def stream_vector(builder, address, index, value):
    """Store 16 float32 by a non-temporal store; the address must be a multiple of 64."""
    stored = builder.store(value, llvm.pointer_to(builder, F32, address, index, llvm.LANES), align=64)
    _make_non_temporal(builder, [stored])


@emitted(pair_type, TAG, int64, int64)
def load_ordered(builder, dtype, address, index):
    """Load 32 float32 in the lane order of a dtype's pairs."""
    low, high = _split(builder, F32, llvm.load_raw(builder, F32, address, index, PAIR))
    return _shuffled_pair(builder, low, high, _lane_order(dtype))


@emitted(void, TAG, int64, int64, f32x16, f32x16)
def store_ordered(builder, dtype, address, index, low, high):
    """Store 32 float32 in the order of elements; they are given in the lane order of a dtype's pairs."""
    low, high = _shuffled_pair(builder, low, high, _inverse(_lane_order(dtype)))
    pointer = llvm.pointer_to(builder, F32, address, index, PAIR)
    builder.store(_join(builder, F32, low, high), pointer, align=4)


@emitted(boolean, TAG)
def is_bfloat16(builder, dtype):
    """Return whether a tag is that of bfloat16, whose pairs have a lane order of their own."""
    return ir.Constant(ir.IntType(1), int(dtype == BF16))


@emitted(int64, TAG)
def code_of(builder, dtype):
    """Return the number of a dtype in descriptors (``tags.CODES``)."""
    return ir.Constant(llvm.I64_TYPE, next(CODES[known] for known, tag in TAGS.items() if tag == dtype))


def _copies(lanes):
    @emitted(void, TAG, TAG, int64, int64, int64, int64)
    def copies(builder, source_dtype, target_dtype, source, source_index, target, target_index):
        value = llvm.load_raw(builder, source_dtype, source, source_index, lanes)
        if source_dtype != target_dtype:
            value = llvm.narrowed(builder, target_dtype, llvm.widened(builder, source_dtype, value))
        pointer = llvm.pointer_to(builder, target_dtype, target, target_index, lanes)
        builder.store(value, pointer, align=llvm.size_of(target_dtype))

    return copies


#: Copy an element, or 16 consecutive ones, from a dtype to another: (source_dtype, target_dtype, source, index, target,
#: index). Of one dtype they are copied bit for bit.
copy_element, copy_vector = _copies(1), _copies(llvm.LANES)
