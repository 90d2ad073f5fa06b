"""How the arrays that a call writes to share memory with its others: a kernel is prepared for that, too."""

from __future__ import annotations

from collections.abc import Sequence

from normgrad.contract.view import View

_APART, _THE_SAME, _OTHERWISE = range(3)


class Sharing:
    """For every array that is written and every other: whether they lie apart, or are the very same elements."""

    def __init__(self, views: Sequence[View], written: Sequence[int]) -> None:
        self._pairs = [
            (one, other, *_span(views[one]), *_span(views[other]), views[one].same_layout(views[other]))
            for one in written
            for other in range(len(views))
            if one != other and not (other in written and other < one) and views[one].numel and views[other].numel
        ]
        self._found = self._at([view.address for view in views])
        #: Whether every pair is one of the two. Anything between needs a closer look at every call.
        self.is_plain = _OTHERWISE not in self._found

    def holds(self, addresses: Sequence[int]) -> bool:
        """Whether arrays of these layouts, at these addresses, share their memory in the same way."""
        return self._at(addresses) == self._found

    def rows(self, numbers: Sequence[int]) -> list[int]:
        """The pairs as native code takes them, with the arrays under other numbers: how each was found comes last."""
        return [
            number
            for (one, other, *spans, same_layout), found in zip(self._pairs, self._found, strict=True)
            for number in (numbers[one], numbers[other], *spans, int(same_layout), found)
        ]

    def _at(self, addresses: Sequence[int]) -> list[int]:
        return [
            _APART
            if addresses[one] + end <= addresses[other] + other_start
            or addresses[other] + other_end <= addresses[one] + start
            else _THE_SAME
            if same_layout and addresses[one] == addresses[other]
            else _OTHERWISE
            for one, other, start, end, other_start, other_end, same_layout in self._pairs
        ]


def _span(view: View) -> tuple[int, int]:
    """From where to where a view reaches, from its address on."""
    reach = view.reach
    return reach.address - view.address, reach.end - view.address
