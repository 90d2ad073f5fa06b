"""``normgrad sdk DIR``: the tree that programs written for CANN's operators build against."""

from __future__ import annotations

import argparse

from normgrad.sdk import __main__ as module

NAME = "sdk"
HELP = "make a tree (headers, libraries, set_env.sh) against which programs written for CANN build and run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("directory", metavar="DIR", help="where to make it; an earlier tree there is replaced")


def execute(arguments: argparse.Namespace) -> int:
    """Make the tree."""
    return module.main([arguments.directory])
