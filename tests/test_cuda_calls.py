"""Calls from Python to the launches of a GPU's kernel, with a driver that writes them down."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch

import normgrad
from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.plan import Problem
from normgrad.contract.view import Memory
from normgrad.cuda.backend import _handle_by_object, _Kernel, has_one_device
from normgrad.cuda.driver_launch import DriverLaunches
from normgrad.cuda.launch import ALIGNMENT, Given, Scratch
from normgrad.operators import cache_key
from support.driver import Driver, kernel, step

DEVICE = 3
OFFSET = 512  # in the workspace
COLUMNS = 8


class Backend:
    """Prepares two launches with all tensors and an address in the workspace, whatever the problem."""

    name = "fake"

    def __init__(self) -> None:
        self.driver = Driver(*[8] * 9)
        self.prepared = 0
        self.workspaces: list[weakref.ref[Any]] = []

    def prepare(self, problem: Problem) -> Any:
        self.prepared += 1
        names = list(problem.views)
        arguments = [*(Given(name, FLOAT32, True) for name in names), Scratch(OFFSET, FLOAT32)]
        signature = {f"argument{index}": "*fp32" for index in range(len(arguments))}
        launches = DriverLaunches(
            [step(arguments, {})] * 2, [kernel(signature, [8] * len(arguments))] * 2, names, DEVICE, self.driver
        )
        return _Kernel(4096, DEVICE, launches)

    def allocate(self, nbytes: int, device: str, stream: Any = None) -> Memory:
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        self.workspaces.append(weakref.ref(tensor))
        return Memory(tensor.data_ptr(), nbytes, owner=tensor)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    found = Backend()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE)
    monkeypatch.setattr("normgrad.cuda.backend._current_handle", lambda device: 1000 + device)
    monkeypatch.setattr("normgrad.operators.dispatch.backend_for", lambda problem: found)
    normgrad.layer_norm_backward.dispatch.clear()
    yield found
    normgrad.layer_norm_backward.dispatch.clear()


def arguments(rows: int = 4) -> tuple[Any, ...]:
    x, grad_out = torch.randn(rows, COLUMNS), torch.randn(rows, COLUMNS)
    return grad_out, x, [COLUMNS], torch.randn(rows, 1), torch.rand(rows, 1), torch.randn(COLUMNS)


def addresses(*tensors: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)]


def test_every_launch_has_the_tensors_the_workspace_and_the_current_stream(backend: Backend) -> None:
    for _ in range(3):
        args = arguments()
        del backend.driver.launches[:], backend.workspaces[:]
        results = normgrad.layer_norm_backward(*args)
        one, two = backend.driver.launches
        assert one == two
        *tensors, scratch = one["values"]
        assert tensors == addresses(*args, *results)
        assert (scratch - OFFSET) % ALIGNMENT == 0
        assert one["stream"] == 1000 + DEVICE
        assert [workspace() for workspace in backend.workspaces] == [None]
        assert [tuple(result.shape) for result in results] == [(4, COLUMNS), (COLUMNS,), (COLUMNS,)]
    assert backend.prepared == 1


def test_the_workspace_lives_until_everything_is_launched(backend: Backend) -> None:
    alive: list[bool] = []

    class Watching(Driver):
        def cuLaunchKernelEx(self, *given: Any) -> tuple[int]:  # noqa: N802
            alive.append(backend.workspaces[-1]() is not None)
            return super().cuLaunchKernelEx(*given)

    backend.driver = Watching(*[8] * 9)
    for _ in range(2):
        normgrad.layer_norm_backward(*arguments())
    assert alive == [True] * 4


def test_a_result_that_is_not_wanted(backend: Backend) -> None:
    backend.driver = Driver(*[8] * 8)
    args = (*arguments(), None, [True, False, True])
    for _ in range(3):
        del backend.driver.launches[:]
        grad_input, grad_weight, grad_bias = normgrad.layer_norm_backward(*args)
        assert grad_weight is None
        assert backend.driver.launches[1]["values"][:-1] == addresses(*args, grad_input, grad_bias)


def test_a_refusal_is_the_contracts_error(backend: Backend) -> None:
    args = arguments()
    normgrad.layer_norm_backward(*args)
    del backend.driver.launches[:]
    backend.driver.status = 1
    with pytest.raises(normgrad.ContractError, match="refused a launch: words for 1") as raised:
        normgrad.layer_norm_backward(*args)
    assert raised.value.status == 361001
    assert len(backend.driver.launches) == 1
    backend.driver.status = 0
    normgrad.layer_norm_backward(*args)


def test_no_memory_for_the_workspace_is_the_contracts_error(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments()
    normgrad.layer_norm_backward(*args)
    del backend.driver.launches[:]

    def fails(self: Backend, *layout: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(Backend, "allocate", fails)
    with pytest.raises(normgrad.ContractError, match="the work failed: MemoryError: no room") as raised:
        normgrad.layer_norm_backward(*args)
    assert raised.value.status == 361001
    assert backend.driver.launches == []


def test_the_tensors_device_is_made_the_current_one(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    class Device:
        def __init__(self, device: int) -> None:
            self._device = device

        def __enter__(self) -> None:
            entered.append(self._device)

        def __exit__(self, *error: Any) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "device", Device)
    args = arguments()
    for current, expected in ((DEVICE, []), (0, [DEVICE]), (DEVICE, [])):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=current: device)
        del entered[:]
        normgrad.layer_norm_backward(*args)
        assert entered == expected
    assert backend.prepared == 1


def test_with_one_gpu_nobody_asks_for_the_current_one(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    def current_device() -> int:
        raise AssertionError("asked")

    monkeypatch.setattr(torch.cuda, "current_device", current_device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    has_one_device.cache_clear()
    try:
        normgrad.layer_norm_backward(*arguments())
    finally:
        has_one_device.cache_clear()
    assert len(backend.driver.launches) == 2


def test_a_plan_runs_on_the_stream_that_it_is_given(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normgrad.operators.operator.backend_for", lambda problem: backend)
    args = arguments()
    out = tuple(torch.empty(shape) for shape in ((4, COLUMNS), COLUMNS, COLUMNS))
    plan = normgrad.layer_norm_backward.plan(*args, out=out)
    plan.repeatable = True
    monkeypatch.setattr(Problem, "device", f"cuda:{DEVICE}")  # the tensors are the host's
    for stream in (None, 7, SimpleNamespace(cuda_stream=8)):
        plan.run(stream=stream)
    assert [launch["stream"] for launch in backend.driver.launches] == [1000 + DEVICE] * 2 + [7, 7, 8, 8]
    assert all(launch["values"][:-1] == addresses(*args, *out) for launch in backend.driver.launches)


def test_kernels_for_every_alignment_that_code_is_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on a GPU have another key at another alignment to 16 bytes; on the host one key serves them all."""
    monkeypatch.setattr(cache_key, "_TENSOR_TYPES", {SimpleNamespace})

    def key(address: int, is_cpu: bool) -> Any:
        fake = SimpleNamespace(dtype=torch.float32, shape=(2,), is_cpu=is_cpu, is_cuda=not is_cpu)
        fake.get_device = lambda: 0
        fake.stride, fake.is_neg, fake.data_ptr = (lambda: (1,)), (lambda: False), (lambda: address)
        found: list[Any] = []
        cache_key.add_array_keys(found, [fake], [0])
        return tuple(found)

    assert len({key(address, False) for address in (0x1000, 0x1004, 0x1008, 0x1010, 0x2000)}) == 3
    assert len({key(address, True) for address in (0x1000, 0x1004, 0x1008)}) == 1


def test_the_current_stream_without_the_private_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=1000 + device))
    assert _handle_by_object(DEVICE) == 1000 + DEVICE
