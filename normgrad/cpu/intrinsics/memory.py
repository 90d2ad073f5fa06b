"""Single values by raw address: loads, stores, rounding, counters that threads share, prefetches."""

import sys

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from normgrad.cpu.compile.jit import device
from normgrad.cpu.intrinsics.llvm import (
    DOUBLE_TYPE,
    FLOAT_TYPE,
    I32_TYPE,
    I64_TYPE,
    STORAGE,
    as_i64,
    call_intrinsic,
    narrowed,
    pointer_to,
    size_of,
    widened,
)


@intrinsic
def load(typingctx, kind, address, index):
    """load(kind, address, index) -> float32"""

    def codegen(context, builder, sig, args):
        element = STORAGE[kind]
        address_, index_ = (as_i64(context, builder, a, t) for a, t in zip(args[1:], sig.args[1:]))
        return widened(
            builder, kind, builder.load(pointer_to(builder, address_, index_, element), align=size_of(element))
        )

    return types.float32(kind, address, index), codegen


@intrinsic
def store(typingctx, kind, address, index, value):
    """store(kind, address, index, value): value is cast to float32, then rounded to the kind's dtype."""

    def codegen(context, builder, sig, args):
        element = STORAGE[kind]
        address_, index_ = (as_i64(context, builder, a, t) for a, t in zip(args[1:3], sig.args[1:3]))
        builder.store(
            narrowed(builder, kind, args[3]), pointer_to(builder, address_, index_, element), align=size_of(element)
        )
        return context.get_dummy_value()

    return types.void(kind, address, index, types.float32), codegen


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


@intrinsic
def fetch_add(typingctx, address, index, amount):
    """Atomically add to an int64 in memory, return what was there before."""

    def codegen(context, builder, sig, args):
        pointer = pointer_to(builder, args[0], args[1], I64_TYPE)
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def load_acquire(typingctx, address, index):
    """Atomic int64 load: what its writer stored before is visible after."""

    def codegen(context, builder, sig, args):
        return builder.load_atomic(pointer_to(builder, args[0], args[1], I64_TYPE), "acquire", 8)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def store_release(typingctx, address, index, value):
    """Atomic int64 store: who reads it sees what was done before."""

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[2], pointer_to(builder, args[0], args[1], I64_TYPE), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def start_of(typingctx, descriptor):
    """The address of a descriptor, which kernels get as a pointer to int64."""

    def codegen(context, builder, sig, args):
        return builder.ptrtoint(args[0], I64_TYPE)

    return types.int64(descriptor), codegen


_FROM_ABOVE = 1 << 32  # what is taken from above is counted in the upper half of a counter


@device
def take(address, index, items, slot):
    """Take one of the items that threads share by a counter in memory: its number, or `items` if none is left.

    Even slots take them from below and odd ones from above: with two threads each has one half of the data, which is
    the half that it has in its cache from PyTorch's operators, and from the call before.
    """
    taken = fetch_add(address, index, _FROM_ABOVE if slot & 1 else 1)
    below, above = taken & (_FROM_ABOVE - 1), taken >> 32
    if below + above >= items:
        return items
    return items - 1 - above if slot & 1 else below


_SPINS_BEFORE_YIELD = 2000
_yield_name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
_yield_to_others = types.ExternalFunction(_yield_name, types.int32())


@device
def wait_until(address, index, value):
    """Return once the int64 in memory has reached `value`. Spins first: the other threads are nearly done."""
    spins = 0
    while load_acquire(address, index) < value:
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            _yield_to_others()


def stack_space(nbytes):
    """A function that kernels call for the address of so many bytes of their own, aligned to a cache line."""

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
def item_size(typingctx, kind):
    """Bytes per element of a kind."""
    size = size_of(STORAGE[kind])
    return types.int64(kind), lambda context, builder, sig, args: ir.Constant(I64_TYPE, size)


def _prefetch(locality):
    @intrinsic
    def prefetch(typingctx, address):
        def codegen(context, builder, sig, args):
            pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
            constants = [ir.Constant(I32_TYPE, v) for v in (0, locality, 1)]
            call_intrinsic(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, *constants])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    return prefetch


# Ask for the cache line at an address in the second-level cache; any address is safe.
prefetch_l2 = _prefetch(2)


@intrinsic
def round_for(typingctx, kind, value):
    """float64 -> float32 on the way to `kind`: to odd before a 16-bit store, the only rounding then."""

    def codegen(context, builder, sig, args):
        nearest = builder.fptrunc(args[1], FLOAT_TYPE)
        if kind == types.float32:
            return nearest
        back = builder.fpext(nearest, DOUBLE_TYPE)
        sizes = [call_intrinsic(builder, "llvm.fabs.f64", DOUBLE_TYPE, [v]) for v in (back, args[1])]
        above = builder.fcmp_ordered(">", *sizes)
        inexact = builder.fcmp_ordered("!=", back, args[1])
        bits = builder.sub(builder.bitcast(nearest, I32_TYPE), builder.zext(above, I32_TYPE))
        return builder.bitcast(builder.or_(bits, builder.zext(inexact, I32_TYPE)), FLOAT_TYPE)

    return types.float32(kind, types.float64), codegen
