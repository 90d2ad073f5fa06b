"""A kernel that reads every kind of field of a descriptor."""

from dataclasses import dataclass, field

from normgrad.cpu.compile.jit import kernel
from normgrad.cpu.descriptors import Phase, Pointer
from normgrad.cpu.intrinsics.memory import fetch_add, load_acquire, store
from normgrad.cpu.tags import F64, I64


@dataclass
class Part:
    whole: int = 0
    real: float = 0.0


@dataclass
class Probe:
    number: int = 0
    part: Part = field(default_factory=Part)
    sizes: tuple[int, ...] = (0,) * 3
    result: Pointer | None = None
    phase: Phase = field(default_factory=Phase)


@kernel
def probe(desc: Probe):
    store(I64, desc.result, 0, desc.number)
    store(I64, desc.result, 1, desc.part.whole)
    store(F64, desc.result, 2, desc.part.real)
    store(I64, desc.result, 3, desc.sizes[2])
    fetch_add(desc.phase.done, 5)
    store(I64, desc.result, 4, load_acquire(desc.phase.done) + load_acquire(desc.phase.taken))


@kernel
def add_range(begin, end, total):
    """The body of a parallel loop, without a declared descriptor."""
    total[0] += begin + end
