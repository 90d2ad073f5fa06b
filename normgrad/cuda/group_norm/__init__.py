"""GroupNorm on the GPU, for three memory layouts.

``launches``          the entry points: choose the layout family of a call
``tiles``             tile sizes of all three and the measurements that chose them
``contiguous_*``      the positions of a channel are contiguous (or on any stride): launches, kernels
``channels_last_*``   the channels of a position are contiguous: launches, kernels
``rows_*``            a group of a sample is one contiguous row of an odd length: launches, kernels
"""
