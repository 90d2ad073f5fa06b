"""Kernels that call kernels: how threads of our own and of PyTorch's run them without the interpreter."""

import platform

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from normgrad.cpu.compile.jit import kernel
from normgrad.cpu.fields.jobs import (
    DESCRIPTOR,
    ENTERED,
    FUNCTION,
    IDLE,
    JOB_DESCRIPTOR,
    JOB_FUNCTION,
    JOB_STATUS,
    POSTED,
    STATE,
)
from normgrad.cpu.intrinsics.llvm import I32_TYPE, I64_TYPE, call_intrinsic
from normgrad.cpu.intrinsics.memory import fetch_add, load_acquire, start_of, store_release

_HAS_PAUSE = platform.machine() in ("x86_64", "AMD64")
_LOOKS = 12_000 if _HAS_PAUSE else 100_000  # about 0.2 ms, several times what waking up takes
_LOOKS_FOR_TURN = 1000  # some microseconds


@intrinsic
def _pause(typingctx):
    """Leave the core to its other thread for a moment."""

    def codegen(context, builder, sig, args):
        if _HAS_PAUSE:
            call_intrinsic(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _call(typingctx, function, descriptor):
    """Call a kernel by its address, return its status."""

    def codegen(context, builder, sig, args):
        signature = ir.FunctionType(I32_TYPE, [I64_TYPE])
        return builder.call(builder.inttoptr(args[0], signature.as_pointer()), [args[1]])

    return types.int32(types.int64, types.int64), codegen


@kernel
def serve(desc):
    """Run the jobs that are posted; return when there has been none for long."""
    box, looks = start_of(desc), _LOOKS
    while looks > 0:
        if load_acquire(box, STATE) == POSTED:
            _call(desc[FUNCTION], desc[DESCRIPTOR])
            store_release(box, STATE, IDLE)
            looks = _LOOKS
        looks -= 1
        _pause()


@kernel
def take_part(number, end, job):
    """Call the job's kernel once, as thread ``number`` of a parallel loop.

    Threads enter in the order of their numbers, so that each gets the same share of the work in every call, whose data
    is in its cache; but none waits long for another that is late.
    """
    start, looks = start_of(job), 0
    while load_acquire(start, ENTERED) < number and looks < _LOOKS_FOR_TURN:
        looks += 1
    fetch_add(start, ENTERED, 1)
    status = _call(job[JOB_FUNCTION], job[JOB_DESCRIPTOR])
    if status != 0:
        job[JOB_STATUS] = status
