"""LayerNorm: the kernels `layer_norm` and `layer_norm_backward`."""
