"""What the package shows, and what importing it pulls in."""

from __future__ import annotations

import inspect
import pickle
import pydoc
import re
import types
from importlib import resources
from pathlib import Path

import pytest

import normgrad
from normgrad import ContractError
from normgrad.contract.status import INVALID, Status
from normgrad.operators import OPERATORS
from support.processes import run_python

PUBLIC = {
    "ContractError",
    "Plan",
    "Product",
    "Stream",
    "get_num_threads",
    "set_num_threads",
    "use_product",
    *OPERATORS,
}
EXTRAS = ["torch", "triton", "cffi", "matplotlib", "jax", "safetensors"]
HEAVY = ["numba", "llvmlite", "rich", "scipy", "hypothesis", "pytest", "pandas"]


def test_all_is_the_public_names() -> None:
    assert set(normgrad.__all__) == PUBLIC
    assert normgrad.__all__ == sorted(normgrad.__all__)
    shown = {
        name
        for name, value in vars(normgrad).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert shown == PUBLIC


@pytest.mark.parametrize("modules", [EXTRAS, HEAVY], ids=["extras", "heavy modules"])
def test_importing_pulls_in_none_of(modules: list[str]) -> None:
    code = f"import sys, normgrad; print([name for name in {modules} if name in sys.modules])"
    assert run_python(code).strip() == "[]"


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_module_without_its_library_says_what_to_install(name: str) -> None:
    code = f"""
import sys
sys.modules[{name!r}] = None
try:
    import normgrad.{name}
except ImportError as error:
    print(error)
"""
    assert run_python(code).endswith(f"which is not installed: pip install 'normgrad[{name}]'\n")


def test_a_call_on_numpy_pulls_in_no_extra() -> None:
    code = f"""
import sys, numba
numba.njit(lambda: 0)()
theirs = set(sys.modules)  # Numba imports cffi, where it is installed, when it first compiles
import numpy as np, normgrad, normgrad.testing
x = np.ones((2, 3), np.float32)
normgrad.batch_norm_stats(x)
print([name for name in {EXTRAS} if name in sys.modules and name not in theirs])
"""
    assert run_python(code).strip() == "[]"


def test_testing_has_the_oracle_of_every_operator() -> None:
    from normgrad import testing

    assert {"oracle", "compare", "Report", "terms", "bound", "ulp"} <= set(testing.__all__)
    for name, operator in OPERATORS.items():
        ours = list(inspect.signature(operator).parameters)
        theirs = list(inspect.signature(getattr(testing.oracle, name)).parameters)
        assert theirs == [parameter for parameter in ours if parameter not in ("out", "product")]
        assert list(inspect.signature(getattr(testing.terms, name)).parameters) == theirs


SIGNATURES = {
    "layer_norm_backward": "grad_out input normalized_shape mean rstd weight bias output_mask out product",
    "group_norm_backward": "grad_out input mean rstd weight N C HxW group output_mask out product",
    "batch_norm_elemt_backward": "grad_out input mean invstd weight sum_dy sum_dy_xmu counter out product",
    "layer_norm": "input normalized_shape weight bias eps out product",
    "group_norm": "input weight bias N C HxW group eps out product",
    "batch_norm_stats": "input eps out product",
    "batch_norm_gather_stats_with_counts": "input mean invstd running_mean running_var momentum eps counts out product",
    "batch_norm_elemt": "input weight bias mean invstd eps out product",
    "batch_norm_reduce_backward": "grad_out input mean invstd weight input_g weight_g bias_g out product",
}


@pytest.mark.parametrize(("name", "parameters"), SIGNATURES.items())
def test_signatures(name: str, parameters: str) -> None:
    operator = getattr(normgrad, name)
    signature = inspect.signature(operator)
    assert list(signature.parameters) == parameters.split()
    assert all(
        signature.parameters[p].kind is inspect.Parameter.KEYWORD_ONLY
        for p in {"out", "product"} & {*parameters.split()}
    )
    assert operator.__doc__
    assert operator.__name__ == name
    assert repr(operator) == f"<operator {name}>"
    assert list(inspect.signature(operator.plan).parameters) == parameters.split()
    assert pickle.loads(pickle.dumps(operator)) is operator


def test_help_shows_the_arguments_and_their_defaults() -> None:
    shown = pydoc.plain(pydoc.render_doc(normgrad.layer_norm))
    signature = "layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-05, *, out=None, product=None)"
    assert signature in shown
    assert "Added to the variance." in shown
    assert "with every requested output in ``out``" in pydoc.render_doc(normgrad.layer_norm.plan)


def test_wrong_arguments_are_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'input'"):
        normgrad.batch_norm_stats()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        normgrad.batch_norm_stats(1, colour=2)  # type: ignore[call-arg]


def test_an_error_survives_pickling() -> None:
    error = ContractError(INVALID, "layer_norm", "input", "{input} is {{odd}}")
    again = pickle.loads(pickle.dumps(error))
    assert (again.status, again.operator, again.parameter) == (161002, "layer_norm", "input")
    assert str(again) == str(error) == "layer_norm: input is {odd}"


def test_status_codes() -> None:
    expected = {
        "ACLNN_SUCCESS": 0,
        "ACLNN_ERR_PARAM_NULLPTR": 161001,
        "ACLNN_ERR_PARAM_INVALID": 161002,
        "ACLNN_ERR_RUNTIME_ERROR": 361001,
        "ACLNN_ERR_INNER": 561000,
        "ACLNN_ERR_INNER_FIND_KERNEL_ERROR": 561003,
        "ACLNN_ERR_INNER_NULLPTR": 561103,
    }
    assert expected.items() <= {status.name: int(status) for status in Status}.items()


def test_types_are_shipped() -> None:
    assert resources.files("normgrad").joinpath("py.typed").is_file()


def test_no_extra_sets_an_upper_bound_on_triton() -> None:
    """Every PyTorch asks for one version of Triton: an extra that asks for another cannot be installed beside it."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    requirements = re.findall(
        r'"triton([^";]*)', text[text.index("[project.optional-") : text.index("[project.scripts]")]
    )
    assert len(requirements) == 2
    assert all(re.fullmatch(r">=[\d.]+", bounds) for bounds in requirements), requirements
