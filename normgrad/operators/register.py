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

_MOST = 128  # recipes: they are looked at one after the other, each for some 15 ns


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
    """An operator's known calls, of so many layouts at most."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        #: The results of a known call; None of any other.
        self.recall: Recall = _nothing
        self._native: Code | None = None
        self._is_without = False  # native code: there is none to be had
        self._heads: list[tuple[Mapping[str, Any], Any]] = []  # of tables, until there is native code
        self._tables: list[Table] = []
        self._oldest = 0
        self._changing = threading.Lock()
        self._numbers = array("q", bytes(8 * (len(REGISTER) + most)))

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
        if _variable is None:
            return
        try:
            rows = [row(one, place in written) for place, one in enumerate(arguments)]
        except Unfit:
            return
        variables, name = _variable
        head = {
            "rows": [entry for entries in rows for entry in entries],
            "row_count": len(rows),
            "fewest": fewest,
            "backend": variables.get(name, 0),
            "needs_grad": int(needs_grad),
            "seen": list(seen),
            "seen_count": len(seen),
            **finish,
        }
        # An array's dtype is known by where it lies, and must stay there.
        kept = [getattr(arguments[place], "dtype", None) for place in seen]
        # Never waited for: whoever holds it may be a thread that a fork has left behind.
        if self._changing.acquire(blocking=False):
            try:
                self._enter(head, kept)
            finally:
                self._changing.release()

    def _enter(self, head: Mapping[str, Any], kept: Any) -> None:
        if self._native is not None:
            self._keep(Table(head, kept, self._native.rows))
        elif not self._is_without:
            self._heads = [*self._heads[1 - self._most :], (head, kept)]
            self.recall = self._begin

    def _begin(self, arguments: Arguments, differentiating: bool) -> Any:
        """The operator is called again: time to have native code made, which one call alone would not pay for."""
        if not self._changing.acquire(blocking=False):
            return None
        try:
            heads, self._heads = self._heads, []
            self._native = native = code()
            self._is_without = native is None
            if native is None or _variable is None:
                self.recall = _nothing
                return None
            for head, kept in heads:
                self._keep(Table(head, kept, native.rows))
            self._numbers[1:3] = array("q", map(id, _variable))
            self.recall = native.recall(self._numbers.buffer_info()[0])
        finally:
            self._changing.release()
        return self.recall(arguments, differentiating)

    def _keep(self, table: Table) -> None:
        """In the place of the oldest where there are too many."""
        place = len(self._tables)
        if place < self._most:
            self._tables.append(table)
        else:
            place, self._oldest = self._oldest, (self._oldest + 1) % self._most
        replaced = self._tables[place]
        self._numbers[len(REGISTER) + place] = table.address
        self._numbers[0] = len(self._tables)
        self._tables[place] = table
        del replaced  # which nothing points to any more

    def forget(self) -> None:
        """Know no call."""
        with self._changing:
            self.recall, self._native, self._is_without = _nothing, None, False
            self._numbers[0] = self._oldest = 0
            self._tables.clear()
            self._heads = []
