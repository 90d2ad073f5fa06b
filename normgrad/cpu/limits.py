"""Sizes and thresholds of the kernels, each with its reason. Host side and kernels read them here.

"Measured" is measured on two cores of an EPYC (Zen 4) and a Xeon (Sapphire Rapids) processor, both with AVX-512.
"""

KB, MB = 1 << 10, 1 << 20

# Threads

#: Elements from which on two threads that are awake are faster than one: about 20 us of work, several times what a
#: worker thread takes to notice a job.
SHARED_FROM = 1 << 18
#: Elements from which on a sleeping worker thread is woken. Waking takes about 50 us.
WOKEN_FROM = 1 << 19
#: Elements from which on PyTorch's threads share a call. They are awake between its operators and start at once.
LENT_FROM = 1 << 16

# Caches

#: Bytes of a result from which on non-temporal stores are faster, by how many tensors of its size are read. Below, the
#: result stays in the caches for whoever reads it next. Measured.
LARGE_FROM = {1: 16 * MB, 2: 7 * MB}
#: Bytes of a row of LayerNorm's output from which on stores begin at its first cache line, and from which on rows of a
#: large result that begin at one are streamed though others do not. Measured where rows do not begin at one: 1.1 times
#: as fast at 3 KB, 1.2 to 2.6 times from 8 KB on with non-temporal stores; up to twice as slow below 2 KB, where the
#: last cache line of every row is written in two parts.
ALIGNED_ROW = 3 * KB
#: Bytes that a group of rows may have in the L1 cache (half of 32 KB), and in the L2 cache (half of 1 MB).
L1_ROWS, L2_ROWS = 16 * KB, 512 * KB
#: Bytes of a unit of GroupNorm that stay in the L2 cache of a core between its sums and its results.
L2_UNIT = 1 * MB
#: Bytes ahead that a row prefetches itself, where no next row is known.
PREFETCH_BYTES = 1 * KB

# Few terms: below these counts a sum that is a result itself is computed in float64 from the first term on. A float32
# rounding of one term is a share of about 1/terms of the error bound, unless one term is nearly the whole sum.

#: Rows whose weight gradients LayerNorm computes in float64: 16 rows are added up in float32, which is at most six
#: roundings, and above 48 rows each of them is less than 1/24 of the bound.
FLOAT64_ROWS = 48
#: Positions of all samples whose sums BatchNorm computes in float64, in rows (lanes of 8 terms) and in columns (16).
FLOAT64_TERMS, FLOAT64_COLUMN_TERMS = 1024, 128

# LayerNorm

#: Columns of a segment. Row sums are made of segments whether one thread computes them or several, so that a row has
#: the same bits either way. A segment of two float32 tensors fills an L2 cache of 256 KB.
SEGMENT = 32768
#: Rows whose weight gradients are added up in registers: 4 of them, with 32 columns, use 8 accumulators.
TILE = 4
#: Rows whose weight gradients are added up in float32, tile by tile: six roundings at most, one in a hundred of the
#: bound.
GROUP = 16
#: Columns that all tiles of a group process one after another: the float32 sums of both weight gradients, 8 KB, stay
#: in the L1 cache.
STRIP = 1024
#: Strided rows that are copied at a time: adjacent rows share the cache lines of a column.
STAGED_ROWS = 32
#: Columns ahead that are prefetched when such rows are copied column by column.
PREFETCH_COLUMNS = 16
#: Columns of long rows that a thread takes at a time, and columns whose partial sums it reduces at a time.
COLUMN_CHUNK, REDUCED_COLUMNS = 8192, 256
#: Elements of a block of rows, in GroupNorm of samples, about; and at least, so that each of several threads has one.
BLOCK, SMALLEST_BLOCK = 1 << 16, 1 << 15
#: Blocks of rows at most, and of samples at least. The workspace has 16 bytes per block and column or channel.
MOST_BLOCKS = 64
#: Blocks per row and byte of an element: a block's partial sums are 32 bytes a column written and read, here at most
#: about 4 % of the traffic of the rows (2 reads and a write).
BLOCKS_PER_ROW_BYTE = 0.004
#: Blocks that are made even where their partial sums cost more, so that 2, 4 or 8 threads share a small call evenly.
EVEN_BLOCKS = 8
#: Elements of a block of the forward pass.
FORWARD_BLOCK = 32768
#: Columns up to which TILE rows of float32 stay in the L1 cache and are summed together.
TOGETHER_COLUMNS = 1024

# GroupNorm and BatchNorm

#: Positions of a chunk in rows (8 KB of float32), and in columns, where a chunk has all channels.
ROW_CHUNK, COLUMN_CHUNK_POSITIONS = 2048, 128
#: Elements that a thread takes at a time: about 5 us of work, against some 0.1 us for an atomic addition.
TAKEN_ELEMENTS = 32768
#: Elements of small groups that are summed together before their results are written: 32 KB of two float32 tensors stay
#: in the L1 cache.
SMALL_GROUPS = 2048
#: Statistics of GroupNorm that a thread writes at a time: some microseconds of work.
WRITTEN_STATISTICS = 1024
#: Elements of all units from which on fewer than FEW_UNITS units are processed in phases, by chunks: with whole units
#: some of the threads would have nothing to do.
PHASES_FROM, FEW_UNITS = 1 << 18, 8
#: Positions of the short rows that make a chunk together.
SHORT_ROWS_CHUNK = 8192
#: Positions of a row that is short: its sums need no float64 before the lanes are added (8 terms a lane), and four such
#: rows are summed together. Measured: 1.3 to 1.4 times as fast for 7x7 positions.
SHORT_ROW = 128
#: Positions of columns that are processed at a time. Coefficients are loaded once for them.
COLUMN_RUN = 16
#: The same for forward results: few positions keep the stores nearly in order.
OUTPUT_RUN = 4
#: Positions ahead that are prefetched in columns, where it is not COLUMN_RUN.
PREFETCH_POSITIONS = 8
#: float32 forward results in columns of more channels than this go position by position. Measured on one core of Zen 5:
#: up to 1.8 times as fast (32x256x56x56), up to 9 % slower where the data stay in the caches; below, OUTPUT_RUN
#: positions at a time are up to 16 % faster.
POSITIONWISE_CHANNELS = 128
#: Channels of float32 from which on BatchNorm's sums in columns go two positions at a time through all channels.
#: Measured on one core of Zen 4: 2.3 times as fast for 256x1024, 1.9 times for 16x512x28x28, equal for 256 channels.
ALL_CHANNELS_FROM = 64
#: Bytes between positions, or a multiple, with which COLUMN_RUN positions of three tensors share few sets of the
#: L1 cache. Gradients then take OUTPUT_RUN positions at a time. Measured on Zen 4, float32: batch_norm_elemt_backward
#: 256x1024 187 -> 89 us, GroupNorm 4x1024x256 1037 -> 397, 8x512x256 656 -> 449; other strides are slower by a third.
CONFLICTING_STRIDE = 1024
#: Channels whose two sums stay in the L1 cache meanwhile (4 KB in float32, 8 KB in float64).
CHANNEL_BLOCK = 512
#: Rows whose moments BatchNorm computes before their lanes are added.
MOMENT_ROWS = 8
#: Takes the place of an M2 that is negative by rounding. Far below every square of float32, and 1/sqrt of it is finite
#: in float32.
SMALLEST_M2 = 2.0**-200

# Copies

#: Elements that a thread copies at a time, and the rows and columns of a block. In 32 rows a column of float32 has two
#: cache lines, and the lines that the rows have reached stay in the L1 cache from column to column.
COPIED_ELEMENTS = 1 << 16
COPIED_ROWS, COPIED_COLUMNS = 32, 2048
