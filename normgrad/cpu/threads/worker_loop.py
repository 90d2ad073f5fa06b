"""Kernels that call kernels: how worker threads and PyTorch's threads run them without the GIL."""

import platform

from llvmlite import ir
from numba.core.types import int32, int64, void

from normgrad.cpu.compile.jit import kernel
from normgrad.cpu.descriptors import IDLE, POSTED, Mailbox, ParallelLoop
from normgrad.cpu.intrinsics.llvm import I32_TYPE, I64_TYPE, call_intrinsic, emitted
from normgrad.cpu.intrinsics.memory import fetch_add, load_acquire, store_release

_HAS_PAUSE = platform.machine() in ("x86_64", "AMD64")
_POLLS = 12_000 if _HAS_PAUSE else 100_000  # about 0.2 ms, several times what waking up takes
_POLLS_FOR_TURN = 1000  # some microseconds


@emitted(void)
def _pause(builder):
    """Leave the core to its other hardware thread for a moment."""
    if _HAS_PAUSE:
        call_intrinsic(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])


@emitted(int32, int64, int64)
def _call(builder, function, descriptor):
    """Call a kernel by its address, return its status."""
    signature = ir.FunctionType(I32_TYPE, [I64_TYPE])
    return builder.call(builder.inttoptr(function, signature.as_pointer()), [descriptor])


@kernel
def serve(mailbox: Mailbox):
    """Run the jobs that are posted; return when there has been none for a while."""
    polls = _POLLS
    while polls > 0:
        if load_acquire(mailbox.state) == POSTED:
            _call(mailbox.function, mailbox.descriptor)
            store_release(mailbox.state, IDLE)
            polls = _POLLS
        polls -= 1
        _pause()


@kernel
def take_part(index, end, loop: ParallelLoop):
    """Call the loop's kernel once, as thread `index` of a parallel loop.

    Threads enter in the order of their indices, so that each gets the same share of the work in every call, whose data
    is in its cache; but none waits long for another that is late.
    """
    polls = 0
    while load_acquire(loop.entered) < index and polls < _POLLS_FOR_TURN:
        polls += 1
    fetch_add(loop.entered, 1)
    status = _call(loop.function, loop.descriptor)
    if status != 0:
        store_release(loop.status, status)
