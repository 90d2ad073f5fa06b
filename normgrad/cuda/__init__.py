"""The operators on NVIDIA GPUs, in Triton.

``kernels`` holds the kernels; ``layer_norm``, ``group_norm`` and ``batch_norm`` say which of them a problem takes and
how they are launched; ``row_tiles``, ``group_tiles`` and ``channel_tiles`` have the tile sizes and where
they come from.
"""
