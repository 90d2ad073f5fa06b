"""The kernels, compiled by Numba. Only :mod:`normgrad.cpu.compile` imports these modules."""
