"""The wheel and the source distribution: built, listed, installed into a fresh folder and run from there."""

from __future__ import annotations

import email
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import normgrad

ROOT = Path(__file__).parents[1]
VERSION = normgrad.__version__
#: Every file of the package is one of these.
SUFFIXES = {".py", ".pyi", ".h", ".c", ".typed"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed"),
]


def run(*arguments: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, target: Path, kind: str, **environment: str) -> Path:
    """Build one distribution with the project's own backend, which needs no network."""
    run("-m", "hatchling", "build", "-t", kind, "-d", target, cwd=source, **environment)
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist", GITHUB_REPOSITORY="")


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"normgrad-{VERSION}"


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the source distribution, which must therefore be complete."""
    return build(unpacked, tmp_path_factory.mktemp("wheel"), "wheel", GITHUB_REPOSITORY="")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    run("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", folder, wheel, cwd=folder)
    return folder


def files(folder: Path) -> set[str]:
    """The files under a folder of the working copy, but for the caches of Python and of tools."""
    found = (path.relative_to(ROOT) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if not any(part.startswith((".", "__pycache__")) for part in path.parts)}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(f"normgrad-{VERSION}.dist-info/METADATA"))


def description(wheel: Path) -> str:
    payload = metadata(wheel).get_payload(decode=True)
    assert isinstance(payload, bytes)
    return payload.decode("utf-8")


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"normgrad-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = {name for name in names if ".dist-info/" not in name}
    assert package == files(ROOT / "normgrad")
    assert {Path(name).suffix for name in package} == SUFFIXES
    assert {"normgrad/py.typed", "normgrad/operators/__init__.pyi", "normgrad/sdk/include/acl/acl.h"} <= package
    assert f"normgrad-{VERSION}.dist-info/licenses/LICENSE" in names


def test_the_source_distribution_has_what_the_checks_need(unpacked: Path) -> None:
    names = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    for folder in ("normgrad", "tests", "docs", "examples"):
        assert files(ROOT / folder) <= names
    assert {"dev.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= names
    assert not any(name.startswith((".venv", ".git/", "build/")) or "__pycache__" in name for name in names)


def test_the_installed_package_runs(installed: Path, tmp_path: Path) -> None:
    program = (
        "import numpy as np, normgrad\n"
        "output, mean, rstd = normgrad.layer_norm(np.array([[0, 2], [4, 8]], np.float32), 2, eps=0)\n"
        "print(normgrad.__file__, output.tolist(), mean.tolist())"
    )
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    said = run("-c", program, cwd=tmp_path, PYTHONPATH=path)
    assert said.split(" ", 1) == [
        str(installed / "normgrad" / "__init__.py"),
        "[[-1.0, 1.0], [-1.0, 1.0]] [[1.0], [6.0]]\n",
    ]
    command = next((installed / "bin").glob("normgrad*"))
    if command.suffix != ".exe":
        assert VERSION in run(command, "--version", cwd=tmp_path, PYTHONPATH=path)


def test_no_link_of_the_description_is_dead_on_an_index(wheel: Path) -> None:
    text = description(wheel)
    assert text.startswith("# normgrad\n")
    assert relative_links(text) == []
    assert metadata(wheel)["Project-URL"] is None  # nobody knows where the repository is


def test_a_build_on_github_links_into_the_repository(unpacked: Path, tmp_path: Path) -> None:
    home = "https://github.com/someone/normgrad"
    wheel = build(unpacked, tmp_path, "wheel", GITHUB_REPOSITORY="someone/normgrad", GITHUB_SHA="abc")
    text = description(wheel)
    assert relative_links(text) == []
    for name in re.findall(rf"\({home}/(?:blob|raw)/abc/([^)#]+)", text):
        assert (ROOT / name).exists(), name
    assert f"({home}/raw/abc/docs/evidence/models.svg)" in text
    assert f"({home}/blob/abc/docs/guides/pytorch.md)" in text
    assert f"Repository, {home}" in (metadata(wheel).get_all("Project-URL") or [])


def relative_links(text: str) -> list[str]:
    return [target for target in re.findall(r"\]\(([^)]+)\)", text) if not target.startswith("https://")]
