"""How a thread waits for its next job without going to sleep."""

import platform

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from normgrad.cpu.jit import kernel
from normgrad.cpu.llvm import call_intrinsic
from normgrad.cpu.memory import load_acquire

_HAS_PAUSE = platform.machine() in ("x86_64", "AMD64")
# About 0.2 ms, several times what waking up takes; and the few µs from a caller's bell to its letting go of the
# interpreter's lock, which the helper needs next.
_LOOKS, _LAST_LOOKS = (12_000, 100) if _HAS_PAUSE else (100_000, 2000)


@intrinsic
def _pause(typingctx):
    """Leave the core to its other thread for a moment."""

    def codegen(context, builder, sig, args):
        if _HAS_PAUSE:
            call_intrinsic(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


@kernel
def watch(desc):
    """Return soon after the number at the address desc[0] is no longer desc[1], or when it has not changed for long."""
    looks = _LOOKS
    while looks > 0 and load_acquire(desc[0], 0) == desc[1]:
        looks -= 1
        _pause()
    if looks > 0:
        for _ in range(_LAST_LOOKS):
            _pause()
