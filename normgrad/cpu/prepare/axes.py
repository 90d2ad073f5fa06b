"""Strides of a view along the axes that a kernel works with, and how many lanes an axis has in the workspace."""

from __future__ import annotations

from normgrad.contract.view import Shape, View, merge_axes, reshaped_strides


def single_stride(shape: Shape, strides: Shape) -> int | None:
    """Return the one stride that goes through all elements in order; None if there is none."""
    sizes, (merged,) = merge_axes(shape, [strides])
    return None if len(sizes) > 1 else merged[0] if merged else 1


def strides_along(view: View, sizes: Shape) -> Shape | None:
    """Return the stride of each of these axes, whose sizes multiply to the view's; None if one has no single stride."""
    return reshaped_strides(view, sizes, (0,) * len(sizes))


def is_contiguous(view: View) -> bool:
    """Return whether the elements are contiguous in their flattened order."""
    return view.numel <= 1 or single_stride(view.shape, view.strides) == 1


def padded(size: int) -> int:
    """Return a number of columns or channels rounded up to whole pairs of vectors."""
    return -(-size // 32) * 32
