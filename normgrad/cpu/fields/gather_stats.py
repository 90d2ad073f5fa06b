"""What lies where in the descriptor of the kernel that gathers statistics."""

RANKS, CHANNELS = 0, 1
MEAN, INVSTD = 2, 6  # each: address, strides of ranks and channels, dtype code
COUNTS = 10  # address, stride, dtype code
RUNNING_MEAN, RUNNING_VAR, MEAN_ALL, INVSTD_ALL = 13, 16, 19, 22  # each: address (0: absent), stride, dtype code
MOMENTUM, EPS = 25, 26
RESULTS = 27  # float64 [4, channels], in the workspace
DESC_SIZE = 28
