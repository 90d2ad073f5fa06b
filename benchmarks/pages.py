"""Write the generated parts of the pages and their charts from benchmarks/results: ``python benchmarks/pages.py``.

Run it after new results; tests compare what it would write with the pages.
"""

from __future__ import annotations

import accuracy_page
import speed_pages


def main() -> None:
    """Write every file."""
    for path, content in (speed_pages.written() | accuracy_page.written()).items():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
