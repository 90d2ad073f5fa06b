"""LayerNorm on the GPU."""
