"""What the tiles into which work is cut rest on: the chip, and how sizes are cut.

Tiles are pure functions of sizes, element size and chip. What decides the order of a row's or group's sum (the tile and
its warps) depends on the row or group alone, never on how many of them there are: so a row's result has the same bits
in every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

VECTOR_ACCESS = 16  # bytes


@dataclass(frozen=True, slots=True)
class Chip:
    """What of a GPU matters here. ``concurrent``: programs of a launch can wait for each other.

    ``clusters``: how many clusters of so many programs run side by side, so many programs on an SM; None where the
    GPU has none.
    """

    multiprocessors: int
    concurrent: bool = True
    clusters: Callable[[int, int], int] | None = None
    largest_tile: int = 8192  # elements that a program may hold of each tensor
    shared_memory: int = 228 * 1024  # bytes of a multiprocessor


def staged(stages: int, resident: int, nbytes: int, chip: Chip) -> int:
    """As many stages as asked for, or as the shared memory has room for where ``nbytes`` are loaded at a time."""
    room = chip.shared_memory // resident - 2048  # what the hardware, the sums and the statistics take
    return max(min(stages, 1 + room // nbytes), 1)


def power_of_two(size: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(size - 1, 0).bit_length()


def blocks(size: int, block: int) -> int:
    """How many blocks cover a size."""
    return -(-size // block)


def even_block(size: int, largest: int, spare: float = 1.34, smallest: int = 256) -> int:
    """The largest power of two up to ``largest`` whose blocks cover a size with little to spare."""
    block = min(power_of_two(size), largest)
    while block > smallest and blocks(size, block) * block > spare * size:
        block //= 2
    return block
