"""What type checkers make of the operators: mypy and pyright on the same programs."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from normgrad.operators import OPERATORS
from support import stubs

ROOT = Path(__file__).parents[1]
CHECKERS = ["mypy", "pyright"]

NUMPY = """
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import normgrad

x, c, n = np.ones((2, 4), np.float16), np.ones(4, np.float32), np.ones(1, np.int32)
A = NDArray[Any]
Masked = A | Any

# Statistics are float32 beside float16 data, so that the dtype is left open.
assert_type(normgrad.layer_norm(x, [4]), tuple[A, A, A])
assert_type(normgrad.layer_norm(x, 4, c, c, eps=1e-6, product="Atlas A2"), tuple[A, A, A])
assert_type(normgrad.layer_norm_backward(x, x, 4, c, c, c), tuple[A, A, A])
assert_type(normgrad.layer_norm_backward(x, x, 4, c, c, output_mask=[True] * 3), tuple[Masked, Masked, Masked])
assert_type(normgrad.group_norm(x, None, c, 2, 4, 1, 2), tuple[A, A, A])
assert_type(normgrad.group_norm_backward(x, x, c, c, None, N=2, C=4, HxW=1, group=2), tuple[A, A, A])
assert_type(normgrad.batch_norm_stats(x), tuple[A, A])
assert_type(normgrad.batch_norm_gather_stats_with_counts(x, c, c, None, None, 0.1, 1e-5, c), tuple[A, A])
assert_type(normgrad.batch_norm_elemt(x, None, None, c, c), A)
assert_type(normgrad.batch_norm_reduce_backward(x, x, c, c, c), tuple[A, A, A, A])
assert_type(normgrad.batch_norm_elemt_backward(x, x, c, c, c, c, c, n), A)
assert_type(normgrad.layer_norm.plan(x, 4, out=(x, c, None)), normgrad.Plan)
assert_type(normgrad.batch_norm_elemt.plan(x, c, c, c, c, out=x), normgrad.Plan)
"""

TORCH = """
import torch
from torch import Tensor
from typing_extensions import assert_type

import normgrad

x, c, n = torch.ones(2, 4), torch.ones(4), torch.ones(1)
assert_type(normgrad.layer_norm(x, (4,), c), tuple[Tensor, Tensor, Tensor])
assert_type(normgrad.layer_norm_backward(x, x, [4], c, c), tuple[Tensor, Tensor, Tensor])
assert_type(normgrad.group_norm(x, c, c, 2, 4, 1, 2), tuple[Tensor, Tensor, Tensor])
assert_type(normgrad.group_norm_backward(x, x, c, c, c, 2, 4, 1, 2), tuple[Tensor, Tensor, Tensor])
assert_type(normgrad.batch_norm_stats(x), tuple[Tensor, Tensor])
assert_type(normgrad.batch_norm_gather_stats_with_counts(x, c, c, c, c, 0.1, 1e-5, n), tuple[Tensor, Tensor])
assert_type(normgrad.batch_norm_elemt(x, c, c, c, c), Tensor)
assert_type(normgrad.batch_norm_reduce_backward(x, x, c, c, c), tuple[Tensor, Tensor, Tensor, Tensor])
assert_type(normgrad.batch_norm_elemt_backward(x, x, c, c, c, c, c, n), Tensor)
assert_type(normgrad.layer_norm_backward.plan(x, x, 4, c, c, out=(x, c, c)), normgrad.Plan)
"""

JAX = """
import jax
import jax.numpy as jnp
from typing_extensions import assert_type

import normgrad
from normgrad.jax import group_norm, layer_norm

x = jnp.ones((2, 4))
assert_type(layer_norm(x, 4), jax.Array)
assert_type(group_norm(x, 2, x[0]), jax.Array)
assert_type(normgrad.batch_norm_elemt(x, None, None, x[0], x[0]), jax.Array)
"""

WRONG = {
    "text for an array": 'normgrad.layer_norm("x", [4])',
    "text for a weight": 'normgrad.layer_norm(x, [4], "weight")',
    "a list for an array": "normgrad.batch_norm_stats([1.0, 2.0])",
    "a number for the statistics": "normgrad.layer_norm_backward(x, x, [4], 0.5, 1.0)",
    "text for a shape": 'normgrad.layer_norm(x, "4")',
    "a missing argument": "normgrad.group_norm(x, None, None, 2, 4, 1)",
    "an unknown argument": "normgrad.batch_norm_stats(x, epsilon=1e-5)",
    "an array for a tuple": "normgrad.layer_norm(x, [4], out=x)",
    "too many results": "a, b, d = normgrad.batch_norm_stats(x)",
    "a result as text": "text: str = normgrad.batch_norm_elemt(x, c, c, c, c)",
    "a plan without arrays to write to": "normgrad.batch_norm_stats.plan(x)",
    "text in a plan": 'normgrad.batch_norm_stats.plan("x", out=(c, c))',
}


def test_the_stub_is_what_the_annotations_say() -> None:
    assert stubs.path().read_text(encoding="utf-8") == stubs.text(), "PYTHONPATH=tests python -m support.stubs"


@pytest.mark.parametrize("name", OPERATORS)
def test_annotations_match_the_contracts_table(name: str) -> None:
    """Which arguments may be None, and how many results there are, stand in the table of parameters too."""
    operator = OPERATORS[name]
    annotations = operator.__annotations__
    signature = operator.signature
    assert annotations["return"].count("ArrayT") == len(signature.output_names)
    for parameter in signature.parameters:
        if parameter.name in annotations and hasattr(parameter, "optional"):
            base = "ArrayT" if parameter.name == "input" else "Array"
            assert annotations[parameter.name] == base + " | None" * parameter.optional, parameter.name


@functools.cache
def why_not(checker: str) -> str:
    """Why a type checker cannot be used here, or nothing."""
    if importlib.util.find_spec(checker) is None:
        return f"{checker} is not installed"
    if checker == "pyright" and shutil.which("node") is None:
        return "pyright needs Node.js"
    try:  # pyright's first start downloads its program
        subprocess.run([sys.executable, "-m", checker, "--version"], check=True, capture_output=True, timeout=120)
    except subprocess.SubprocessError as error:
        return f"{checker} does not start: {error}"
    return ""


def wrong_lines(checker: str, program: str, folder: Path) -> set[int]:
    """The lines of a program that a type checker reports."""
    if why_not(checker):
        pytest.skip(why_not(checker))
    (folder / "program.py").write_text(program, encoding="utf-8")
    # A configuration of its own: the repository's leaves out other libraries' types.
    (folder / "mypy.ini").write_text(f"[mypy]\nstrict = True\nmypy_path = {ROOT.as_posix()}\n", encoding="utf-8")
    (folder / "pyrightconfig.json").write_text(
        f'{{"typeCheckingMode": "standard", "extraPaths": ["{ROOT.as_posix()}"]}}', encoding="utf-8"
    )
    command = {
        "mypy": ["-m", "mypy", "--no-error-summary", "--follow-imports=silent", "program.py"],
        "pyright": ["-m", "pyright", "--pythonpath", sys.executable, "program.py"],
    }[checker]
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    print(done.stdout)  # for whoever reads why a test failed
    return {int(line) for line in re.findall(r"program\.py:(\d+)(?::\d+)?(?: -|:) error", done.stdout)}


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize(("library", "program"), [("numpy", NUMPY), ("torch", TORCH), ("jax", JAX)])
def test_results_have_the_type_of_the_input(library: str, program: str, checker: str, tmp_path: Path) -> None:
    """The last line is wrong: a checker that knows nothing of the library would pass everything."""
    pytest.importorskip(library)
    program += "text: str = normgrad.batch_norm_elemt(x, None, None, x, x)"
    assert wrong_lines(checker, program, tmp_path) == {len(program.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_wrong_calls_are_errors(checker: str, tmp_path: Path) -> None:
    head = "import numpy as np\nimport normgrad\nx = np.ones((2, 4), np.float32)\nc = np.ones(4, np.float32)\n"
    first = len(head.splitlines()) + 1
    wrong = wrong_lines(checker, head + "\n".join(WRONG.values()), tmp_path)
    assert wrong == set(range(first, first + len(WRONG)))
