"""The calls of an operator that native code recognises, and finishes where it can."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from normgrad import backends, environment
from normgrad.operators import objects
from normgrad.operators.recipes import Arguments
from normgrad.operators.tables import REGISTER, Table, Unfit, row

if TYPE_CHECKING:
    from normgrad.operators.recalling import Code, Recall

_MOST = 32  # recipes: they are looked at one after the other


@cache
def code() -> Code | None:
    """None where this Python, this NumPy or LLVM is other than the code counts on."""
    try:
        from normgrad.operators import recalling  # which takes LLVM with it

        return recalling.code() if objects.are_known() else None
    except Exception:
        return None


_variable = environment.stored(backends.ENVIRONMENT)


def _nothing(arguments: Arguments, differentiating: bool) -> None:
    """What an operator remembers that knows no call."""


class Register:
    """An operator's known calls."""

    def __init__(self) -> None:
        #: The results of a known call; None of any other.
        self.recall: Recall = _nothing
        self._tables: list[Table] = []
        self._oldest = 0
        self._changing = threading.Lock()
        self._numbers = array("q", bytes(8 * (len(REGISTER) + _MOST)))

    def add(
        self,
        arguments: Arguments,
        written: Sequence[int],
        fewest: int,
        seen: Sequence[int],
        needs_grad: bool,
        finish: Mapping[str, Any],
    ) -> None:
        """Know calls like one that was served.

        Parameters
        ----------
        arguments, written
            By position, and the places of those that the call writes to.
        fewest
            How many arguments there must be: any after them are as the defaults are.
        seen
            The places of arrays or tensors.
        needs_grad
            Whether autograd follows one of them.
        finish
            The part of a table that says how a call ends.
        """
        native = code()
        if native is None or _variable is None:
            return
        variables, name = _variable
        try:
            rows = [row(one, place in written, native.rows) for place, one in enumerate(arguments)]
        except Unfit:
            return
        head = {
            "rows": [number for numbers in rows for number in numbers],
            "row_count": len(rows),
            "fewest": fewest,
            "backend": variables.get(name, 0),
            "needs_grad": int(needs_grad),
            "seen": list(seen),
            "seen_count": len(seen),
            **finish,
        }
        # An array's dtype is known by where it lies, and must stay there.
        table = Table(head, [getattr(arguments[place], "dtype", None) for place in seen])
        # Never waited for: whoever holds it may be a thread that a fork has left behind.
        if not self._changing.acquire(blocking=False):
            return
        try:
            self._keep(table)
            if self.recall is _nothing:
                self._numbers[1], self._numbers[2] = id(variables), id(name)
                self.recall = native.recall(self._numbers.buffer_info()[0])
        finally:
            self._changing.release()

    def _keep(self, table: Table) -> None:
        """In the place of the oldest where there are too many."""
        place = len(self._tables)
        if place < _MOST:
            self._tables.append(table)
        else:
            place, self._oldest = self._oldest, (self._oldest + 1) % _MOST
        replaced = self._tables[place]
        self._numbers[len(REGISTER) + place] = table.address
        self._numbers[0] = len(self._tables)
        self._tables[place] = table
        del replaced  # which nothing points to any more

    def forget(self) -> None:
        """Know no call."""
        with self._changing:
            self._numbers[0] = self._oldest = 0
            self._tables.clear()
