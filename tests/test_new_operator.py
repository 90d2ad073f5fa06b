"""A new operator: one declaration, and a sentence for every piece that it lacks; shared code does not change for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import normgrad
from normgrad import oracle
from normgrad.contract.arrays import as_numpy
from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.parameters import Attribute, Role, Tensor
from normgrad.contract.plan import Problem
from normgrad.contract.products import Family
from normgrad.contract.rules import dtype_of, elements, floats, one_of, real, shape_of
from normgrad.cpu import backend as cpu_backend
from normgrad.operators import OPERATORS
from normgrad.operators.operator import operator
from support.pieces import PIECES, missing_pieces


@pytest.fixture
def backend() -> str:
    """Run every test once, whatever backends there are."""
    return "cpu"


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_whole(name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    assert missing_pieces(name) == []


def _rows(call: Any) -> int:
    return int(np.prod(call.shape("input")[:-1]))


@operator(
    "aclnnScratchRmsNorm",
    Family.LAYER_NORM,
    (
        Tensor("input", "x", floats, (1, 8)),
        Tensor("weight", "gamma", dtype_of("input", FLOAT32), (1, 1), optional=True),
        Attribute("eps", "epsilon", real),
        Tensor("output", "y", dtype_of("input"), (1, 8), shape_of("input"), Role.OUTPUT),
        Tensor(
            "rstd",
            "rstd",
            one_of(FLOAT32),
            (1, 8),
            elements(_rows, "one per row", preferred=lambda call: (*call.shape("input")[:-1], 1)),
            Role.OUTPUT,
        ),
    ),
)
def scratch_rms_norm(input: Any, weight: Any = None, eps: float = 1e-6, *, out: Any = None, product: Any = None) -> Any:
    """RMSNorm over the last dimension: declared here, and nowhere else."""
    return locals()


def _formula(input: Any, weight: Any = None, eps: float = 1e-6) -> tuple[Any, Any]:
    x = np.asarray(input, np.float64)
    rstd = 1 / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)
    return x * rstd * (1 if weight is None else np.asarray(weight, np.float64)), rstd


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> str:
    name = "scratch_rms_norm"
    monkeypatch.setitem(OPERATORS, name, scratch_rms_norm)
    scratch_rms_norm.dispatch.clear()
    return name


def test_a_declared_operator_is_told_what_it_lacks(declared: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    missing = missing_pieces(declared)
    assert len(missing) == len(PIECES)
    assert "scratch_rms_norm: write its formula in float64, oracle.scratch_rms_norm, in normgrad/oracle/" in missing
    assert "scratch_rms_norm: declare aclnnScratchRmsNorm in normgrad/sdk/include/" in missing
    assert missing_pieces("another") == [
        "another: declare it under @operator in normgrad/operators/, and add it to OPERATORS in its __init__.py"
    ]


@dataclass(frozen=True)
class _Kernel:
    """A CPU kernel, in NumPy."""

    problem: Problem
    workspace_size: int = 0

    def launch(self, addresses: list[int], workspace: int, stream: Any) -> None:
        views = {
            name: as_numpy(view.at(address))
            for (name, view), address in zip(self.problem.views.items(), addresses, strict=True)
        }
        output, rstd = _formula(views["input"], views.get("weight"), self.problem.attributes["eps"])
        views["output"][...] = output
        views["rstd"][...] = rstd


X = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
WEIGHT = np.arange(1, 6, dtype=np.float32)


def _check(results: Any) -> None:
    for result, exact in zip(results, _formula(X, WEIGHT), strict=True):
        assert np.asarray(result).dtype == np.float32
        np.testing.assert_allclose(np.asarray(result), exact, rtol=1e-6)


@pytest.mark.parametrize("where", ["reference", "cpu"])
def test_it_runs_with_no_change_to_shared_code(declared: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMGRAD_BACKEND", where)
    if where == "reference":
        monkeypatch.setattr(oracle, declared, _formula, raising=False)
    else:
        monkeypatch.setitem(cpu_backend._PREPARE, declared, _Kernel)
    for _ in range(2):  # prepared, then from the dispatch cache
        _check(scratch_rms_norm(X, WEIGHT))
    out = np.empty_like(X), np.empty((3, 1), np.float32)
    plan = scratch_rms_norm.plan(X, WEIGHT, out=out)
    plan.run()
    _check(out)
    with pytest.raises(normgrad.ContractError, match="weight is float16"):
        scratch_rms_norm(X, WEIGHT.astype(np.float16))


def test_its_torch_operator_is_derived(declared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from normgrad.torch.kernels import TorchKernel
    from normgrad.torch.schemas import schema

    monkeypatch.setitem(cpu_backend._PREPARE, declared, _Kernel)
    assert schema(scratch_rms_norm) == "(Tensor input, Tensor? weight=None, float eps=1e-06) -> (Tensor, Tensor)"
    library = torch.library.Library("normgrad_scratch", "DEF")
    library.define(declared + schema(scratch_rms_norm))
    library.impl(
        declared,
        TorchKernel(scratch_rms_norm, lambda input, *_: (torch.empty_like(input), input.new_empty((3, 1)))),
        "CPU",
    )
    _check(torch.ops.normgrad_scratch.scratch_rms_norm(torch.from_numpy(X), torch.from_numpy(WEIGHT)))
