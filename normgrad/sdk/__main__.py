"""``python -m normgrad.sdk DIR``: the same as ``normgrad sdk DIR``."""

import sys

from normgrad.cli import main

if __name__ == "__main__":
    sys.exit(main(["sdk", *sys.argv[1:]]))
