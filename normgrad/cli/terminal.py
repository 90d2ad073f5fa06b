"""Where tables are printed."""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console as RichConsole


class Console(RichConsole):
    """Plain text when piped, and a closed pipe is the caller's to handle."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, stderr=stderr)

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError
