"""BatchNorm's five operators on the GPU.

``launches``             the launches of a call: operands, tile, parts, second-stage reduction
``tiles``                tile sizes and the measurements that chose them
``addressing``           pointers and masks of a tile, for all kernels on the data
``elementwise_kernels``  batch_norm_elemt and batch_norm_elemt_backward
``reduce_kernels``       batch_norm_reduce_backward, batch_norm_stats and batch_norm_gather_stats_with_counts
"""
