"""GroupNorm on the GPU, with kernels for three memory layouts."""
