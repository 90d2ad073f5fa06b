"""The backend ``cpu``: Numba kernels on threads of our own."""
