"""Sizes that LayerNorm's kernels and their descriptors agree on."""

# Row sums are made of segments, always the same, so that a row has the same bits whether one thread sums it or several.
SEGMENT = 32768
OUTER_RANK = 3  # axes of rows that a kernel follows
TILE = 4  # rows whose weight gradients are added up in registers
GROUP = 16  # rows whose weight gradients are added up in float32, tile by tile, before they meet the partial sums
STRETCH = 1024  # columns that the tiles of a group go through one after another
STAGED_ROWS = 32  # strided rows that are brought together at a time
COLUMN_CHUNK = 8192  # columns of long rows that are taken at a time

# A group's scratch, in bytes. Of its rows, in float32, with room for a whole vector from any row on: mean, rstd,
# -rstd*S1/N and -rstd^3*S2/N (S2 of x - mean); in float64: S1 and S2, whether float32 is enough, S1/N and S2/N for rows
# where it is not. Then the sums for the weight gradients over a stretch of columns, and for the bias gradients.
MEANS, RSTDS, OFFSETS, SLOPES, FIRST_SUMS, SECOND_SUMS, FINE, EXACT = 0, 128, 256, 384, 512, 768, 1024, 1152
SUMS = 1408
