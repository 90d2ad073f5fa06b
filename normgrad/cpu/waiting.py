"""How a helper thread serves: it looks out for jobs and runs them without the interpreter, which would take longer."""

import platform

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from normgrad.cpu.jit import kernel
from normgrad.cpu.llvm import I32_TYPE, I64_TYPE, call_intrinsic
from normgrad.cpu.memory import load_acquire, start_of, store_release
from normgrad.cpu.waiting_fields import DESCRIPTOR, FUNCTION, IDLE, POSTED, STATE

_HAS_PAUSE = platform.machine() in ("x86_64", "AMD64")
_LOOKS = 12_000 if _HAS_PAUSE else 100_000  # about 0.2 ms, several times what waking up takes


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
    """Call a kernel by its address."""

    def codegen(context, builder, sig, args):
        signature = ir.FunctionType(I32_TYPE, [I64_TYPE])
        builder.call(builder.inttoptr(args[0], signature.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


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
