"""Data as samples × channels × places: the descriptor that GroupNorm's and BatchNorm's kernels share.

Work comes in chunks, whose size depends on the shape alone. In *rows* (places are neighbours in memory) a chunk is a
part of one channel of one sample, or several whole channels where they are short; in *columns* (channels are
neighbours) some places of one sample, all channels. The sums of every chunk go to the workspace and are added up in a
fixed order, so the bits do not depend on who made them.
"""

SLOT, SLOTS = 8, 9
SAMPLES, CHANNELS, PLACES, GROUPS = 10, 11, 12, 13
CHUNK, CHUNKS = 14, 15  # places of a chunk, chunks along the places
UNITS, UNIT_CHUNKS = 16, 17  # what shares statistics: a sample's group (rows) or a sample (columns)
GRAIN = 18  # chunks that are taken at a time where no unit is kept together
APART = 19  # units too large or too few to be kept together: sums of all, then results of all
STAT_SAMPLE, STAT_CHANNEL = 20, 21  # statistics of (n, c) are at n·STAT_SAMPLE + c // STAT_CHANNEL
PITCH = 22  # channels in the workspace, rounded up
GRAD_OUT, INPUT, RESULT = 23, 28, 33  # each: address, strides of samples, channels, places (elements), dtype code
MEAN, RSTD, WEIGHT, BIAS = 38, 41, 44, 47  # each: address (0: absent), stride, dtype code
SUM_DY, SUM_DY_XMU, COUNTER, COUNTS = 50, 53, 56, 59
OUT_0, OUT_1, OUT_2, OUT_3 = 60, 63, 66, 69  # small outputs, as the vectors
PARTIALS = 72  # float64 [samples, chunks, 2, PITCH]
RECORDS = 73  # float64 [statistics, 2]
TABLES = 74  # float32 [.., PLANES, PITCH]
EPS = 75
STREAM = 78  # results go past the caches
CHANNELS_AT_ONCE = 79  # whole channels in a chunk of short rows
WEIGHTS = 80  # float32 [2, PITCH + SPARE]: weight and bias in the order of lanes
UNITS_AT_ONCE = 81  # units that are taken at a time where they are kept together
ONE_RUN = 82  # of columns: a chunk's numbers follow each other and share their statistics
# Counters of the phases: taken, done. In cache lines of their own: threads write to them while others read the rest.
ZEROTH, FIRST, SECOND, THIRD, FOURTH = 96, 98, 100, 102, 104
DESC_SIZE = 112

# A table's planes: a channel's coefficients, in the order of `channel_formulas`.
PLANES = 6
SPARE = 16  # lanes behind a table of GroupNorm's, so that a group's last vector may be a whole one
