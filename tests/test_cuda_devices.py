"""On which GPUs normgrad runs, and what becomes of calls on others: with stand-ins for PyTorch and its GPUs."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import normgrad.torch
from normgrad.backends import backend_for
from normgrad.cli import main
from normgrad.contract.plan import Problem
from normgrad.contract.status import ContractError
from normgrad.contract.view import Memory, View
from normgrad.cuda import devices
from normgrad.torch import formulas, heuristics, sync_batch_norm_function
from support.processes import run_python

H200, A100, T4 = ("NVIDIA H200", (9, 0)), ("NVIDIA A100", (8, 0)), ("Tesla T4", (7, 5))


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    asked = devices.problem, devices.installation_problem
    for function in asked:
        function.cache_clear()
    yield
    for function in asked:
        function.cache_clear()


class _Properties:
    total_memory = 1 << 34

    def __init__(self, name: str, capability: tuple[int, int]) -> None:
        self.name, (self.major, self.minor) = name, capability


def _machine(
    monkeypatch: pytest.MonkeyPatch,
    *gpus: tuple[str, tuple[int, int]],
    cuda: str | None = "13.0",
    hip: str | None = None,
    missing: str = "",
    has_driver: bool = True,
) -> None:
    """Let PyTorch be built for something and see these GPUs."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: gpus[index][1])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: gpus[index][0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: _Properties(*gpus[index]))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == missing else find_spec(name, *rest),
    )

    def load(name: str) -> None:
        if not has_driver:
            raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(devices, "ctypes", SimpleNamespace(CDLL=load))


MACHINES: dict[str, tuple[tuple[Any, ...], dict[str, Any], str | None]] = {
    "H200": ((H200,), {}, None),
    "A100": ((A100,), {}, None),
    "old GPU": ((T4,), {}, "Tesla T4 has compute capability 7.5, and must have 8.0 or later"),
    "ROCm": ((H200,), {"cuda": None, "hip": "6.4"}, "PyTorch is built for ROCm 6.4, and must be built for CUDA"),
    "no CUDA": ((), {"cuda": None}, "PyTorch is built without CUDA"),
    "no GPU": ((), {}, "PyTorch finds no GPU"),
    "no Triton": ((H200,), {"missing": "triton"}, r"Triton is not installed: pip install 'normgrad\[cuda\]'"),
    "no cuda-bindings": ((H200,), {"missing": "cuda.bindings"}, "cuda-bindings is not installed: pip install"),
    "no driver": ((H200,), {"has_driver": False}, r"the driver library libcuda.so.1 cannot be loaded"),
}
every_machine = pytest.mark.parametrize(("gpus", "options", "problem"), MACHINES.values(), ids=MACHINES)
others = pytest.mark.parametrize(
    ("gpus", "options", "problem"),
    [machine for machine in MACHINES.values() if machine[2]],
    ids=[name for name, machine in MACHINES.items() if machine[2]],
)


def _matches(pattern: str | None, text: str | None) -> bool:
    return text is None if pattern is None else text is not None and re.search(pattern, text) is not None


@every_machine
def test_the_reason(gpus: Any, options: Any, problem: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, *gpus, **options)
    assert _matches(problem, devices.problem(0))


def test_a_module_without_its_package_is_not_installed() -> None:
    assert not devices._is_installed("no_such_package.module")


def test_every_gpu_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, H200, T4)
    assert devices.problem(0) is None
    assert "7.5" in str(devices.problem(1))


def test_without_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "PyTorch is not installed: pip install 'normgrad[cuda]'" in str(devices.problem(0))


def test_asking_imports_no_triton() -> None:
    code = "import sys; from normgrad.cuda import devices; devices.problem(0); print('triton' in sys.modules)"
    assert run_python(code) == "False\n"


def _on_gpu(name: str, *shape: int) -> View:
    address = 4096 * (1 + hash(name) % 1000)
    strides = (shape[1], 1) if len(shape) > 1 else (1,)
    return View(address, shape, strides, normgrad.contract.dtypes.FLOAT32, Memory(address, 1024, "cuda:0"))


@others
def test_the_backend_is_refused_with_the_reason(
    gpus: Any, options: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _machine(monkeypatch, *gpus, **options)
    views = {"input": _on_gpu("input", 4, 3), "mean": _on_gpu("mean", 3), "invstd": _on_gpu("invstd", 3)}
    with pytest.raises(ContractError, match=problem) as caught:
        backend_for(Problem(normgrad.batch_norm_stats.signature, views, {"eps": 1e-5}))
    assert caught.value.status == 561003
    assert "batch_norm_stats: the backend cuda does not run on cuda:0: " in str(caught.value)


@every_machine
def test_info(
    gpus: Any, options: Any, problem: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _machine(monkeypatch, *gpus, **options)
    monkeypatch.delenv("NORMGRAD_BACKEND", raising=False)
    assert main(["info"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(f"cuda for cuda, does not run: {problem}" if problem else "cuda for cuda, in use", out)


def test_info_of_gpus_of_which_one_is_too_old(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _machine(monkeypatch, H200, T4)
    main(["info"])
    out = " ".join(capsys.readouterr().out.split())
    assert "cuda for cuda, cuda:0 in use; cuda:1 does not run: Tesla T4 has compute capability 7.5" in out


@every_machine
def test_modules_and_override_leave_other_gpus_to_pytorch(
    gpus: Any, options: Any, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _machine(monkeypatch, *gpus, **options)
    seen: list[str] = []
    with torch.no_grad(), FakeTensorMode(), _Seen(seen):
        normgrad.torch.LayerNorm(8, device="cuda")(torch.empty(4, 8, device="cuda"))
        normgrad.torch.GroupNorm(2, 8, device="cuda")(torch.empty(4, 8, 3, device="cuda"))
        on_gpu = torch.empty(4, 8, device="cuda")
        reason = heuristics.obstacle(on_gpu, None, None)
        assert reason is None if problem is None else re.search(problem, reason)
        assert sync_batch_norm_function._steps(on_gpu) is (formulas if problem else torch.ops.normgrad)
    ours = [name for name in seen if name.startswith("normgrad::")]
    assert ours == ([] if problem else ["normgrad::layer_norm", "normgrad::group_norm"])


class _Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._names.append(function._schema.name)
        return function(*args, **(kwargs or {}))
