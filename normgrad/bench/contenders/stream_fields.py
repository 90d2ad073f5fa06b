"""What lies where in the descriptor of the kernels that only move words."""

TAKEN, DONE, SUM, WORDS = range(4)
ARRAYS = 4  # the addresses of up to three
DESC_SIZE = 7

BLOCK = 1 << 15  # words that a thread takes at a time: 256 KB of each array
