"""How the arrays that a call writes alias its other arrays: a kernel is prepared for one such pattern."""

from __future__ import annotations

from collections.abc import Sequence

from normgrad.contract.view import View

_DISJOINT, _IDENTICAL, _OVERLAPPING = range(3)


class Aliasing:
    """For every written array and every other one: disjoint, the same elements, or overlapping in another way."""

    def __init__(self, views: Sequence[View], written: Sequence[int]) -> None:
        """``written`` are the indices of the views that the call writes."""
        self._pairs = [
            (one, other, *_span(views[one]), *_span(views[other]), views[one].same_layout(views[other]))
            for one in written
            for other in range(len(views))
            if one != other and not (other in written and other < one) and views[one].numel and views[other].numel
        ]
        self._pattern = self._at([view.address for view in views])
        #: Whether no pair overlaps in part. Where one does, equal patterns may still need different kernels.
        self.is_simple = _OVERLAPPING not in self._pattern

    def holds(self, addresses: Sequence[int]) -> bool:
        """Return whether arrays of these layouts at other addresses alias each other in the same pattern."""
        return self._at(addresses) == self._pattern

    def _at(self, addresses: Sequence[int]) -> list[int]:
        return [
            _DISJOINT
            if addresses[one] + end <= addresses[other] + other_start
            or addresses[other] + other_end <= addresses[one] + start
            else _IDENTICAL
            if same_layout and addresses[one] == addresses[other]
            else _OVERLAPPING
            for one, other, start, end, other_start, other_end, same_layout in self._pairs
        ]


def _span(view: View) -> tuple[int, int]:
    """Return the range of bytes that a view covers, relative to its address."""
    reach = view.reach
    return reach.address - view.address, reach.end - view.address
