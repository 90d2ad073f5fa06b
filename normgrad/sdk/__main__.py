"""``python -m normgrad.sdk DIR``."""

from __future__ import annotations

import sys

from normgrad.sdk.tree import SdkError, build


def main(arguments: list[str]) -> int:
    """Make the tree; 0, or 2 with one line of words."""
    if len(arguments) != 1:
        print("usage: python -m normgrad.sdk DIR", file=sys.stderr)
        return 2
    try:
        home = build(arguments[0])
    except (SdkError, OSError) as problem:
        print(f"normgrad sdk: {problem}", file=sys.stderr)
        return 2
    print(f"made {home}\nsource {home}/set_env.sh")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
