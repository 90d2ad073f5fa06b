"""Strides of a view along the axes that a kernel works with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from normgrad.contract.view import Shape, View

Axis = tuple[int, int]  # size, stride in elements


def collapsed(shape: Sequence[int], strides: Sequence[int]) -> list[Axis]:
    """Return the fewest axes with the same elements in the same order; none of size 1."""
    if 0 in shape:
        return [(0, 1)]
    axes: list[Axis] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == stride * size:
            axes[-1] = (axes[-1][0] * size, stride)
        else:
            axes.append((size, stride))
    return axes


def strides_along(view: View, sizes: Shape) -> tuple[int, ...] | None:
    """Return the stride of each of these axes, whose sizes multiply to the view's; None if one has no single stride."""
    if 0 in sizes:
        return tuple(0 for _ in sizes)
    axes = collapsed(view.shape, view.strides)
    strides: list[int] = []
    for size in reversed(sizes):
        stride, axes = _last_axis(axes, size)
        if stride is None:
            return None
        strides.append(stride)
    return tuple(reversed(strides))


def _last_axis(axes: list[Axis], size: int) -> tuple[int | None, list[Axis]]:
    """Split off a last axis of ``size``: return its stride, and the axes that are left."""
    if size == 1:
        return 0, axes
    whole, stride = axes[-1]
    if whole % size:
        return None, axes
    rest = [] if whole == size else [(whole // size, stride * size)]
    return stride, axes[:-1] + rest


def collapsed_together(shape: Shape, strides: Sequence[Shape]) -> tuple[list[int], list[list[int]]]:
    """Return the fewest axes that several views of one shape share: sizes, and strides per view."""
    if 0 in shape:
        return [0], [[1] for _ in strides]
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        mergeable = bool(sizes) and all(own[-1] == every[axis] * size for own, every in zip(kept, strides, strict=True))
        if mergeable:
            sizes[-1] *= size
        else:
            sizes.append(size)
        for own, every in zip(kept, strides, strict=True):
            if mergeable:
                own[-1] = every[axis]
            else:
                own.append(every[axis])
    return sizes, kept


def is_contiguous(view: View) -> bool:
    """Return whether the elements are contiguous in their flattened order."""
    axes = collapsed(view.shape, view.strides)
    return view.numel <= 1 or axes == [(math.prod(view.shape), 1)]
