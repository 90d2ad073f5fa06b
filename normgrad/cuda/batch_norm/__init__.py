"""BatchNorm: launches, tile sizes and kernels."""
