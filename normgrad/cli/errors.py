"""What a command raises for input that it cannot use."""

from __future__ import annotations


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
