"""Properties of a GPU that tile sizes depend on, and the integer helpers of all tile choices.

Tile choices are pure functions of sizes, element size and chip. What decides the order of a row's or group's sum (the
tile and its warps) depends on the row or group alone, never on how many of them there are: so the result of a row has
the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

VECTOR_BYTES = 16  # of the widest load and store instructions


@dataclass(frozen=True, slots=True)
class Chip:
    """Properties of a GPU. ``backend.chip`` asks a device for them; tests make their own."""

    multiprocessors: int
    cooperative_launch: bool = True  # CTAs of one launch can wait for each other
    #: (CTAs per cluster, CTAs per SM) -> clusters that can be resident at once; None on GPUs without clusters.
    max_active_clusters: Callable[[int, int], int] | None = None
    max_tile_elements: int = 8192  # elements of each tensor that a CTA may hold in registers
    shared_memory: int = 228 * 1024  # bytes per SM


def fit_stages(stages: int, ctas_per_sm: int, nbytes: int, chip: Chip) -> int:
    """Return the pipeline stages wanted, or as many as fit into shared memory where one stage loads ``nbytes``."""
    room = chip.shared_memory // ctas_per_sm - 2048  # the hardware's own, the reductions' and the statistics' share
    return max(min(stages, 1 + room // nbytes), 1)


def next_power_of_2(size: int) -> int:
    """Return the smallest power of two that is at least ``size``."""
    return 1 << max(size - 1, 0).bit_length()


def cdiv(size: int, block: int) -> int:
    """Return how many blocks cover a size."""
    return -(-size // block)


def low_waste_block(size: int, largest: int, max_ratio: float = 1.34, smallest: int = 256) -> int:
    """Return the largest power of two up to ``largest`` whose blocks cover at most ``max_ratio`` times the size."""
    block = min(next_power_of_2(size), largest)
    while block > smallest and cdiv(size, block) * block > max_ratio * size:
        block //= 2
    return block
