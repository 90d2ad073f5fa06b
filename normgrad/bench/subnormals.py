"""What the processor itself loses on subnormal operands, measured on a plain loop of NumPy's.

Many processors handle subnormal numbers in microcode, whatever the program: that loss is the hardware's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from normgrad.bench.clock import measure

#: Elements of float32: what a core's own caches hold, and what they do not.
SIZES = {"in the cache": 1 << 13, "from memory": 1 << 23}

_NORMAL, _SUBNORMAL = 1.0, 1e-40


def subnormal_cost(budget: float) -> dict[str, float]:
    """Return by size of the arrays the time of a multiply-add on subnormal operands over that on normal ones."""
    found = {}
    for where, size in SIZES.items():
        runs = {name: _multiply_add(size, value) for name, value in (("normal", _NORMAL), ("subnormal", _SUBNORMAL))}
        timings = measure(runs, budget)
        found[where] = timings["subnormal"].median / timings["normal"].median
    return found


def _multiply_add(size: int, value: float) -> Callable[[], None]:
    a, b, c = (np.full(size, value, np.float32) for _ in range(3))
    half = np.float32(0.5)

    def run() -> None:
        np.multiply(a, half, out=c)
        np.add(b, c, out=c)

    return run
