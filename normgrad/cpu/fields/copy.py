"""What lies where in the descriptors of the kernels that copy and fill."""

RANK = 8
(TAKEN, DONE, SOURCE, SOURCE_CODE, TARGET, TARGET_CODE, LINES, LENGTH, GRAIN) = range(9)
SIZES, SOURCE_STRIDES, TARGET_STRIDES = 9, 9 + RANK, 9 + 2 * RANK
DESCRIPTOR_SIZE = 9 + 3 * RANK

VECTOR, STRIDE, CODE, COUNT, VALUE = range(5)  # of a fill
