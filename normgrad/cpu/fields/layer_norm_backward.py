"""What lies where in the descriptor of LayerNorm's backward kernel."""

(
    NEXT,
    DONE,
    NEXT_WEIGHT,
    DONE_WEIGHT,
    NEXT_COLUMNS,
    DONE_COLUMNS,
    SLOT,
    SLOTS,
    ROWS,
    COLUMNS,
    BLOCKS,
    BLOCK_ROWS,
    WIDE,
    STREAM,
    STAGED,
    WANT_INPUT,
    WANT_WEIGHT,
    WANT_BIAS,
) = range(18)
GRAD_OUT, INPUT, GRAD_INPUT = 18, 23, 28  # each: address, column stride (elements), 3 outer strides (bytes)
OUTER_SHAPE = 33  # 3 sizes
MEAN, RSTD, STATISTICS_CODE = 36, 37, 38
WEIGHT, WEIGHT_CODE, WEIGHT_STRIDE = 39, 40, 41  # address 0: no weight
GRAD_WEIGHT, GRAD_WEIGHT_STRIDE, GRAD_BIAS, GRAD_BIAS_STRIDE, GRAD_CODE = 42, 43, 44, 45, 46
ORDERED_WEIGHT, PARTIALS, ROW_SUMS, SCRATCH, SCRATCH_SIZE = 47, 48, 49, 50, 51  # in the workspace
NEXT_SEGMENT, DONE_SEGMENT = 52, 53
EXACT_SUMS = 54  # the weight gradients' terms in float64
TOGETHER = 55  # rows that are summed before their gradients are made
SUMS_SIZE = 56  # bytes for the float32 sums of a group
DESC_SIZE = 57
