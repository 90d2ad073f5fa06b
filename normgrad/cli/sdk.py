"""Create the tree that programs written for CANN's operators build against: headers, libraries, set_env.sh.

A tree that normgrad created before is updated. Files that normgrad did not write, such as a CANN installation's, are
never touched: the command refuses, names the first of them, and changes nothing.
"""

from __future__ import annotations

import argparse
import shlex

from normgrad.cli.errors import BadInput
from normgrad.sdk import SdkError, build

NAME = "sdk"
HELP = "create the tree that programs written for CANN build against"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("directory", metavar="DIR", help="the folder to create, or one that an earlier call created")


def execute(arguments: argparse.Namespace) -> int:
    """Create the tree and print how to use it."""
    try:
        home = build(arguments.directory)
    except SdkError as problem:
        raise BadInput(str(problem)) from problem
    print(f"The SDK is in {home}. To use it in a shell:\nsource {shlex.quote(f'{home}/set_env.sh')}")
    return 0
