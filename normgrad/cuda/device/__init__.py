"""Device functions (``@triton.jit``) that the kernels of several operators call.

``indexing``           64-bit scalars, index ranges, offsets of a two-dimensional tile
``pack16``             conversion of loaded data and of results; pairs of 16-bit elements in 32-bit registers
``sums``               sums of two tensors in one tree, compensated sums, segmented sums
``formulas``           the normalization formulas in the order of operations that keeps their rounding errors small
``mailbox``            exchange of partial sums through global memory
``cluster_exchange``   exchange of partial sums through distributed shared memory
``pdl``                programmatic dependent launch
``compiler_barriers``  workarounds for optimizations of Triton and ptxas that cost more than they save

Functions may be called through their module. Constants are imported by name: Triton's cache key of a kernel has the
values of its module's own names, but not of another module's attributes.
"""
