"""Plain loops over words, called by any number of threads with the same descriptor."""

from normgrad.bench.contenders.stream_fields import ARRAYS, BLOCK, DONE, SUM, TAKEN, WORDS
from normgrad.cpu.compile.jit import device, kernel
from normgrad.cpu.intrinsics.memory import fetch_add, load_i64, start_of, store_i64
from normgrad.cpu.kernels.common.work import wait_until


@device
def _next_block(desc, p):
    """The words of the next block, none where all are taken."""
    first = fetch_add(p + 8 * TAKEN, 1) * BLOCK
    return first, min(desc[WORDS], first + BLOCK)


@device
def _finish(desc, p):
    wait_until(p + 8 * DONE, (desc[WORDS] + BLOCK - 1) // BLOCK)


@kernel
def add(desc):
    p, a, b, c = start_of(desc), desc[ARRAYS], desc[ARRAYS + 1], desc[ARRAYS + 2]
    first, last = _next_block(desc, p)
    while first < last:
        for i in range(first, last):
            store_i64(c, i, load_i64(a, i) + load_i64(b, i))
        fetch_add(p + 8 * DONE, 1)
        first, last = _next_block(desc, p)
    _finish(desc, p)


@kernel
def copy(desc):
    p, a, c = start_of(desc), desc[ARRAYS], desc[ARRAYS + 1]
    first, last = _next_block(desc, p)
    while first < last:
        for i in range(first, last):
            store_i64(c, i, load_i64(a, i))
        fetch_add(p + 8 * DONE, 1)
        first, last = _next_block(desc, p)
    _finish(desc, p)


@kernel
def read(desc):
    p, a = start_of(desc), desc[ARRAYS]
    first, last = _next_block(desc, p)
    while first < last:
        total = 0
        for i in range(first, last):
            total += load_i64(a, i)
        fetch_add(p + 8 * SUM, total)
        fetch_add(p + 8 * DONE, 1)
        first, last = _next_block(desc, p)
    _finish(desc, p)


@kernel
def read_two(desc):
    p, a, b = start_of(desc), desc[ARRAYS], desc[ARRAYS + 1]
    first, last = _next_block(desc, p)
    while first < last:
        total = 0
        for i in range(first, last):
            total += load_i64(a, i) ^ load_i64(b, i)
        fetch_add(p + 8 * SUM, total)
        fetch_add(p + 8 * DONE, 1)
        first, last = _next_block(desc, p)
    _finish(desc, p)
