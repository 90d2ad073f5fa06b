"""``python -m normgrad``: the command line."""

import sys

from normgrad.cli import main

if __name__ == "__main__":
    sys.exit(main())
