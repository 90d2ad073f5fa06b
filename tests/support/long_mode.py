"""The long mode of the tests, which ``NORMGRAD_TEST_LONG=1`` asks for."""

from __future__ import annotations

import os

LONG = os.environ.get("NORMGRAD_TEST_LONG", "") not in ("", "0")
