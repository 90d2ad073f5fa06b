"""The decorators of the functions that kernels are made of. Only modules of kernels import it: it brings Numba."""

from __future__ import annotations

import numba

# No fast-math flags: contraction would make a value's bits depend on the code around it.

#: For the functions that kernels are made of.
device = numba.njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
#: For small layers, put in place wherever they are called.
in_place = numba.njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)
#: For kernels themselves: ``kernel(descriptor, *tags)``, the descriptor a pointer to int64. Never called from Python:
#: :mod:`normgrad.cpu.variants` finds their native code, or has it compiled.
kernel = device
