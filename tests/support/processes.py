"""Code run in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys


def run_python(code: str, **environment: str) -> str:
    """What the code prints; it must end well."""
    path = os.pathsep.join(part for part in sys.path if part)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
