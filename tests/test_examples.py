"""The programs in examples/ run, check their own results, and are all listed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

#: The arguments of every example, and the library that it needs.
ARGUMENTS: dict[str, tuple[list[str], str]] = {
    "numpy_layer_norm.py": ([], "numpy"),
    "plan_and_stream.py": ([], "numpy"),
    "judge_a_kernel.py": ([], "numpy"),
    "torch_model.py": (["--device", "cpu"], "torch"),
    "torch_override.py": (["--device", "cpu", "--steps", "2", "--batch", "2", "--size", "16"], "torch"),
    "jax_training.py": ([], "jax"),
}
#: sync_batch_norm.py needs several processes: tests/torch/test_torch_sync_batch_norm.py runs it.
ELSEWHERE = {"sync_batch_norm.py"}


def test_every_example_is_run_and_listed() -> None:
    found = {path.name for path in EXAMPLES.glob("*.py")}
    assert found == ARGUMENTS.keys() | ELSEWHERE
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    assert listed == found


def test_every_program_in_cpp_is_listed() -> None:
    listed = set(re.findall(r"\]\((\w+\.cpp)\)", (EXAMPLES / "cpp" / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.name for path in (EXAMPLES / "cpp").glob("*.cpp")}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_example(name: str) -> None:
    arguments, library = ARGUMENTS[name]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
