"""Scalars by address: loads, stores, rounding, atomic counters, prefetches, stack memory."""

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from normgrad.cpu.intrinsics.llvm import (
    DOUBLE_TYPE,
    FLOAT_TYPE,
    I32_TYPE,
    I64_TYPE,
    STORAGE,
    as_i64,
    call_math,
    narrowed,
    pointer_to,
    prefetch,
    size_of,
    widened,
)
from normgrad.cpu.tags import F32


@intrinsic
def load(typingctx, dtype, address, index):
    """load(dtype, address, index) -> float32"""

    def codegen(context, builder, sig, args):
        element = STORAGE[dtype.tag]
        address_, index_ = (as_i64(context, builder, a, t) for a, t in zip(args[1:], sig.args[1:]))
        return widened(
            builder, dtype.tag, builder.load(pointer_to(builder, address_, index_, element), align=size_of(element))
        )

    return types.float32(dtype, address, index), codegen


@intrinsic
def store(typingctx, dtype, address, index, value):
    """store(dtype, address, index, value): the value is cast to float32, then rounded to the dtype."""

    def codegen(context, builder, sig, args):
        element = STORAGE[dtype.tag]
        address_, index_ = (as_i64(context, builder, a, t) for a, t in zip(args[1:3], sig.args[1:3]))
        builder.store(
            narrowed(builder, dtype.tag, args[3]),
            pointer_to(builder, address_, index_, element),
            align=size_of(element),
        )
        return context.get_dummy_value()

    return types.void(dtype, address, index, types.float32), codegen


def _raw_load(element, numba_type):
    @intrinsic
    def raw_load(typingctx, address, index):
        def codegen(context, builder, sig, args):
            address_, index_ = (as_i64(context, builder, a, t) for a, t in zip(args, sig.args))
            return builder.load(pointer_to(builder, address_, index_, element), align=size_of(element))

        return numba_type(address, index), codegen

    return raw_load


def _raw_store(element, numba_type):
    @intrinsic
    def raw_store(typingctx, address, index, value):
        def codegen(context, builder, sig, args):
            address_, index_ = (as_i64(context, builder, a, t) for a, t in zip(args[:2], sig.args[:2]))
            builder.store(args[2], pointer_to(builder, address_, index_, element), align=size_of(element))
            return context.get_dummy_value()

        return types.void(address, index, numba_type), codegen

    return raw_store


load_f64, store_f64 = _raw_load(DOUBLE_TYPE, types.float64), _raw_store(DOUBLE_TYPE, types.float64)
load_i32 = _raw_load(I32_TYPE, types.int32)
load_i64, store_i64 = _raw_load(I64_TYPE, types.int64), _raw_store(I64_TYPE, types.int64)


def _int64_pointer(builder, address):
    return builder.inttoptr(address, I64_TYPE.as_pointer())


@intrinsic
def fetch_add(typingctx, address, amount):
    """Atomically add to an int64 in memory, return what was there before."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", _int64_pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def load_acquire(typingctx, address):
    """Atomic int64 load: what its writer stored before is visible after."""

    def codegen(context, builder, sig, args):
        return builder.load_atomic(_int64_pointer(builder, args[0]), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx, address, value):
    """Atomic int64 store: who reads it sees what was done before."""

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[1], _int64_pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def start_of(typingctx, descriptor):
    """Return the address of a descriptor that a kernel gets as a plain pointer to int64."""

    def codegen(context, builder, sig, args):
        return builder.ptrtoint(args[0], I64_TYPE)

    return types.int64(descriptor), codegen


def stack_space(nbytes):
    """Return a function that kernels call for the address of `nbytes` on their stack, aligned to a cache line."""

    @intrinsic
    def space(typingctx):
        def codegen(context, builder, sig, args):
            with builder.goto_entry_block():
                area = builder.alloca(ir.ArrayType(ir.IntType(8), nbytes))
            area.align = 64
            return builder.ptrtoint(area, I64_TYPE)

        return types.int64(), codegen

    return space


@intrinsic
def item_size(typingctx, dtype):
    """Return the bytes of an element."""
    size = size_of(STORAGE[dtype.tag])
    return types.int64(dtype), lambda context, builder, sig, args: ir.Constant(I64_TYPE, size)


@intrinsic
def prefetch_l2(typingctx, address):
    """Prefetch the cache line at an address into the L2 cache; any address is safe."""

    def codegen(context, builder, sig, args):
        prefetch(builder, builder.inttoptr(args[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def round_for(typingctx, dtype, value):
    """float64 -> float32 on the way to `dtype`: to odd before a 16-bit store, the only rounding then."""

    def codegen(context, builder, sig, args):
        nearest = builder.fptrunc(args[1], FLOAT_TYPE)
        if dtype.tag == F32:
            return nearest
        back = builder.fpext(nearest, DOUBLE_TYPE)
        sizes = [call_math(builder, "fabs", v) for v in (back, args[1])]
        above = builder.fcmp_ordered(">", *sizes)
        inexact = builder.fcmp_ordered("!=", back, args[1])
        bits = builder.sub(builder.bitcast(nearest, I32_TYPE), builder.zext(above, I32_TYPE))
        return builder.bitcast(builder.or_(bits, builder.zext(inexact, I32_TYPE)), FLOAT_TYPE)

    return types.float32(dtype, types.float64), codegen
