"""Commands run on a terminal of a given width."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys


def run_on_terminal(*argv: str, columns: int = 80, **environment: str) -> str:
    """What ``normgrad`` with these arguments writes to a terminal, without colours and control sequences."""
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    path = os.pathsep.join(part for part in sys.path if part)
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "normgrad", *argv],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**kept, "TERM": "xterm-256color", "PYTHONPATH": path, **environment},
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
    os.close(ours)
    process.wait(timeout=120)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode()).replace("\r\n", "\n")
