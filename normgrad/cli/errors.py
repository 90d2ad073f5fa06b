"""What a command raises for input that it cannot use, and how it says so."""

from __future__ import annotations

import argparse
from pathlib import Path


class BadInput(Exception):
    """Input that a command cannot use; the text is the line that the user reads."""


def printable(text: str) -> str:
    """Return a text with escapes for its control characters: names in a file must not reach the terminal as commands.

    Examples
    --------
    >>> printable("weight\\x1b[31m")
    'weight\\\\x1b[31m'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(text: object) -> str:
    """A text on one line, printable."""
    return printable(" ".join(str(text).split()))


def reason(error: BaseException) -> str:
    """What another library's exception says, on one line; its name where it says nothing."""
    text = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
    return one_line(text) or type(error).__name__


def nonempty_path(text: str) -> Path:
    """The type of an argument that names a file or a folder: an empty name, as of an unset variable, is none."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return Path(text)
