"""The tree, made once, and programs built against it.

``NORMGRAD_TEST_LONG=1`` is the long mode: 100,000 calls for the fuzzer, memcheck for every program.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from normgrad import sdk

PROGRAMS = Path(__file__).parent / "programs"
SAMPLES = Path(__file__).parents[2] / "examples" / "cpp"
LIBRARIES = ("-lascendcl", "-lnnopbase", "-lopapi_nn", "-lopapi_math")


Build = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def _reason_to_skip() -> str | None:
    if not sys.platform.startswith("linux"):
        return "the SDK is for Linux"
    if not (shutil.which("cc") and shutil.which("g++")):
        return "there is no C and C++ compiler (cc, g++)"
    try:
        import cffi  # noqa: F401
    except ImportError:
        return "cffi is not installed"
    try:
        sdk.tree._shared_python()
    except sdk.SdkError as problem:
        return str(problem)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _reason_to_skip()
    if reason is None:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree in CANN's layout."""
    return sdk.build(tmp_path_factory.mktemp("sdk") / "tree with a space")


@pytest.fixture(scope="session")
def build(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Build a program against the tree, as a program written for CANN is built."""
    folder = tmp_path_factory.mktemp("programs")

    def make(source: Path, *flags: str, libraries: Sequence[str] = LIBRARIES, standard: str = "c++11") -> Path:
        program = folder / f"{source.stem}-{abs(hash((source, flags, tuple(libraries), standard)))}"
        if program.exists():
            return program
        include = home / "include"
        command = ["g++", f"-std={standard}", "-O1", "-Wall", "-Wextra", "-Werror", str(source)]
        command += [f"-I{include}", f"-I{include}/aclnnop", f"-I{include}/aclnn", f"-L{home}/lib64", *libraries]
        done = subprocess.run(
            [*command, "-pthread", *flags, "-o", program], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return program

    return make


def environment(home: Path, **more: str) -> dict[str, str]:
    """What a program gets: the tree's libraries, and nothing that tells Python where it is."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NORMGRAD_", "VIRTUAL"))
    }
    return kept | {"ASCEND_HOME_PATH": str(home), "LD_LIBRARY_PATH": f"{home}/lib64"} | more


@pytest.fixture(scope="session")
def run(home: Path) -> Run:
    """Run a program in an environment where only the tree is known."""

    def start(*command: str | Path, timeout: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=environment(home, **variables),
        )

    return start


def python_flags() -> list[str]:
    """Flags for a program that has a Python of its own."""
    library = sdk.tree._shared_python()
    return [f"-I{sysconfig.get_path('include')}", str(library), f"-Wl,-rpath,{library.parent}"]
