"""A kernel that needs more than C: a function of Python's."""

from numba.core import types

from normgrad.cpu.compile.jit import kernel

_holds_the_lock = types.ExternalFunction("PyGILState_Check", types.int32())


@kernel
def needy(desc):
    desc[1] = desc[0] + _holds_the_lock()
