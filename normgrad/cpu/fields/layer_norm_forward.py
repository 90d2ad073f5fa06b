"""What lies where in the descriptor of LayerNorm's forward kernel."""

SLOT, SLOTS, ROWS, COLUMNS, BLOCKS, BLOCK_ROWS, STREAM, STAGED = range(8)
PITCH = 8  # columns of weight and bias in the workspace, rounded up; a pair more can be read
INPUT, OUTPUT, OUTER_SHAPE = 12, 17, 22  # tensors: address, column stride (elements), 3 outer strides (bytes); 3 sizes
MEAN, RSTD, MEAN_CODE, EPS_BITS = 25, 26, 27, 28
WEIGHT, BIAS, VECTORS_CODE, WEIGHT_STRIDE, BIAS_STRIDE = 29, 30, 31, 32, 33
ORDERED_WEIGHT, ORDERED_BIAS, SCRATCH, SCRATCH_SIZE = 34, 35, 36, 37
RSTD_CODE = 38
# In cache lines of their own: threads write to them while others read the rest.
NEXT, DONE, NEXT_VECTORS, DONE_VECTORS = 48, 49, 50, 51
DESC_SIZE = 60
