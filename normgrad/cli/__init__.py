"""The command line: ``normgrad COMMAND``.

A command is a module with ``NAME``, ``HELP``, ``add_arguments(parser)`` and ``execute(arguments)``, which returns the
exit status: 0, or 1 for a check that failed. Bad input is status 2 and one line on the standard error stream.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn, TextIO

import normgrad
from normgrad.cli import bench, cache, cases, check, demo, info, run, sdk
from normgrad.cli.errors import BadInput, one_line, reason

COMMANDS = (demo, info, run, check, cases, bench, cache, sdk)

_BAD_INPUT = 2
# As a shell reports the two signals.
_INTERRUPTED = 130
_PIPE_CLOSED = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name and return the exit status."""
    for stream in (sys.stdout, sys.stderr):
        _never_fail_to_encode(stream)
    try:
        parser = _parser()
        _offer_completions(parser)
        arguments, unknown = parser.parse_known_args(argv)
        if unknown:  # parse_args would name the help of all commands
            arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        arguments.argv = sys.argv[1:] if argv is None else argv  # reports name the command that wrote them
        status: int = arguments.execute(arguments)
        _flush()
        return status
    except BadInput as error:
        return _refuse(str(error), _BAD_INPUT)
    except MemoryError:
        return _refuse("there is not enough memory for this input", _BAD_INPUT)
    except KeyboardInterrupt:
        return _refuse("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        _discard_output()
        return _PIPE_CLOSED
    except OSError as error:
        _discard_output()
        return _refuse(f"cannot write the output: {reason(error)}", _BAD_INPUT)


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments as every other bad input is reported."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message} ({self.prog} --help tells more)")


def _parser() -> _Parser:
    parser = _Parser(
        prog="normgrad",
        description=_folded(
            "LayerNorm, GroupNorm and synchronised BatchNorm, forward and backward, with a bound on the error."
        ),
        epilog=_folded(
            "Exit status: 0; 1 for a check that failed; 2 for bad input, with one line that says what is wrong."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"normgrad {normgrad.__version__}")
    parser.set_defaults(execute=lambda arguments: _print_help(parser), parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    subparsers = {}
    for command in COMMANDS:
        subparsers[command.NAME] = commands.add_parser(
            command.NAME,
            help=command.HELP,
            description=_folded(command.__doc__ or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparsers[command.NAME])
        subparsers[command.NAME].set_defaults(execute=command.execute, parser=subparsers[command.NAME])
    helper = commands.add_parser("help", help="print the help of a command")
    helper.add_argument("command", metavar="COMMAND", nargs="?", choices=subparsers, help=", ".join(subparsers))
    helper.set_defaults(execute=lambda arguments: _print_help(subparsers.get(arguments.command, parser)))
    return parser


def _folded(text: str) -> str:
    """A text of paragraphs for the width of the terminal."""
    width = shutil.get_terminal_size().columns - 2
    return "\n\n".join(textwrap.fill(paragraph, width) for paragraph in text.strip().split("\n\n"))


def _print_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def _offer_completions(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks what could come next, where argcomplete is installed; the process ends with that."""
    if "_ARGCOMPLETE" in os.environ:
        with suppress(ImportError):
            import argcomplete

            argcomplete.autocomplete(parser)


def _refuse(text: str, status: int) -> int:
    print(f"normgrad: {one_line(text)}", file=sys.stderr)
    return status


def _never_fail_to_encode(stream: TextIO) -> None:
    """Let a stream that cannot write a ``×`` write an escape in its place."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")


def _flush() -> None:
    """Write what is buffered while errors can still be reported."""
    if sys.stdout is not None:  # as it is in a process without one
        sys.stdout.flush()


def _discard_output() -> None:
    """Send what is still buffered nowhere, so that the interpreter does not try once more as it ends."""
    with suppress(OSError), open(os.devnull, "wb") as nowhere:  # OSError: the stream has no descriptor
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
