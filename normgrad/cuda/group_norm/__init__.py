"""GroupNorm: launches, tile sizes and kernels."""
