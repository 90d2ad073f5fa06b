"""Plain loops over words, called by any number of threads with the same descriptor."""

from normgrad.bench.contenders.stream_fields import BLOCK, Words
from normgrad.cpu.compile.jit import device, kernel
from normgrad.cpu.intrinsics.memory import fetch_add, load, store
from normgrad.cpu.kernels.common.work import finish_phase, take_next
from normgrad.cpu.tags import I64


@device
def _next_block(desc):
    """The words of the next block, none where all are taken."""
    first = take_next(desc.phase) * BLOCK
    return first, min(desc.words, first + BLOCK)


@device
def _finish(desc, done):
    finish_phase(desc.phase, done, (desc.words + BLOCK - 1) // BLOCK)


@kernel
def add(desc: Words):
    done = 0
    first, last = _next_block(desc)
    while first < last:
        for i in range(first, last):
            store(I64, desc.c, i, load(I64, desc.a, i) + load(I64, desc.b, i))
        done += 1
        first, last = _next_block(desc)
    _finish(desc, done)


@kernel
def copy(desc: Words):
    done = 0
    first, last = _next_block(desc)
    while first < last:
        for i in range(first, last):
            store(I64, desc.b, i, load(I64, desc.a, i))
        done += 1
        first, last = _next_block(desc)
    _finish(desc, done)


@kernel
def read(desc: Words):
    done = 0
    first, last = _next_block(desc)
    while first < last:
        total = 0
        for i in range(first, last):
            total += load(I64, desc.a, i)
        fetch_add(desc.total, total)
        done += 1
        first, last = _next_block(desc)
    _finish(desc, done)


@kernel
def read_two(desc: Words):
    done = 0
    first, last = _next_block(desc)
    while first < last:
        total = 0
        for i in range(first, last):
            total += load(I64, desc.a, i) ^ load(I64, desc.b, i)
        fetch_add(desc.total, total)
        done += 1
        first, last = _next_block(desc)
    _finish(desc, done)
