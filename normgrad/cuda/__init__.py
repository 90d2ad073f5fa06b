"""The operators on NVIDIA GPUs, in Triton.

``kernels`` holds the kernels; ``layer_norm``, ``group_norm`` and ``batch_norm`` say which of them a problem takes and
how they are launched; ``configurations`` has the tile sizes and where they come from.
"""
