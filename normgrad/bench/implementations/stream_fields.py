"""The descriptor of the kernels that only move words."""

from dataclasses import dataclass, field

from normgrad.cpu.descriptors import Counter, Phase

BLOCK = 1 << 15  # words that a thread takes at a time: 256 KB of each array
NONE = Counter(0)


@dataclass
class Words:
    """Arrays of so many words, by their addresses, and the sum of what was read."""

    words: int = 0
    a: int = 0
    b: int = 0
    c: int = 0
    total: Counter = NONE
    phase: Phase = field(default_factory=Phase)
