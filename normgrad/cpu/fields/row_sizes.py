"""Sizes that LayerNorm's kernels and their descriptors agree on."""

# Row sums are made of segments, always the same, so that a row has the same bits whether one thread sums it or several.
SEGMENT = 32768
OUTER_RANK = 3  # axes of rows that a kernel follows
TILE = 4  # rows whose weight gradients are added up in registers
GROUP = 16  # rows whose weight gradients are added up in float32, tile by tile, before they meet the partial sums
STRETCH = 1024  # columns that the tiles of a group go through one after another
STAGED_ROWS = 32  # strided rows that are brought together at a time
COLUMN_CHUNK = 8192  # columns of long rows that are taken at a time

# A group's scratch, in bytes. Per row, in float32, with room for a whole vector from any row on: mean, rstd, mean(g),
# mean(g*x_hat); in float64: sum(g) and sum(g*x_hat). Then the float32 sums of both weight gradients: 32 columns of the
# one, 32 of the other, and so on.
MEANS, RSTDS, MEANS_G, MEANS_GX, SUMS_G, SUMS_GX = 0, 128, 256, 384, 512, 768
SUMS = 1024
