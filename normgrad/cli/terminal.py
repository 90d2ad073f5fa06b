"""Where the commands print, and how they show progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from rich.console import Console as RichConsole
from rich.progress import track

_NO_LIMIT = 1 << 20
_NARROWEST = 60  # columns; a narrower terminal folds the lines itself, and loses nothing

Item = TypeVar("Item")


class Console(RichConsole):
    """A terminal, or plain text for a pipe, a file or a dumb terminal: nothing folded, shortened or padded there.

    A closed pipe is the caller's to handle.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        stream = sys.stderr if stderr else sys.stdout
        self.is_plain = (
            stream is None or not stream.isatty() or os.environ.get("TERM", "").lower() in ("dumb", "unknown")
        )
        # Without a height Rich takes a dumb terminal for one of 80 columns, and cuts off what is beyond.
        size: dict[str, int] = {"width": _NO_LIMIT, "height": _NO_LIMIT} if self.is_plain else {}
        super().__init__(highlight=False, markup=False, emoji=False, stderr=stderr, **size)  # type: ignore[arg-type]
        if self.width < _NARROWEST:
            self.width = _NARROWEST

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as Rich does; as plain text without the blanks that fill up a table's last column."""
        if not self.is_plain:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        if self.file is not None:  # as it is in a process without one
            self.file.write("\n".join(line.rstrip(" ") for line in captured.get().split("\n")))

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def with_progress(items: Sequence[Item], doing: str) -> Iterable[Item]:
    """The items, with a bar on a terminal while they are worked on."""
    console = Console(stderr=True)
    return track(items, doing, console=console, transient=True, disable=console.is_plain)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show a line on a terminal while the block runs."""
    console = Console(stderr=True)
    if console.is_plain:
        yield
        return
    with console.status(text):
        yield
