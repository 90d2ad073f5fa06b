"""Scalars by address: loads, stores, rounding, atomic counters, prefetches, stack memory."""

from llvmlite import ir
from numba.core.types import float32, float64, int32, int64, void

from normgrad.cpu.intrinsics import llvm
from normgrad.cpu.intrinsics.llvm import TAG, emitted
from normgrad.cpu.tags import F32, F64, I32, I64


def _loaded(dtype):
    """Return the type of an element once it is loaded."""
    return {F64: float64, I64: int64}.get(dtype, float32)


@emitted(_loaded, TAG, int64, int64)
def load(builder, dtype, address, index):
    """Load an element: float64 and int64 as they are, any other dtype as float32."""
    return llvm.widened(builder, dtype, llvm.load_raw(builder, dtype, address, index))


@emitted(void, TAG, int64, int64, _loaded)
def store(builder, dtype, address, index, value):
    """Store a value, rounded to the dtype."""
    raw = llvm.narrowed(builder, dtype, value)
    builder.store(raw, llvm.pointer_to(builder, dtype, address, index), align=llvm.size_of(dtype))


@emitted(int32, int64, int64)
def load_i32(builder, address, index):
    """Load an int32 as it is, where float32 would round it."""
    return llvm.load_raw(builder, I32, address, index)


def _int64_pointer(builder, address):
    return builder.inttoptr(address, llvm.I64_TYPE.as_pointer())


@emitted(int64, int64, int64)
def fetch_add(builder, address, amount):
    """Add to an int64 in memory atomically, and return what was there before."""
    return builder.atomic_rmw("add", _int64_pointer(builder, address), amount, "seq_cst")


@emitted(int64, int64)
def load_acquire(builder, address):
    """Load an int64 atomically: what its writer stored before it is visible after this load."""
    return builder.load_atomic(_int64_pointer(builder, address), "acquire", 8)


@emitted(void, int64, int64)
def store_release(builder, address, value):
    """Store an int64 atomically: a thread that loads it (`load_acquire`) sees what was stored before it."""
    builder.store_atomic(value, _int64_pointer(builder, address), "release", 8)


def stack_space(nbytes):
    """Return a function that kernels call for the address of `nbytes` on their stack, aligned to a cache line."""

    @emitted(int64)
    def space(builder):
        with builder.goto_entry_block():  # so that a call in a loop does not take more stack every time
            area = builder.alloca(ir.ArrayType(ir.IntType(8), nbytes))
        area.align = 64
        return builder.ptrtoint(area, llvm.I64_TYPE)

    return space


@emitted(int64, TAG)
def item_size(builder, dtype):
    """Return the bytes of an element."""
    return ir.Constant(llvm.I64_TYPE, llvm.size_of(dtype))


@emitted(void, int64)
def prefetch_l2(builder, address):
    """Prefetch the cache line at an address into the L2 cache; any address is safe."""
    llvm.prefetch(builder, builder.inttoptr(address, ir.IntType(8).as_pointer()))


@emitted(float32, TAG, float64)
def round_for(builder, dtype, value):
    """Round float64 to the float32 from which `store` makes an element of `dtype`, as if there were one rounding.

    For float32 that is rounding to nearest. A 16-bit store rounds again, so for it the float32 is rounded to odd:
    towards zero, with the last bit set where anything was lost. So the second rounding takes no value for a tie that is
    none.
    """
    nearest = builder.fptrunc(value, llvm.FLOAT_TYPE)
    if dtype == F32:
        return nearest
    back = builder.fpext(nearest, llvm.DOUBLE_TYPE)
    sizes = [llvm.call_math(builder, "fabs", v) for v in (back, value)]
    above = builder.fcmp_ordered(">", *sizes)
    inexact = builder.fcmp_ordered("!=", back, value)
    bits = builder.sub(builder.bitcast(nearest, llvm.I32_TYPE), builder.zext(above, llvm.I32_TYPE))
    return builder.bitcast(builder.or_(bits, builder.zext(inexact, llvm.I32_TYPE)), llvm.FLOAT_TYPE)
