"""BatchNorm's five operators on the GPU."""
