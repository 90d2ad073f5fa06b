"""Sizes that LayerNorm's kernels and their descriptors agree on."""

# Row sums are made of segments, always the same, so that a row has the same bits whether one thread sums it or several.
SEGMENT = 32768
OUTER_RANK = 3  # axes of rows that a kernel follows
TILE = 4  # rows whose weight gradients are added up in registers before they meet the partial sums
STAGED_ROWS = 32  # strided rows that are brought together at a time
COLUMN_CHUNK = 8192  # columns of long rows that are taken at a time
