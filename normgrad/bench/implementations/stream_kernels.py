"""Plain loops over words, called by any number of threads with the same descriptor."""

from normgrad.bench.implementations.stream_fields import BLOCK, Words
from normgrad.cpu.compile.jit import inline, kernel
from normgrad.cpu.intrinsics.memory import fetch_add, load, store
from normgrad.cpu.kernels.common.work import items_in_order
from normgrad.cpu.tags import I64


@inline
def _blocks(desc):
    return (desc.words + BLOCK - 1) // BLOCK


@inline
def _words_of(desc, block):
    return range(block * BLOCK, min(desc.words, (block + 1) * BLOCK))


@kernel
def add(desc: Words):
    a, b, c = desc.a, desc.b, desc.c
    for block in items_in_order(desc.phase, _blocks(desc)):
        for i in _words_of(desc, block):
            store(I64, c, i, load(I64, a, i) + load(I64, b, i))


@kernel
def copy(desc: Words):
    a, b = desc.a, desc.b
    for block in items_in_order(desc.phase, _blocks(desc)):
        for i in _words_of(desc, block):
            store(I64, b, i, load(I64, a, i))


@kernel
def read(desc: Words):
    for block in items_in_order(desc.phase, _blocks(desc)):
        total = 0
        for i in _words_of(desc, block):
            total += load(I64, desc.a, i)
        fetch_add(desc.total, total)


@kernel
def read_two(desc: Words):
    for block in items_in_order(desc.phase, _blocks(desc)):
        total = 0
        for i in _words_of(desc, block):
            total += load(I64, desc.a, i) ^ load(I64, desc.b, i)
        fetch_add(desc.total, total)
