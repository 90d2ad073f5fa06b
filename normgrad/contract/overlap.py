"""Do two elements of one view, or of two views, share memory? Exact, for any strides.

Elements share a byte where ``Σ dₖ·sₖ = target`` has a solution in integers with ``lowₖ ≤ dₖ ≤ highₖ``.
The search takes the longest strides first, so that what is left can be bounded, and gives up after a fixed
number of steps: only layouts made to be hard get there, and those are then said to overlap.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from normgrad.contract.view import View

_STEPS = 20_000


class _Term(NamedTuple):
    stride: int  # > 0
    low: int
    high: int


def overlaps_itself(view: View) -> bool:
    """Whether two different elements of the view have the same address."""
    if view.numel == 0:
        return False
    axes = sorted((abs(stride), size) for size, stride in zip(view.shape, view.strides, strict=True) if size > 1)
    covered = 0  # how far the shorter axes reach
    for stride, size in axes:
        if stride <= covered:
            break
        covered += stride * (size - 1)
    else:
        return False
    if axes[0][0] == 0:
        return True
    axes.reverse()
    # Two elements differ first on some axis, by a positive distance; on the shorter axes by any.
    for first, (stride, size) in enumerate(axes):
        rest = [_Term(s, 1 - n, n - 1) for s, n in axes[first + 1 :]]
        if _solvable([_Term(stride, 1, size - 1), *rest], 0):
            return True
    return False


def overlap(a: View, b: View) -> bool:
    """Whether an element of one view shares a byte with an element of the other."""
    if not a.reach.intersects(b.reach):
        return False
    terms = [_Term(1, 0, a.dtype.itemsize - 1), _Term(1, 1 - b.dtype.itemsize, 0)]
    target = b.address - a.address
    for view, sign in ((a, 1), (b, -1)):
        for size, stride in zip(view.shape, view.strides, strict=True):
            step = sign * stride * view.dtype.itemsize
            if size > 1 and step > 0:
                terms.append(_Term(step, 0, size - 1))
            elif size > 1 and step < 0:
                terms.append(_Term(-step, 1 - size, 0))
    return _solvable(_merged(terms), target)


def _merged(terms: list[_Term]) -> list[_Term]:
    """Terms of equal stride as one, the longest strides first."""
    merged: dict[int, _Term] = {}
    for stride, low, high in terms:
        before = merged.get(stride, _Term(stride, 0, 0))
        merged[stride] = _Term(stride, before.low + low, before.high + high)
    return sorted(merged.values(), reverse=True)


def _solvable(terms: list[_Term], target: int) -> bool:
    """Whether ``Σ d·stride = target`` has a solution; the terms come with the longest strides first."""
    least, most, divisor = [0], [0], [0]  # of the sums of the last k terms
    for stride, low, high in reversed(terms):
        least.append(least[-1] + stride * low)
        most.append(most[-1] + stride * high)
        divisor.append(math.gcd(divisor[-1], stride))
    stack = [(0, target)]
    for _ in range(_STEPS):
        if not stack:
            return False
        done, missing = stack.pop()
        left = len(terms) - done
        if not least[left] <= missing <= most[left] or (divisor[left] and missing % divisor[left]):
            continue
        if left == 0:
            return True
        stride, low, high = terms[done]
        low = max(low, -((most[left - 1] - missing) // stride))
        high = min(high, (missing - least[left - 1]) // stride)
        if high - low > _STEPS:
            return True
        stack.extend((done + 1, missing - d * stride) for d in range(low, high + 1))
    return True
