"""GroupNorm on the GPU, for three memory layouts.

``launches``               the launches of a call: its layout, operands, tile, CTA groups, second-stage reduction
``tiles``                  tile sizes of all three and the measurements that chose them
``contiguous_kernels``     the positions of a channel are contiguous, or on any stride
``channels_last_kernels``  the channels of a position are contiguous
``rows_kernels``           a group of a sample is one contiguous row of an odd length
"""
