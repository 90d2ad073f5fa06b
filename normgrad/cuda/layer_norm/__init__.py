"""LayerNorm on the GPU.

``launches``    the launches of a call: operands, tile, CTA groups, second-stage reduction
``tiles``       tile sizes and the measurements that chose them
``kernels``     backward: grad_input, and partial sums of grad_weight and grad_bias; forward: output, mean and rstd
``addressing``  pointers and masks of a tile of rows, for both kernels and for GroupNorm's kernels on rows
"""
