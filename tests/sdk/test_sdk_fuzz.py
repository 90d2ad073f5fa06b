"""Nonsense at every function."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import normgrad
from conftest import environment
from support.long_mode import LONG

CALLS = 100_000 if LONG else 10_000


@pytest.mark.parametrize("seed", [1, 2])
def test_statuses_only_no_crash_no_leak(home: Path, seed: int) -> None:
    variables = environment(home, PYTHONPATH=str(Path(normgrad.__file__).parents[1]))
    command = [sys.executable, "-X", "faulthandler", Path(__file__).with_name("fuzz.py")]
    done = subprocess.run(
        [*command, home / "lib64" / "libascendcl.so", str(CALLS), str(seed)],
        capture_output=True,
        text=True,
        check=False,
        env=variables,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    counted = re.match(r"(\d+) calls, \d+ plans, \d+ runs, grown by -?\d+ KiB, never: \[\]", done.stdout)
    assert counted, done.stdout
    assert int(counted[1]) >= CALLS
