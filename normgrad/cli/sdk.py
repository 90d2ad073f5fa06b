"""Make the tree (headers, libraries, set_env.sh) against which programs written for CANN's operators build and run."""

from __future__ import annotations

import argparse

from normgrad.cli.errors import BadInput
from normgrad.sdk import SdkError, build

NAME = "sdk"
HELP = "make the tree that programs written for CANN build against"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("directory", metavar="DIR", help="where to make it; an earlier tree there is replaced")


def execute(arguments: argparse.Namespace) -> int:
    """Make the tree and say how to use it."""
    try:
        home = build(arguments.directory)
    except (SdkError, OSError) as problem:
        raise BadInput(str(problem)) from problem
    print(f"made {home}\nsource {home}/set_env.sh")
    return 0
