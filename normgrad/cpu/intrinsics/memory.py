"""Scalars by address: loads, stores, rounding, atomic counters, prefetches, stack memory."""

from llvmlite import ir
from numba.core.types import float32, float64, int32, int64, void

from normgrad.cpu.intrinsics.llvm import (
    DOUBLE_TYPE,
    FLOAT_TYPE,
    I32_TYPE,
    I64_TYPE,
    STORAGE,
    TAG,
    call_math,
    emitted,
    narrowed,
    pointer_to,
    prefetch,
    size_of,
    widened,
)
from normgrad.cpu.tags import F32


@emitted(float32, TAG, int64, int64)
def load(builder, dtype, address, index):
    """Load an element as float32."""
    element = STORAGE[dtype]
    raw = builder.load(pointer_to(builder, address, index, element), align=size_of(element))
    return widened(builder, dtype, raw)


@emitted(void, TAG, int64, int64, float32)
def store(builder, dtype, address, index, value):
    """Store a float32, rounded to the dtype."""
    element = STORAGE[dtype]
    raw = narrowed(builder, dtype, value)
    builder.store(raw, pointer_to(builder, address, index, element), align=size_of(element))


def _raw_load(element, numba_type):
    @emitted(numba_type, int64, int64)
    def raw_load(builder, address, index):
        return builder.load(pointer_to(builder, address, index, element), align=size_of(element))

    return raw_load


def _raw_store(element, numba_type):
    @emitted(void, int64, int64, numba_type)
    def raw_store(builder, address, index, value):
        builder.store(value, pointer_to(builder, address, index, element), align=size_of(element))

    return raw_store


load_f64, store_f64 = _raw_load(DOUBLE_TYPE, float64), _raw_store(DOUBLE_TYPE, float64)
load_i32 = _raw_load(I32_TYPE, int32)
load_i64, store_i64 = _raw_load(I64_TYPE, int64), _raw_store(I64_TYPE, int64)


def _int64_pointer(builder, address):
    return builder.inttoptr(address, I64_TYPE.as_pointer())


@emitted(int64, int64, int64)
def fetch_add(builder, address, amount):
    """Atomically add to an int64 in memory, return what was there before."""
    return builder.atomic_rmw("add", _int64_pointer(builder, address), amount, "seq_cst")


@emitted(int64, int64)
def load_acquire(builder, address):
    """Atomic int64 load: what its writer stored before is visible after."""
    return builder.load_atomic(_int64_pointer(builder, address), "acquire", 8)


@emitted(void, int64, int64)
def store_release(builder, address, value):
    """Atomic int64 store: who reads it sees what was done before."""
    builder.store_atomic(value, _int64_pointer(builder, address), "release", 8)


def stack_space(nbytes):
    """Return a function that kernels call for the address of `nbytes` on their stack, aligned to a cache line."""

    @emitted(int64)
    def space(builder):
        with builder.goto_entry_block():
            area = builder.alloca(ir.ArrayType(ir.IntType(8), nbytes))
        area.align = 64
        return builder.ptrtoint(area, I64_TYPE)

    return space


@emitted(int64, TAG)
def item_size(builder, dtype):
    """Return the bytes of an element."""
    return ir.Constant(I64_TYPE, size_of(STORAGE[dtype]))


@emitted(void, int64)
def prefetch_l2(builder, address):
    """Prefetch the cache line at an address into the L2 cache; any address is safe."""
    prefetch(builder, builder.inttoptr(address, ir.IntType(8).as_pointer()))


@emitted(float32, TAG, float64)
def round_for(builder, dtype, value):
    """float64 -> float32 on the way to `dtype`: to odd before a 16-bit store, the only rounding then."""
    nearest = builder.fptrunc(value, FLOAT_TYPE)
    if dtype == F32:
        return nearest
    back = builder.fpext(nearest, DOUBLE_TYPE)
    sizes = [call_math(builder, "fabs", v) for v in (back, value)]
    above = builder.fcmp_ordered(">", *sizes)
    inexact = builder.fcmp_ordered("!=", back, value)
    bits = builder.sub(builder.bitcast(nearest, I32_TYPE), builder.zext(above, I32_TYPE))
    return builder.bitcast(builder.or_(bits, builder.zext(inexact, I32_TYPE)), FLOAT_TYPE)
