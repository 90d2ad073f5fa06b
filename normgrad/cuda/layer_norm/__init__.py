"""LayerNorm: launches, tile sizes and kernels."""
